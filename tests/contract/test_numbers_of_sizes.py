"""What Python makes of the sizes of arguments, in steps for many sizes: numbers, texts, results,
factors. Each is that of the call, and does not make each size compile by itself."""

import copy
import importlib.util
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

SIZES = (6, 5, 3, 6, 4, 5, 3)
"""None is larger than the first: one compile serves the others."""


ROWS = "%d rows"


class Notes:
    """What a step leaves outside."""

    def __init__(self):
        self.n, self.total, self.last, self.all = 0, 0.0, None, []

    def update(self, value, n):
        self.total += value * n
        self.n += n


def trained(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain(x, y, model, optimizer):
    return trained(model, optimizer, F.cross_entropy(model(x), y))


def length_left(notes, *given):
    loss = plain(*given)
    notes.last = len(given[0])
    return loss.detach()


def rows_counted(notes, *given):
    loss = plain(*given)
    notes.n += given[0].shape[0]
    return loss.detach()


def elements_counted(notes, *given):
    loss = plain(*given)
    notes.n += given[0].numel()
    notes.total += loss.item()
    return loss.detach()


def average_meter(notes, *given):
    loss = plain(*given)
    notes.update(loss.item(), given[0].size(0))
    return loss.detach()


def weighted_sum(notes, *given):
    loss = plain(*given)
    notes.total += loss.item() * len(given[0])
    return loss.detach()


def accuracy(notes, x, y, model, optimizer):
    loss = plain(x, y, model, optimizer)
    notes.total += (model(x).argmax(-1) == y).sum().item() / len(y)
    return loss.detach()


def lists(notes, *given):
    loss = plain(*given)
    notes.all.append((len(given[0]), loss.item() / len(given[0])))
    notes.last = given[0].shape
    return loss.detach()


def results(notes, *given):
    loss = plain(*given)
    return {"loss": loss.item(), "rows": len(given[0]), "half": given[0].shape[0] / 2}


def texts(notes, *given):
    loss = plain(*given)
    notes.last = f"{len(given[0])} rows of {given[0].shape[0]:>4}"
    notes.all.append(f"{given[0].shape} " + ROWS % len(given[1]) + str(given[0].size(0) / 4))
    return loss.detach()


def moving_average(notes, *given):
    loss = plain(*given)
    notes.total = 0.9 * notes.total + 0.1 * len(given[0])
    return loss.detach()


def arithmetic(notes, *given):
    loss, n = plain(*given), len(given[0])
    notes.n += n // 2 + n % 3
    notes.total += n**0.5 + 0.1 * n * 3 + math.sqrt(n) - math.log(n) + round(n / 3, 2)
    return loss.detach()


def factors(notes, x, y, model, optimizer):
    scaled = F.cross_entropy(model(x * x.shape[0] ** -0.5), y, reduction="sum") / len(x)
    return trained(model, optimizer, scaled * math.sqrt(len(y)) * (1 / len(x))).detach()


def counter_as_factor(notes, x, y, model, optimizer):
    notes.n += len(x)
    return plain(x * (1 / (1 + notes.n)), y, model, optimizer).detach()


def tensors_of_sizes(notes, x, y, model, optimizer):
    loss = F.cross_entropy(model(x), y) / torch.tensor(len(x)) * torch.full((), 1 / len(x))
    return trained(model, optimizer, loss).detach()


def rounded_up(notes, x, y, model, optimizer):
    n = math.ceil(len(x) / 2)
    return plain(x[:n], y[:n], model, optimizer).detach()


def second_half(notes, x, y, model, optimizer):
    n = len(x) // 2
    return plain(x[n:], y[n:], model, optimizer).detach()


STEPS = (
    *(length_left, rows_counted, elements_counted, average_meter, weighted_sum, accuracy, lists),
    *(results, texts, moving_average, arithmetic, factors, counter_as_factor, tensors_of_sizes),
    *(rounded_up, second_half),
)


def equal(a, b):
    """Of the same types, numbers of tensors but for rounding."""
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return type(b) is float and math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5)
    return type(a) is type(b) and a == b


