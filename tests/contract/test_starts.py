"""A second process that makes the same step traces nothing; one that makes another traces it."""

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from contract.start_programs import COMPILED, HEAD, MODEL, TAIL
from forks import Forks
from treadle.capture.stored.names import builtin_text
from treadle.runtime.store.cache import Cache

PROGRAM = HEAD + MODEL + "# change\n" + COMPILED + TAIL
PLAIN = COMPILED.replace("treadle.compile(train, model=model, optimizer=optimizer)", "train")


def with_change(text: str) -> str:
    """The program, with another state before the first call."""
    return PROGRAM.replace("# change", text)


@dataclass(frozen=True)
class Run:
    """Runs a program in a process of its own, with the caches in ``folder``; gives what it says, by
    the first words of its lines."""

    forks: Forks
    program: Path
    folder: Path

    def __call__(self, text: str) -> dict[str, str]:
        self.program.write_text(text)
        environment = {"TREADLE_CACHE_DIR": str(self.folder / "cache")}
        done = self.forks.run(self.program, environment=environment, quick=True, quiet=True)
        assert done.returncode == 0, done.stderr
        return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.fixture
def run(forks, tmp_path):
    return Run(forks, tmp_path / "program.py", tmp_path)


@pytest.fixture(scope="module")
def first(forks, tmp_path_factory):
    """The program without a change has run once."""
    folder = tmp_path_factory.mktemp("first")
    first = Run(forks, folder / "program.py", folder)
    first(with_change(""))
    return first


@pytest.fixture
def run_after(first, tmp_path):
    """``run``, in a cache that has what the program without a change left."""
    copytree(first.folder / "cache", tmp_path / "cache")
    return replace(first, folder=tmp_path)


def eager_of(text: str) -> str:
    """The same program without treadle, that tells its losses alone."""
    return text.replace(COMPILED, PLAIN).partition('print("untraced"')[0]


def close(told: dict[str, str], expected: dict[str, str]) -> bool:
    pairs = zip(told["losses"].split(), expected["losses"].split(), strict=True)
    numbers = [(float.fromhex(a), float.fromhex(b)) for a, b in pairs]
    return all(abs(a - b) <= 1e-9 * max(abs(b), 1.0) for a, b in numbers)


def test_a_second_process_traces_nothing(run):
    text = with_change("")
    first, second = run(text), run(text)
    assert first["untraced"] == "False"
    assert "the next process traces nothing" in first["start"]
    assert second["untraced"] == "True"
    assert "nothing was traced" in second["start"]
    assert second["losses"] == first["losses"]
    assert second["recompiles"] == "[]"
    assert close(second, run(eager_of(text)))


CHANGES = {
    "a global number": "FACTOR = 3.0",
    "a class attribute": "Net.scale = 0.5",
    "an attribute of the model": "model.slope = 0.1",
    "an entry of a dict": "options['weight'] = 1.0",
    "a function that is called": "def penalty(model):\n    return model.norm.weight.sum()",
    "a method of the model": "Net.forward = lambda self, x: self.norm(x)",
    "a method of one object": "model.norm.forward = lambda x: x",
    "the mode of a module": "model.drop.eval()",
    "a number of a module of PyTorch's": "model.drop.p = 0.5",
    "another module in a list": "model.layers[1] = nn.Linear(8, 8, bias=False)",
    "modules in another order": "model.layers = nn.ModuleList(list(model.layers)[::-1])",
    "one module twice": "model.layers[1] = model.layers[0]",
    "a parameter that is frozen": "model.layers[0].bias.requires_grad_(False)",
    "a hook": "model.norm.register_forward_hook(lambda module, args, out: out * 2)",
    "a hook of a parameter": "model.layers[0].weight.register_hook(lambda grad: grad * 2)",
    "a hook of all modules": "nn.modules.module.register_module_forward_hook(lambda *a: a[2] + 1)",
    "a function of PyTorch's": "nn.functional.leaky_relu = lambda x, slope: x",
    "PyTorch's precision of products": "torch.set_float32_matmul_precision('medium')",
    "the state of the optimizer": "optimizer.step()\n"
    "for p in model.parameters():\n"
    "    optimizer.state[p] = {'step': torch.tensor(3.0), 'exp_avg': torch.ones_like(p),\n"
    "                          'exp_avg_sq': torch.ones_like(p)}",
    "an option of the optimizer": "optimizer.param_groups[0]['amsgrad'] = True",
    "a number of the optimizer": "optimizer.param_groups[0]['lr'] = 0.5",
    "another optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "a gradient that is there": "model.layers[0].weight.grad = torch.ones(8, 8)",
    "the shape of the batch": "batch = torch.randn(4, 8), torch.randn(4, 8)",
    "the type of the batch": "batch = torch.randn(16, 8).t().contiguous().t(), torch.randn(16, 8)",
    "the values of parameters": "with torch.no_grad():\n    model.layers[0].weight.mul_(2)",
}
"""What is another between two processes. The step itself stands ahead of it, and is the same."""
MAKES_NO_DIFFERENCE = {
    "a number of the optimizer",
    "the values of parameters",
    "the state of the optimizer",
}


