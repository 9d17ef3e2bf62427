"""``map`` and ``scan`` of any number of slices: as one loop or one batch, with the numbers and the
gradients of Python's ``for``, in double precision. A round has one slice here: those of several
have a file of their own."""

import copy
import math
import random

import pytest
import torch
from torch import cond, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.capture.control_flow import scans
from treadle.capture.control_flow.bodies import MOST_COPIES
from treadle.capture.control_flow.scans import FEW
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.options import Options, RegionRule, Regions
from treadle.session.breaks import breaks_of
from treadle.util.reasons import ReasonCode

FORWARD, BACKWARD = "treadle.scan.default", "treadle.scan_backward.default"


@pytest.fixture(autouse=True)
def _a_slice_a_round(monkeypatch):
    monkeypatch.setattr(scans, "OPERATIONS", 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 0.9, 4))
        self.register_buffer("table", torch.linspace(-1, 1, 4))
        self.register_buffer("count", torch.zeros(()))
        self.last = torch.zeros(())


def tree_of(function, *trees):
    """``function`` of the leaves of dicts and tuples of one structure."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_of(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(tree_of(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def count_of(xs, dim):
    return count_of(next(iter(xs.values())), dim) if isinstance(xs, dict) else xs.shape[dim]


def plain_map(body, xs, *args):
    """What ``map`` means."""
    rows = [body(tree_of(lambda x, at=at: x[at], xs), *args) for at in range(count_of(xs, 0))]
    return tree_of(lambda *row: torch.stack(row), *rows)


def plain_scan(body, init, xs, dim=0, reverse=False):
    """What ``scan`` means."""
    carry, rows, places = init, [], range(count_of(xs, dim))
    for at in places[::-1] if reverse else places:
        carry, row = body(carry, tree_of(lambda x, at=at: x.select(dim, at), xs))
        rows.append(row)
    rows = rows[::-1] if reverse else rows
    return carry, tree_of(lambda *row: torch.stack(row, dim if dim <= row[0].ndim else 0), *rows)


def plain_cond(pred, yes, no, operands=()):
    return yes(*operands) if bool(pred) else no(*operands)


class Own:
    scan, map, cond = staticmethod(scan), staticmethod(map_over), staticmethod(cond)


class Plain:
    scan, map, cond = staticmethod(plain_scan), staticmethod(plain_map), staticmethod(plain_cond)


def train_with(model, loss, ways, tmp_path, shapes=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(x):
        value = loss(model, x, ways)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if ways is Plain:
        return train
    options = Options(cache_dir=tmp_path, **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options, shapes=shapes)


def recurrent(model, x, ways):
    """What the body uses from outside: modules, parameters, a buffer, and tensors of the step."""
    start, h = model.first(x).mean(0) * 0.1, model.first(x)
    body = lambda c, r: (  # noqa: E731
        torch.tanh(model.second(c)) * model.scale + r * start,
        c.sin() * model.table + r,
    )
    last, rows = ways.scan(body, start * 2, h)
    return last.sum() + rows.square().mean() + model.scale.sum()


def containers(model, x, ways):
    def body(carry, row):
        h, (total, i) = carry["h"], carry["k"]
        kept = {"h": h.sin() * model.scale + row["a"], "k": (total * 0.5 + h.mean(), i + 1)}
        return kept, (h + row["b"].float().to(h.dtype), {"i": i * 2, "t": total.exp()})

    init = {"h": model.scale * 1, "k": (x.sum() * 0.01, torch.zeros((), dtype=torch.int64))}
    xs = {"a": model.first(x), "b": (x * 8).to(torch.int32)}
    last, (rows, more) = ways.scan(body, init, xs)
    numbers = more["i"].to(x.dtype).mean() + last["k"][1]
    return last["h"].sum() + rows.square().mean() + more["t"].mean() + numbers * 1e-3


def backwards_along_columns(model, x, ways):
    body = lambda c, r: (c * 0.5 + r.sin() * model.scale[:3], (c * r, r.sum()))  # noqa: E731
    xs = model.first(x).t()[:3]
    last, (rows, sums) = ways.scan(body, torch.zeros(3, dtype=x.dtype), xs, dim=1, reverse=True)
    assert rows.shape == xs.shape
    assert sums.shape == xs.shape[1:]
    return last.sum() + rows.square().mean() + (sums * x[:, 0]).mean()


def late_and_cut_gradients(model, x, ways):
    """A carried tensor that has a gradient after a slice only, and one that passes none on."""
    body = lambda c, r: ((c[1] * 0.5, r * model.scale, c[2].detach() * 0.5), (c[0], c[2]))  # noqa: E731
    zeros = torch.zeros(4, dtype=x.dtype)
    last, (rows, more) = ways.scan(body, (zeros, zeros + 1, model.scale * 2), x)
    return last[0].sum() + rows.square().mean() + more.sum() * 0.1


def nothing_to_learn(model, x, ways):
    last, rows = ways.scan(lambda c, r: (c * 0.5 + r, c * 1), torch.zeros_like(x[0]), x)
    return (last * model.scale).sum() + (rows * model.scale).mean()


def the_same_twice(model, x, ways):
    last, (a, b) = ways.scan(lambda c, r: (r, (c, c)), model.scale, model.first(x))
    return last.sum() + (a * b.sin()).mean()


def in_place(model, x, ways):
    def body(c, r):
        y = c.clone()
        y[0] = 3
        y.mul_(model.scale)
        return y, r.clone().add_(y)

    last, rows = ways.scan(body, model.scale * 1, model.first(x))
    return last.sum() + rows.square().mean()


def in_a_scan(model, x, ways):
    def body(c, r):
        inner, _ = ways.scan(lambda g, e: ((g + e).tanh() * model.scale, g * 1), c, r)
        return c * 0.5 + inner, inner * 2

    return ways.scan(body, model.scale * 1, torch.stack([model.first(x)] * 13, 1))[1].mean()


def with_a_branch(model, x, ways):
    def body(c, r):
        new = ways.cond(r.sum() > 0, lambda: c * model.scale, lambda: model.second(c).sin() + r)
        return new, c * 1

    return ways.scan(body, model.scale * 1, model.first(x))[1].square().mean()


def rows_by_number(model, x, ways):
    def body(c, r):
        row = F.embedding(r.argmax(), model.first.weight)
        return c * 0.5 + row, model.second.weight[r.argmin()] * c

    return ways.scan(body, model.scale * 1, x)[1].square().mean()


def inside_a_checkpoint(model, x, ways):
    def part(h):
        return ways.scan(lambda c, r: ((c * model.scale + r).tanh(), c * 1), model.scale, h)[1]

    return checkpoint(part, model.first(x), use_reentrant=False).square().mean()


def partly_without_gradient(model, x, ways):
    def body(c, r):
        with torch.no_grad():
            factor = (model.scale * r).sum().tanh()
        return (c * model.scale * factor).tanh(), r + factor * model.scale

    last, rows = ways.scan(body, model.scale * 1, model.first(x))
    return last.sum() + rows.square().mean()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * 3  # not the derivative


def function_of_the_user_s(model, x, ways):
    """``vmap`` has no rule for it: a loop."""
    return ways.map(lambda r: Tripled.apply(r * model.scale), model.first(x)).mean()


def writes_to_its_own(model, x, ways):
    """Nor can it write a slice into a tensor that is no slice: a loop."""

    def body(r):
        y = torch.zeros(4, dtype=r.dtype)
        y[0] = r[1]
        return y.add_(model.scale * r)

    return ways.map(body, model.first(x)).square().mean()


LOOPS = [
    recurrent,
    containers,
    backwards_along_columns,
    late_and_cut_gradients,
    nothing_to_learn,
    the_same_twice,
    in_place,
    in_a_scan,
    with_a_branch,
    rows_by_number,
    inside_a_checkpoint,
    partly_without_gradient,
    function_of_the_user_s,
    writes_to_its_own,
]


def mapped(model, x, ways):
    body = lambda r, w, more: (model.second(r["h"]) * w).tanh() + r["x"] * more["t"]  # noqa: E731
    xs = {"h": model.first(x), "x": x}
    return ways.map(body, xs, model.scale, {"t": model.table}).square().mean()


def mapped_to_several(model, x, ways):
    def body(r):
        return {"a": F.softmax(model.second(r), -1), "b": (r.argmax(), model.scale)}

    made = ways.map(body, model.first(x))
    return made["a"].square().mean() + (made["b"][0][:, None] * made["b"][1]).mean()


def mapped_numbers(model, x, ways):
    """Slices without dims have a say in no dtype."""
    body = lambda r: (r.half() * model.scale).sum() + r.half().float()  # noqa: E731
    return ways.map(body, model.first(x)[:, 0]).mean() + ways.map(lambda r: r, x).mean()


def mapped_in_a_map(model, x, ways):
    body = lambda r: ways.map(lambda e: e * model.scale, r[:, None]) @ r  # noqa: E731
    return ways.map(body, model.first(x)).square().mean()


def scanned_in_a_map(model, x, ways):
    def body(r):
        return ways.scan(lambda c, e: ((c + e).tanh() * model.scale, c * e), model.scale, r)[1]

    return ways.map(body, torch.stack([model.first(x)] * 11, 1)).square().mean()


BATCHES = [mapped, mapped_to_several, mapped_numbers, mapped_in_a_map, scanned_in_a_map]


def compared(loss, sizes, tmp_path, **options):
    """A step whose losses and parameters are eager's at each number of slices."""
    torch.set_default_dtype(torch.float64)
    try:
        model = Net()
        twin = copy.deepcopy(model)
        step = train_with(model, loss, Own, tmp_path, **options)
        eager = train_with(twin, loss, Plain, tmp_path)
        for count in sizes:
            x = torch.randn(count, 4)
            torch.testing.assert_close(step(x), eager(x), rtol=1e-9, atol=1e-12)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
    return step