def run(function, sizes=SIZES, shapes=None, after=lambda step: None, **options):
    """The compiled step after calls that were eager's; ``after`` looks at it after each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin, notes, others = copy.deepcopy(model), Notes(), Notes()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))

    def step(x, y):
        return function(notes, x, y, model, optimizer)

    chosen = treadle.Options(**options)
    compiled = treadle.compile(
        step, model=model, optimizer=optimizer, shapes=shapes, options=chosen
    )
    for n in sizes:
        x, y = torch.randn(n, 4), torch.randint(3, (n,))
        result, expected = compiled(x, y), function(others, x, y, twin, other)
        assert equal(result, expected), (n, result, expected)
        assert equal(vars(notes), vars(others)), (n, vars(notes), vars(others))
        assert equal(model.weight, twin.weight)
        after(compiled)
    return compiled


@pytest.mark.parametrize("function", STEPS, ids=lambda function: function.__name__)
def test_one_compile_serves_the_other_sizes(function):
    compiled = run(function)
    assert len(compiled.recompiles) == 1, compiled.recompiles


@pytest.mark.parametrize("function", [average_meter, texts, factors], ids=lambda f: f.__name__)
def test_declared_sizes_too(function):
    shapes = treadle.dynamic({"x": {0: "rows"}, "y": {0: "rows"}}, rows=(2, 8))
    assert run(function, (6, 5, 3, 8, 2), shapes).recompiles == ["compiled for rows in 2..8"]


def loops(notes, x, y, model, optimizer):
    loss = sum(F.cross_entropy(model(x[at : at + 1]), y[at : at + 1]) for at in range(len(x)))
    return trained(model, optimizer, loss).detach()


def keys(notes, *given):
    loss = plain(*given)
    notes.last = {given[0].shape[0]: 1}
    return loss.detach()


@pytest.mark.parametrize(("function", "line"), [(loops, "range(len(x))"), (keys, "notes.last =")])
def test_what_needs_the_number_is_compiled_for_it_and_says_where(function, line):
    first, *others = run(function, (6, 4, 6, 3)).recompiles
    assert "each size is compiled separately, because what runs depends on the number x_0" in first
    assert line in first
    assert others
    for why in others:
        assert "compiled for these sizes only, because what runs depends on the number x_0" in why
        assert line in why


def test_decisions_on_numbers_of_sizes_have_a_compile_for_each_answer():
    def decides(notes, *given):
        notes.n += len(given[0])
        if notes.n > 12:
            notes.last = "late"
        return plain(*given).detach()

    assert len(run(decides).recompiles) == 2  # for many sizes, before and after


ATOMS = ("len(x)", "x.shape[0]", "y.size(0)", "x.numel()", "notes.n", "2", "3", "0.5", "0.1")
PAIRS = ("({} + {})", "({} - {})", "({} * {})", "({} / (1 + abs({})))", "({} // (1 + abs({})))")
ONES = ("float({})", "int({})", "abs({})", "math.sqrt(abs({}))", "math.floor({})", "round({}, 1)")
USES = (
    "notes.last = {}",
    "notes.total += {}",
    "notes.all.append({})",
    "notes.last = f'{{{}:.3f}}'",
    "notes.last = str({})",
    "x = x * (1 / (1 + abs({})))",
    "given = {}; notes.all.append((given, given))",
)


def program(draw):
    """The text of a step that makes something of sizes."""

    def expression(depth):
        kind = draw.random()
        if not depth or kind < 0.2:
            return draw.choice(ATOMS)
        if kind < 0.45:
            return draw.choice(ONES).format(expression(depth - 1))
        return draw.choice(PAIRS).format(expression(depth - 1), expression(depth - 1))

    lines = [draw.choice(USES).format(expression(3)) for _ in range(draw.randint(1, 3))]
    body = "\n    ".join([*lines, "return plain(x, y, model, optimizer).detach()"])
    return f"import math\n\n\ndef step(notes, x, y, model, optimizer):\n    {body}\n"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_python_makes_of_sizes_is_that_of_the_call(seed, tmp_path):
    """Never stale, and no size is compiled by itself."""
    path = tmp_path / f"program_{seed}.py"
    path.write_text(program(random.Random(seed)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.plain = plain
    compiled = run(module.step)
    assert len(compiled.recompiles) == 1, (path.read_text(), compiled.recompiles)


def compared(notes, *given):
    loss = plain(*given)
    notes.last = given[0].shape[0] > 4
    return loss.detach()


def bounded(notes, x, y, model, optimizer):
    return plain(x * min(1.0, len(x) / 4), y, model, optimizer).detach()


def late(notes, x, y, model, optimizer):
    notes.n += len(x)
    return plain(x * 2 if notes.n > 20 else x, y, model, optimizer).detach()


@pytest.mark.parametrize("function", [compared, bounded, late], ids=lambda f: f.__name__)
def test_answers_are_those_of_the_call(function):
    """Not of the size that stands in for it in the trace."""
    assert len(run(function, (6, 5, 3, 6, 4, 5, 3, 2, 5)).recompiles) <= 3


BOUNDS = {
    "half": "x[: int(0.5 * len(x))]",
    "rounded": "x[: round(0.3 * len(x)) + 1]",
    "root": "x[: int(len(x) ** 0.5)]",
    "integer_root": "x[: math.isqrt(x.shape[0])]",
    "floor": "x[: math.floor(0.7 * len(x))]",
    "ceiling": "x[math.ceil(0.3 * len(x)) :]",
    "logarithm": "x[: int(math.log2(len(x))) + 1]",
    "whole": "x[: len(x) * 3 // 4]",
    "fraction": "x[: int(len(x) * 2 / 3)]",
    "of_numpy": "x[: int(np.floor(0.6 * x.shape[0]))]",
    "both_ends": "x[int(0.2 * len(x)) : -int(0.3 * len(x)) or None]",
    "narrow": "x.narrow(0, 1, int(0.5 * len(x)))",
    "narrow_from": "torch.narrow(x, 0, int(0.4 * len(x)), int(0.5 * len(x)))",
    "split": "x.split([int(0.8 * len(x)), len(x) - int(0.8 * len(x))])[1]",
    "view": "x[: 2 * int(0.5 * len(x))].view(int(0.5 * len(x)), 8)[:, :4]",
    "arange": "x[torch.arange(int(0.5 * len(x)))]",
    "mask": "x * (torch.arange(len(x)) < int(0.5 * len(x)))[:, None]",
    "zeros": "torch.cat([torch.zeros(int(0.5 * len(x)), 4), x])",
    "ones": "x[:1] * torch.ones((int(0.5 * len(x)), 1))",
    "expand": "x[:1].expand(int(0.5 * len(x)), -1)",
    "repeat": "x[:1].repeat(int(0.5 * len(x)), 1)",
    "roll": "x.roll(int(0.5 * len(x)), 0)",
    "pad": "nn.functional.pad(x, (0, 0, int(0.5 * len(x)), 0))",
    "largest": "x.topk(max(1, int(0.5 * len(x))), 0).values",
    "written": "written(x.clone(), int(0.5 * len(x)))",
}


def written(x, count):
    x[:count] = 0
    return x


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_are_computed_of_a_size_do_not_fix_it(name, tmp_path):
    """Of numbers that PyTorch rounds as Python does or otherwise, such as 0.7 * 10."""
    path = tmp_path / f"bounds_{name}.py"
    path.write_text(
        "import math\n\nimport numpy as np\nimport torch\nfrom torch import nn\n\n\n"
        f"def part(x):\n    return {BOUNDS[name]}\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.written = written
    model = nn.Linear(4, 4)
    weights = torch.arange(1.0, 40.0)[:, None]

    def evaluate(x):
        rows = module.part(model(x))
        return (rows * weights[: len(rows)]).sum(), rows

    step = treadle.compile(evaluate, model=model)
    for n in (23, 20, 10, 17, 22, 13, 7):
        x = torch.randn(n, 4)
        torch.testing.assert_close(step(x), evaluate(x), rtol=1e-4, atol=1e-4)
    assert len(step.recompiles) <= 2, step.recompiles
