"""Control flow that tensors decide: ``torch.cond`` is exact, forward and backward; a few slices of
``scan`` are copies of its body; what cannot be captured is refused by name."""

import copy

import pytest
import torch
from torch import cond, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

import treadle
from treadle.capture.control_flow.scans import MOST_COPIES
from treadle.options import Options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))


def plain_if(pred, yes, no, operands=()):
    """What ``torch.cond`` means."""
    return yes(*operands) if bool(pred) else no(*operands)


def train_with(model, loss, choose, tmp_path):
    # no momentum: torch.cond gives zeros for what the other branch reads, and "if" gives nothing
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        value = loss(model, x, choose)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if choose is plain_if:
        return train
    options = Options(cache_dir=tmp_path, strict=True)
    return treadle.compile(train, model=model, optimizer=optimizer, options=options)


def operands(model, x, choose):
    h = model.first(x)
    return choose(x.sum() > 0, torch.sin, lambda y: y.square(), (h,)).sum()


def closures(model, x, choose):
    """What the branches read is no operand: a result, parameters, a module."""
    h = model.first(x)
    yes = lambda: model.second(h) * model.scale  # noqa: E731
    no = lambda: (h - model.scale).exp()  # noqa: E731
    return choose(x.sum() > 0, yes, no).square().mean()


def undefined_elsewhere(model, x, choose):
    """Values and gradients of the other branch are NaN or infinite."""
    h = model.first(x)
    root = lambda y: (y.sum(1) * 0 + x.sum()).sqrt() + y.square().sum(1).sqrt()  # noqa: E731
    ratio = lambda y: y.sum(1) / (y.detach() - y).sum(1).clamp(max=0).sub(1)  # noqa: E731
    log = lambda y: (y.sum(1) * 0 - x.sum()).log() * y.sum(1)  # noqa: E731
    zero = lambda y: (y - y.detach()).norm(dim=1) + (y - y.detach()).sqrt().sum(1)  # noqa: E731
    one = choose(x.sum() > 0, root, log, (h,)).sum()
    two = choose(x.sum() > 0, ratio, zero, (h * model.scale,)).sum()
    return one + two


def zeros_elsewhere(model, x, choose):
    """``0 / 0`` and its gradient stand in the branch that is not taken."""
    h = model.first(x)
    empty = torch.relu(x).sum() * 0
    bad = lambda: h * (empty / empty) + (h * 0).sqrt()  # noqa: E731
    good = lambda: h * 2  # noqa: E731
    return choose(x.sum() > 1e9, bad, good).sum() + model.second(h).sum()


def nested(model, x, choose):
    h = model.first(x)

    def outer(y):
        small = lambda z: z / 3 + model.scale  # noqa: E731
        return choose(y.sum() > 0, small, lambda z: (z - z).sqrt() + z, (y,))

    return choose(x.sum() > 0, outer, lambda y: model.second(y).tanh(), (h,)).sum()


def containers(model, x, choose):
    h = model.first(x)
    yes = lambda a: {"a": a["x"] * 2, "b": (model.scale, a["y"])}  # noqa: E731
    no = lambda a: {"a": a["y"].exp(), "b": (model.scale * 3, a["x"])}  # noqa: E731
    made = choose(x[0, 0] > 0, yes, no, ({"x": h, "y": model.second(x)},))
    return made["a"].sum() + made["b"][0].prod() + made["b"][1].square().sum()


def inside_in_place(model, x, choose):
    def yes(y):
        y = y.clone()
        y[:, 0] = 3
        return y.mul_(model.scale)

    return choose(x.sum() > 0, yes, lambda y: torch.zeros_like(y) + y, (model.first(x),)).sum()


def twice_the_same(model, x, choose):
    h = model.first(x)
    one = choose(x.sum() > 0, lambda: h, lambda: model.scale * h)
    two = choose(x.sum() <= 0, lambda: h * h, lambda: F.gelu(h))
    return (one * two).sum()


def a_loop_inside(model, x, choose):
    """A loop in a branch, whose function reads parameters: they get their gradients."""
    h = model.first(x)

    def more(y):
        return y.sum() < 20

    def body(y):
        return (model.second(y).abs() + y + 1) * model.scale

    def rounds(y):
        if choose is not plain_if:
            return torch.while_loop(more, lambda z: (body(z),), (y,))[0]
        while more(y):
            y = body(y)
        return y

    return choose(x.sum() > 0, rounds, lambda y: y.exp(), (h,)).square().mean() * 0.01


LOSSES = [
    operands,
    closures,
    undefined_elsewhere,
    zeros_elsewhere,
    nested,
    containers,
    inside_in_place,
    twice_the_same,
    a_loop_inside,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda each: each.__name__)
def test_cond_is_eager_s_forward_and_backward(loss, tmp_path):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    step = train_with(model, loss, cond, tmp_path)
    eager = train_with(twin, loss, plain_if, tmp_path)
    for sign in (1, -1, 1, -1):
        x = torch.rand(3, 4) * sign
        torch.testing.assert_close(step(x), eager(x), equal_nan=True)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
            assert ours.isfinite().all() or loss is not zeros_elsewhere
    assert len(step.recompiles) == 0