def ops_of(step):
    return {each.op for each in step.compiled.artifact.steps if hasattr(each, "bodies")}


@pytest.mark.parametrize("loss", LOOPS, ids=lambda each: each.__name__)
def test_a_loop_has_the_numbers_and_gradients_of_python_s_for(loss, tmp_path):
    step = compared(loss, (19, 19), tmp_path, strict=loss is not rows_by_number)
    assert FORWARD in ops_of(step)
    assert (BACKWARD in ops_of(step)) == (loss is not nothing_to_learn)
    for stage in ("captured", "clean"):
        text = step.graph(stage)
        assert show(parse(text), exact=True) == text
        assert "loop_value" not in text


@pytest.mark.parametrize("loss", BATCHES, ids=lambda each: each.__name__)
def test_a_map_is_a_batch(loss, tmp_path):
    step = compared(loss, (19, 1, 19), tmp_path, strict=True)
    assert not ops_of(step) & {FORWARD, BACKWARD}


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, MOST_COPIES + 1, 1000])
def test_any_number_of_slices(count, tmp_path):
    step = compared(recurrent, (count, count), tmp_path, strict=True)
    assert (FORWARD in ops_of(step)) == (count > FEW)
    compared(mapped, (count,), tmp_path, strict=True)


def test_the_graph_does_not_grow_with_the_slices(tmp_path):
    for loss in (recurrent, mapped, function_of_the_user_s):
        lines = []
        for count in (MOST_COPIES + 1, 2 * MOST_COPIES + 1):
            torch.manual_seed(0)
            step = train_with(Net(), loss, Own, tmp_path)
            step(torch.randn(count, 4))
            lines.append(len(step.graph("captured").splitlines()))
        assert lines[0] == lines[1]