CTC = """
import torch
import treadle
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CTCLoss()


def train(x, targets, lengths, target_lengths):
    optimizer.zero_grad()
    loss = criterion(model(x).log_softmax(-1), targets, lengths, target_lengths)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(train, model=model, optimizer=optimizer)
targets, lengths = torch.randint(1, 6, (2, 3)), torch.tensor([10, 10])
losses = [step(torch.randn(10, 2, 8), targets, lengths, lengths // 3) for _ in range(3)]
print("losses", *(loss.item().hex() for loss in losses))
print("untraced", step.compiled.untraced)
"""


def test_operators_of_ours_are_known_where_nothing_was_traced(run):
    first, second = run(CTC), run(CTC)
    assert (first["untraced"], second["untraced"]) == ("False", "True")
    assert second["losses"] == first["losses"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_between_processes_is_never_stale(run_after, change):
    text = with_change(CHANGES[change])
    found = run_after(text)
    assert close(found, run_after(eager_of(text))), (found, change)
    assert (found["untraced"] == "True") == (change in MAKES_NO_DIFFERENCE)
    again = run_after(text)
    assert again["losses"] == found["losses"]
    assert again["untraced"] == "True" or "traces again:" in again["start"]


def test_what_did_not_serve_says_what_differs(run_after):
    told = run_after(with_change("model.slope = 0.1"))["start"]
    assert "the capture that another process stored does not fit" in told
    assert "of __main__.Net: slope: float '0.5' became slope: float '0.1'" in told
    assert "does not fit" not in run_after(with_change("model.slope = 0.1"))["start"]


def test_the_step_itself_is_another_one(run_after):
    text = with_change("").replace("* FACTOR", "/ FACTOR")
    found = run_after(text)
    assert found["untraced"] == "False"
    assert close(found, run_after(eager_of(text)))


def test_a_module_beside_the_script(run, tmp_path):
    text = with_change("import beside\nFACTOR = beside.factor")
    text = text.replace("* FACTOR", "* beside.scaled(2.0)")
    beside = tmp_path / "beside.py"
    beside.write_text("factor = 2.0\ndef scaled(x):\n    return x * factor\n")
    assert run(text)["untraced"] == "False"
    assert run(text)["untraced"] == "True"
    beside.write_text("factor = 2.0\ndef scaled(x):\n    return x + factor + 1\n")
    found = run(text)
    assert found["untraced"] == "False"
    assert close(found, run(eager_of(text)))


def test_the_loss_alone_is_asked_for_in_the_step(run):
    """What Python has of a call's tensors is stored as well: a sum of numbers, a text, a print."""
    text = with_change("").replace(
        "    return loss.item()",
        "    total = 2 * loss.item() + 1\n    print('total', f'{total:.4f}')\n    return total",
    )
    first, second = run(text), run(text)
    assert second["untraced"] == "True", first["start"]
    assert second["losses"] == first["losses"]
    assert second["total"] == first["total"]


def make(folder: Path, width: int = 4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, train, treadle.Options(cache_dir=folder, **options)


def compiled(folder: Path, **chosen):
    model, optimizer, train, options = make(folder, **chosen)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options)


def test_a_saved_step_is_not_traced_again(tmp_path):
    x = torch.randn(3, 4)
    step = compiled(tmp_path / "one")
    losses = [step(x) for _ in range(2)]
    step.save(tmp_path / "step.treadle")
    model, optimizer, train, options = make(tmp_path / "two")
    loaded = treadle.load(
        tmp_path / "step.treadle", train, model=model, optimizer=optimizer, options=options
    )
    assert [loaded(x) for _ in range(2)] == losses
    assert loaded.compiled.untraced
    assert loaded.recompiles == []


def test_named_tuples_are_what_their_fields_say(run, tmp_path):
    """The code that Python makes for one belongs to no file, and no module has its variables."""
    text = with_change("import beside").replace(
        "* options", "* beside.Pair(2.0, 3.0).first * options"
    )
    beside = tmp_path / "beside.py"
    made = "from collections import namedtuple\nPair = namedtuple('Pair', '{}')\n"
    beside.write_text(made.format("first last"))
    first, second = run(text), run(text)
    assert second["untraced"] == "True", first["start"]
    assert second["losses"] == first["losses"]
    beside.write_text(made.format("last first"))
    third = run(text)
    assert third["untraced"] == "False"
    assert close(third, run(eager_of(text)))
    assert third["losses"] != first["losses"]


def test_methods_of_frozen_sets_are_told_apart_by_what_is_in_them(tmp_path):
    def steps(known):
        asked = frozenset(known).__contains__

        def train(x):
            return x * 2 if asked("b") else x * 3

        options = treadle.Options(cache_dir=tmp_path)
        return treadle.compile(train, model=nn.Linear(1, 1), options=options)

    x = torch.ones(3)
    for known, factor, untraced in (("ab", 2, False), ("ac", 3, False), ("ba", 2, True)):
        step = steps(known)
        torch.testing.assert_close(step(x), x * factor)
        assert step.compiled.untraced == untraced, step.compiled.start


SAVED = """
path = Path(__file__).with_name("step")
if path.exists():
    step = treadle.load(
        path, train, model=model, optimizer=optimizer,
        options=treadle.Options(cache_dir=path.with_name("later")),
    )
else:
    step = treadle.compile(train, model=model, optimizer=optimizer)
"""
SAVES = "if not path.exists():\n    step.save(path)\n"


def test_a_step_that_another_process_saved_is_not_traced(run):
    text = PROGRAM.replace(COMPILED, SAVED) + SAVES
    first, second = run(text), run(text)
    assert second["untraced"] == "True", first["start"]
    assert second["losses"] == first["losses"]
    assert second["recompiles"] == "[]"
    for change in ("a global number", "a method of the model", "another module in a list"):
        changed = text.replace("# change", CHANGES[change])
        found = run(changed)
        assert found["untraced"] == "False"
        assert "the saved step does not fit" in found["recompiles"]
        assert close(found, run(eager_of(with_change(CHANGES[change]))))
    assert run(text)["untraced"] == "True"  # beside what the cache has of others by now


def test_an_artifact_that_is_gone_is_made_again(tmp_path):
    x = torch.randn(3, 4)
    first = compiled(tmp_path)
    expected = first(x)
    cache = Cache(tmp_path)
    path = cache.path(first.compiled.key, "")
    assert path is not None
    path.unlink()
    second = compiled(tmp_path)
    assert second(x) == expected
    assert not second.compiled.untraced


def test_the_second_shape_of_a_step_is_found_as_well(tmp_path):
    """Of fixed sizes: what serves many is traced again."""
    first, second = compiled(tmp_path, dynamic=False), compiled(tmp_path)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        assert first(x).item() == second(x).item()
        assert second.compiled.untraced
    assert len(second.recompiles) == 1


def test_a_bad_index_is_refused_without_a_trace(tmp_path):
    def steps():
        torch.manual_seed(0)
        table = nn.Embedding(5, 3)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

        def train(index):
            optimizer.zero_grad()
            loss = table(index).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        options = treadle.Options(cache_dir=tmp_path)
        return treadle.compile(train, model=table, optimizer=optimizer, options=options)

    steps()(torch.tensor([1, 2]))
    step = steps()
    with pytest.raises(
        treadle.RuntimeFailure, match=r"argument index is out of range.*0 to 4"
    ) as caught:
        step(torch.tensor([1, 5]))
    assert step.compiled.untraced
    assert "table(index)" in str(caught.value)
    step(torch.tensor([1, 4]))


def test_a_step_that_was_not_traced_is_told_of_as_any_other(tmp_path):
    first, second = compiled(tmp_path), compiled(tmp_path)
    x = torch.randn(3, 4)
    first(x)
    second(x)
    assert second.compiled.untraced
    assert second.graph("captured") == first.graph("captured")
    assert second.graph("planned") == first.graph("planned")
    assert second.summary().operations == first.summary().operations
    told = second.explain()
    assert "nothing was traced" in told
    assert "test_starts.py" in told
    assert "the next process traces nothing" in first.explain()


def test_a_step_that_is_made_in_c_is_no_other_one(tmp_path):
    x = torch.linspace(-2, 2, 9)
    options = treadle.Options(cache_dir=tmp_path)
    for function in (torch.exp, torch.sin, torch.nn.functional.softshrink, torch.exp):
        step = treadle.compile(function, model=nn.Linear(1, 1), options=options)
        torch.testing.assert_close(step(x), function(x))


def test_objects_without_parts_are_told_apart_by_their_names(tmp_path):
    def steps(function):
        class Holder:
            apply = function

        def train(x):
            return x * float(Holder.apply(-2.0))

        options = treadle.Options(cache_dir=tmp_path)
        return treadle.compile(train, model=nn.Linear(1, 1), options=options)

    x = torch.ones(3)
    for function in (np.cos, np.abs, np.sin, np.cos):
        torch.testing.assert_close(steps(function)(x), x * float(function(-2.0)))


def test_a_function_of_pybind_has_a_name():
    """PyTorch has many, each bound to a record that has none."""
    text = builtin_text(torch._C._wrap_tensor_impl)
    assert text.split()[:2] == ["builtin", "torch._C"]
    assert text.endswith("._wrap_tensor_impl")


def test_a_start_in_inference_mode_is_of_use_outside_of_it(tmp_path):
    def steps():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = treadle.Options(cache_dir=tmp_path)
        compiled = treadle.compile(
            lambda x: model(x) * 2, model=model, optimizer=optimizer, options=options
        )
        return model, compiled

    x = torch.randn(5, 4)
    for _ in range(2):
        model, step = steps()
        with torch.inference_mode():
            torch.testing.assert_close(step(x), model(x) * 2)
        is_untraced = step.compiled.untraced
        torch.testing.assert_close(step(x), model(x) * 2)
    assert is_untraced


def test_a_wrong_batch_is_refused_without_a_trace_and_the_next_call_runs(tmp_path):
    first, second = compiled(tmp_path), compiled(tmp_path)
    x = torch.randn(3, 4)
    expected = [first(x).item() for _ in range(2)]
    found = [second(x).item()]
    assert second.compiled.untraced
    with pytest.raises(RuntimeError, match="TR-132"):
        second(torch.randn(3, 5))
    found.append(second(x).item())
    assert found == expected


class Average:
    """Weights that follow those of a model, and what a step is scaled by, as scripts keep them."""

    def __init__(self, model):
        self.scale = torch.tensor([1.0, 2.0])
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.seen = {"sum": torch.zeros(2)}


def averaging(folder):
    """A step that reads and writes tensors which Python's objects hold."""
    model, optimizer, _, options = make(folder)
    average = Average(model)

    def train(x):
        optimizer.zero_grad()
        y = model(x) * average.scale
        loss = y.square().mean() * getattr(average.scale, "factor", 1.0)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average.weights, model.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)
        average.seen["sum"] += y.detach().sum(0)
        return loss.detach()

    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    return step, train, average