def test_a_condition_of_python_s_is_a_branch(tmp_path):
    model = Net()
    step = treadle.compile(
        lambda x: cond(x.shape[0] > 2, torch.sin, torch.cos, (model.first(x),)),
        model=model,
        options=Options(cache_dir=tmp_path),
    )
    for rows, expected in ((3, torch.sin), (2, torch.cos)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x), expected(model.first(x)))


@torch.library.custom_op("treadle_tests::of_anything", mutates_args=())
def of_anything(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@of_anything.register_fake
def _(x):
    return torch.empty_like(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def writes(model, h):
    model.count.add_(1)
    return h * 2


def of_a_function(model, h):
    return Doubled.apply(model.scale) * 2 + h


REFUSED = {
    "a branch has a side effect .aten.bernoulli": lambda m, h: F.dropout(h, 0.5),
    "a branch has a side effect .treadle_tests": lambda m, h: of_anything(h),
    "a branch writes to a tensor from outside": writes,
    "in a branch a size depends on values": lambda m, h: h[h > 0].sum() + h,
    "a branch divides integers": lambda m, h: h + (m.count.long() // m.count.long()),
    "a branch uses a tensor from outside that is not an operand": of_a_function,
    r"its branches return torch.float32 \[3, 4\] and torch.float32 \[4\]": lambda m, h: m.scale,
    "its branches return containers of different kinds": lambda m, h: (h, h),
    "a branch computes gradients": lambda m, h: torch.autograd.grad(h.sum(), h)[0],
    "a branch sets an attribute of a tensor": lambda m, h: setattr(h, "grad", None),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_branch_that_does_more_is_refused(why, tmp_path):
    torch.manual_seed(0)
    model = Net()

    def loss(model, x, choose):
        h = model.first(x)
        return choose(x.sum() > 0, lambda y: y * 1, lambda y: REFUSED[why](model, y), (h,)).sum()

    step = train_with(model, loss, cond, tmp_path)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(treadle.CaptureError, match=rf"TR-151(.|\n)*{why}") as error:
        step(torch.rand(3, 4))
    assert "test_control_flow.py" in error.value.where
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert cond(True, lambda: 1, lambda: 2) == 1  # the function is its own again


def test_a_condition_of_several_elements_is_refused(tmp_path):
    model = Net()
    step = train_with(model, lambda m, x, c: c(x > 0, torch.sin, torch.cos, (x,)), cond, tmp_path)
    with pytest.raises(treadle.CaptureError, match=r"TR-151.*12 elements"):
        step(torch.rand(3, 4))


def mapped(model, xs):
    return map_over(lambda row, w: model.first(row).tanh() * w, xs, model.scale)


def mapped_by_hand(model, xs):
    return torch.stack([model.first(row).tanh() * model.scale for row in xs])


def scanned(model, xs):
    carry, rows = scan(
        lambda c, x: (c * model.scale + x["a"], c.sin() + x["b"]),
        torch.zeros(4),
        {"a": model.first(xs), "b": xs},
    )
    return carry.sum() + rows


def scanned_by_hand(model, xs):
    carry, rows, first = torch.zeros(4), [], model.first(xs)
    for a, b in zip(first, xs, strict=True):
        rows.append(carry.sin() + b)
        carry = carry * model.scale + a
    return carry.sum() + torch.stack(rows)


def scanned_back(model, xs):
    carry, rows = scan(
        lambda c, x: (c + x, c * 2), torch.ones(3), model.first(xs), dim=-1, reverse=True
    )
    return carry.sum() * rows


def scanned_back_by_hand(model, xs):
    carry, rows, first = torch.ones(3), [], model.first(xs)
    for at in reversed(range(4)):
        rows.insert(0, carry * 2)
        carry = carry + first[:, at]
    return carry.sum() * torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [(mapped, mapped_by_hand), (scanned, scanned_by_hand), (scanned_back, scanned_back_by_hand)],
)
def test_copies_of_a_body(loss, by_hand, tmp_path):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    step = train_with(model, lambda m, x, _: loss(m, x).square().mean(), cond, tmp_path)
    eager = train_with(twin, lambda m, x, _: by_hand(m, x).square().mean(), plain_if, tmp_path)
    for _ in range(2):
        x = torch.randn(3, 4)
        torch.testing.assert_close(step(x), eager(x))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


BY_NAME = {
    "associative_scan": lambda x: associative_scan(torch.add, x, 9),
    "map": lambda x: map_over(F.dropout, x[:1].expand(MOST_COPIES + 1, 4)),
    "scan": lambda x: scan(lambda c, r: (c + r, c), x[0], x[:0]),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_refused_is_named(name, tmp_path):
    model = Net()
    step = train_with(model, lambda m, x, _: BY_NAME[name](m.first(x)).sum(), cond, tmp_path)
    with pytest.raises(treadle.CaptureError, match=rf"TR-151\] torch.{name} cannot be captured"):
        step(torch.rand(3, 4))