@pytest.mark.parametrize("memory", [None, 0.8])
def test_the_peak_is_promised(memory, tmp_path):
    """Rows and what each slice began with are in the plan."""

    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.linspace(0.5, 0.9, 64))
            self.register_buffer("table", torch.linspace(-1, 1, 64))

    model = Wide()
    twin = copy.deepcopy(model)
    loss = lambda m, x, ways: recurrent(m, x, ways) * 1e-3  # noqa: E731  # updates stay small
    step = train_with(model, loss, Own, tmp_path, memory=memory, strict=True)
    eager = train_with(twin, loss, Plain, tmp_path)
    for count in (31, 307):
        x = torch.randn(count, 8, 64)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-5)
        promised = step.compiled.artifact.peak_bytes
        assert 0.75 * promised < step.measure(x).peak_bytes <= promised
        eager(x)  # measuring is a call as well
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def rows_of(model, x, ways):
    """Slices are matrices, of as many rows as the batch."""
    last, rows = ways.scan(
        lambda c, r: ((model.second(c) + r).tanh(), c * model.scale), x[0], model.first(x)
    )
    return last.sum() + rows.square().mean()


def test_other_sizes_are_compiled_again_with_a_reason(tmp_path):
    model = Net()
    twin = copy.deepcopy(model)
    step = train_with(model, rows_of, Own, tmp_path)
    eager = train_with(twin, rows_of, Plain, tmp_path)
    for count, rows in ((23, 3), (23, 5), (29, 3), (23, 3), (300, 2)):
        x = torch.randn(count, rows, 4)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-5)
    assert len(step.recompiles) >= 1
    assert all(each for each in step.recompiles)