HELD_CHANGES = {
    "nothing": (True, lambda a: None),
    "values": (True, lambda a: (a.scale.fill_(3.0), a.weights[0].zero_())),
    "another tensor": (True, lambda a: setattr(a, "scale", torch.tensor([0.5, 4.0]))),
    "a dtype": (False, lambda a: setattr(a, "scale", a.scale.double())),
    "a shape": (False, lambda a: setattr(a, "scale", torch.tensor(3.0))),
    "strides": (False, lambda a: a.weights.__setitem__(0, a.weights[0].t().contiguous().t())),
    "one tensor twice": (False, lambda a: setattr(a, "scale", a.seen["sum"])),
    "an attribute of a tensor": (False, lambda a: setattr(a.scale, "factor", 3.0)),
    "a gradient": (False, lambda a: a.scale.requires_grad_()),
    "a number": (False, lambda a: setattr(a, "scale", 2.0)),
    "an entry of a dict": (False, lambda a: a.seen.__setitem__("more", torch.ones(1))),
}


@pytest.mark.parametrize("change", HELD_CHANGES)
def test_tensors_that_objects_of_pythons_hold(tmp_path, change):
    """An average of weights, a table, a sum of metrics: what differs is never stale."""
    x = torch.randn(3, 4)
    first, *_ = averaging(tmp_path)
    first(x)
    is_same, do = HELD_CHANGES[change]
    compiled, _, mine = averaging(tmp_path)
    _, eager, theirs = averaging(tmp_path)
    do(mine)
    do(theirs)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x))
        torch.testing.assert_close(mine.weights, theirs.weights)
        torch.testing.assert_close(mine.seen, theirs.seen)
    if is_same:
        assert compiled.compiled.untraced, compiled.compiled.start
    else:
        assert not compiled.compiled.untraced


def test_tensors_of_one_memory_are_no_others(tmp_path):
    """Written to as two tensors they are served; as one memory it is what no step may do."""
    x = torch.randn(3, 4)
    first, *_ = averaging(tmp_path)
    first(x)
    second, _, average = averaging(tmp_path)
    average.scale = average.weights[3].detach()
    with pytest.raises(treadle.CaptureError, match="TR-112"):
        second(x)