@pytest.mark.parametrize("loss", [recurrent, mapped], ids=lambda each: each.__name__)
def test_one_program_for_any_number_of_slices(loss, tmp_path):
    """The number is no part of a loop's functions, nor of a batch's: it may be declared."""
    shapes = treadle.dynamic({"x": ("n", None)}, n=(2, 400))
    step = compared(loss, (19, 2, 400, 257), tmp_path, shapes=shapes, strict=True)
    assert step.recompiles == ["compiled for n in 2..400"]


def test_verify_regions_and_report_name_what_a_slice_runs(tmp_path):
    step = train_with(Net(), recurrent, Own, tmp_path, strict=True)
    given = torch.randn(29, 4)
    step(given)
    assert not breaks_of(step.compiled.artifact)
    inside = {region.inside for region in step.regions() if region.inside}
    assert inside == {"scan_default", "scan_backward_default"}
    assert step.verify([(given,)]) is None
    assert "(each round)" in step.explain()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"codegen": False}, ReasonCode.NO_CODEGEN),
        ({"regions": Regions(rules=(RegionRule("eager", "*scan*"),))}, ReasonCode.CHOSEN),
    ],
)
def test_slices_run_pytorch_s_kernels_where_that_is_asked_for(options, code, tmp_path):
    step = compared(recurrent, (29, 29), tmp_path, **options)
    artifact = step.compiled.artifact
    assert not artifact.bodies
    reasons = {each.op: each.reason for each in artifact.fallbacks}
    assert reasons[FORWARD].startswith(code)
    assert reasons[BACKWARD].startswith(code)
    given = torch.randn(29, 4, dtype=torch.float64)
    assert step.measure(given).peak_bytes <= artifact.peak_bytes


def test_a_cached_and_a_saved_step_have_their_loops(tmp_path):
    torch.manual_seed(0)
    models = [Net()]
    models += [copy.deepcopy(models[0]), copy.deepcopy(models[0])]
    step = train_with(models[0], recurrent, Own, tmp_path / "first")
    given = torch.randn(29, 4)
    loss = step(given)
    step.save(tmp_path / "step")
    cached = train_with(models[1], recurrent, Own, tmp_path / "first")
    optimizer = torch.optim.SGD(models[2].parameters(), lr=0.05)

    def train(x):
        value = recurrent(models[2], x, Own)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    options = Options(cache_dir=tmp_path / "second")
    loaded = treadle.load(
        tmp_path / "step", train, model=models[2], optimizer=optimizer, options=options
    )
    for each in (cached, loaded):
        assert torch.equal(each(given), loss)
        assert each.compiled.from_cache


def drops(model, r):
    return F.dropout(r * model.scale, 0.5)


def writes(model, r):
    model.count.add_(1)
    return r * model.scale


def leaves_a_value(model, r):
    model.last = r.sum()
    return r * model.scale


def looks(model, r):
    return r * model.scale if r.sum() > 0 else r.sin() * model.scale


def checkpointed(model, r):
    return checkpoint(lambda e: (e * model.scale).tanh(), r, use_reentrant=False)


COPIED = {
    "has a side effect": drops,
    "writes to a tensor from outside": writes,
    "leaves a tensor outside": leaves_a_value,
    "asks for the value of a tensor": looks,
    "has a checkpoint": checkpointed,
}


@pytest.mark.parametrize("why", COPIED)
def test_what_does_more_than_compute_is_copied_up_to_some_slices(why, tmp_path):
    """Each copy is as eager: it draws its own random numbers."""
    model = Net()
    twin = copy.deepcopy(model)
    loss = lambda m, x, ways: ways.map(lambda r: COPIED[why](m, r), x).square().sum()  # noqa: E731
    step = train_with(model, loss, Own, tmp_path)
    eager = train_with(twin, loss, Plain, tmp_path)
    x = torch.randn(12, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        ours = step(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, eager(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.scale, twin.scale, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.count, twin.count)
    step = train_with(model, loss, Own, tmp_path)
    before = copy.deepcopy(model.state_dict())
    if why == "has a checkpoint":
        return  # a batch of any size
    with pytest.raises(treadle.CaptureError, match=rf"TR-151(.|\n)*{why}") as error:
        step(torch.randn(MOST_COPIES + 1, 4))
    assert "test_scans.py" in error.value.where
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def kept_outside(model, x, ways):
    kept = []

    def body(c, r):
        kept.append(c * r)
        return c * 0.5 + r, c * model.scale

    return ways.scan(body, model.scale * 1, x)[1].sum() + kept[-1].sum()


REFUSED = {
    "its inputs have 0 slices": lambda m, x, ways: ways.scan(
        lambda c, r: (c + r, c * 1), m.scale, x[:0]
    )[0],
    "its inputs are not tensors of one length": lambda m, x, ways: ways.map(
        lambda r: r["a"] + r["b"].sum(), {"a": x, "b": x[1:]}
    ),
    "an input has no dim 2": lambda m, x, ways: ways.scan(
        lambda c, r: (c + r, c * 1), m.scale, x, dim=2
    )[0],
    r"its body returns torch.float32 \[\] on cpu for torch.float32 \[4\]": lambda m, x, ways: (
        ways.scan(lambda c, r: ((c + r).sum(), c * 1), m.scale, x)[0]
    ),
    "its body does not return the containers": lambda m, x, ways: ways.scan(
        lambda c, r: ((c, c), c * 1), m.scale, x
    )[1],
    "it carries 1.0, which is not a tensor": lambda m, x, ways: ways.scan(
        lambda c, r: (c + r, r * m.scale), 1.0, x
    )[1],
    "a value of one iteration is used outside": kept_outside,
    "its body computes gradients": lambda m, x, ways: ways.map(
        lambda r: torch.autograd.grad((r * m.scale).sum(), m.scale)[0], x
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_says_why(why, tmp_path):
    step = train_with(Net(), lambda m, x, w: REFUSED[why](m, x, w).sum(), Own, tmp_path)
    with pytest.raises(treadle.CaptureError, match=rf"TR-151(.|\n)*{why}") as error:
        step(torch.randn(MOST_COPIES + 5, 4))
    assert "test_scans.py" in error.value.where


def test_kernels_of_a_gpu_are_planned_for_slices():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train(x):
        value = recurrent(model, x, Own)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    x = torch.randn(300, 4)
    plan = treadle.plan(train, x, model=model, optimizer=optimizer, device="h200")
    assert plan.peak_bytes > 3 * x.nbytes


def test_a_second_derivative_is_refused(tmp_path):
    def loss(model, x, ways):
        value = ways.scan(lambda c, r: (c * model.scale + r, c * 1), model.scale, x)[0].sum()
        (grad,) = torch.autograd.grad(value, model.scale, create_graph=True)
        return grad.square().sum()

    step = train_with(Net(), loss, Own, tmp_path)
    with pytest.raises(treadle.CaptureError, match="TR-140"):
        step(torch.randn(19, 4))


UNARY = (torch.tanh, torch.sin, torch.sigmoid, F.softplus, torch.neg, F.gelu)


def a_body(seed):
    """A random body of two carried tensors: what each next value and row is made of."""
    choose = random.Random(seed)
    plan = [
        [(choose.choice(UNARY), choose.randrange(5), choose.uniform(-0.5, 0.5)) for _ in range(3)]
        for _ in range(choose.randrange(3, 6))
    ]

    def body(model, carry, row):
        values = [carry[0], carry[1], row["x"], row["y"], model.scale]
        made = [
            sum(function(values[at]) * factor for function, at, factor in terms) for terms in plan
        ]
        cut = made[1].detach() if seed % 3 == 0 else made[1]
        return (made[0] + carry[1] * 0.1, cut * 0.5), tuple(each + 0 for each in made[2:])

    return body


@pytest.mark.parametrize("seed", range(6))
def test_random_bodies(seed, tmp_path):
    body = a_body(seed)

    def loss(model, x, ways):
        xs = {"x": model.first(x), "y": x}
        init = (model.scale * 1, torch.zeros_like(x[0]))
        last, rows = ways.scan(lambda c, r: body(model, c, r), init, xs, reverse=seed % 2 == 1)
        weights = [math.cos(at + seed) for at in range(len(rows))]
        total = sum(weight * row.square().mean() for weight, row in zip(weights, rows, strict=True))
        return total + last[0].sum() - last[1].square().sum()

    step = compared(loss, (random.Random(seed).choice([11, 37, 101]),) * 2, tmp_path, strict=True)
    assert FORWARD in ops_of(step)
