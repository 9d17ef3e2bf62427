"""Numbers, texts and averages of tensors that are neither in ``model=`` nor among the arguments:
those of the call, whoever writes them, and nothing is written while the step is captured."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

import treadle

READS = {
    "int": lambda x, t: x * int(t),
    "float": lambda x, t: x / float(t),
    "item": lambda x, t: x + t.item(),
    "rows": lambda x, t: (lambda at: x[at : at + 1] + 1)(int(t)),
    "arithmetic": lambda x, t: x * (2 * int(t) + 1),
    "returned": lambda x, t: (x + 1, float(t), int(t)),
    "floor": lambda x, t: (x + 1, math.floor(t)),
    "formatted": lambda x, t: (x + 1, f"{t} and {float(t):.2f}"),
    "text": lambda x, t: (x + 1, str(t), "%d" % t, "{}".format(t)),  # noqa: UP031, UP032
    "decided": lambda x, t: x * 2 if int(t) > 3 else x * 3,
    "converted": lambda x, t: x * float(t) + float(t) / 2,
    "itself": lambda x, t: x * t,
}
WHOLE = ("int", "rows", "arithmetic", "decided", "converted")
"""Those that read a whole number."""
PLACES = {
    "a cell": lambda t: lambda: t,
    "an entry": lambda t: lambda held=[t]: held[0],
    "an attribute": lambda t: (lambda held: lambda: held.t)(SimpleNamespace(t=t)),
    "a buffer": lambda t: (lambda held: lambda: held.t)(nn.BatchNorm1d(2)),
}


def placed(place, start):
    """What gives a tensor that stands there."""
    t = torch.tensor(start)
    found = PLACES[place](t)
    if place == "a buffer":
        found.__closure__[0].cell_contents.register_buffer("t", t)
    return found


def calls(read, writer, place, compiled):
    model = nn.Linear(3, 3)
    at = placed(place, 1.0)
    other = placed(place, 2)

    def step(x):
        t, n = at(), other()
        found = READS[read](x, n if read in WHOLE else t)
        if writer == "the step":
            t.add_(1)
            n[...] = (n + 1) % 4
        return found

    if compiled:
        step = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    found = []
    for number in range(5):
        torch.manual_seed(number)
        found.append((step(torch.randn(4, 3)), at().clone(), other().clone()))
        if writer == "others":
            at().add_(1), other().copy_((other() + 1) % 4)
    return found


@pytest.mark.parametrize("writer", ["the step", "others"])
@pytest.mark.parametrize(
    ("read", "place"),
    [(read, tuple(PLACES)[at % len(PLACES)]) for at, read in enumerate(READS)]
    + [("int", place) for place in PLACES],
)
def test_a_number_is_that_of_the_call(read, place, writer):
    found, want = calls(read, writer, place, True), calls(read, writer, place, False)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(want), strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs)


def queue(compiled):
    """A ring of rows with a pointer, as contrastive learners have them."""
    rows, place = torch.zeros(6, 3), torch.zeros(1, dtype=torch.long)

    def step(x):
        at = int(place)
        rows[at : at + 2] = x
        place[0] = (at + 2) % 6
        return (rows @ x.T).sum()

    if compiled:
        step = treadle.compile(step, model=nn.Linear(3, 3))
    found = []
    for number in range(5):
        torch.manual_seed(number)
        found.append((step(torch.randn(2, 3)), rows.clone(), place.clone()))
    return found


def test_a_ring_that_a_script_holds():
    torch.testing.assert_close(queue(True), queue(False))


def averaged(options, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        loss = model(x).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    if compiled:
        step = treadle.compile(step, model=model, optimizer=optimizer)
    found = []
    for number in range(4):
        torch.manual_seed(number)
        found.append(
            (step(torch.randn(8, 3)), [each.clone() for each in average.state_dict().values()])
        )
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_buffers": True},
        {"avg_fn": lambda old, new, n: old * 0.9 + new * 0.1},
        {"multi_avg_fn": lambda old, new, n: torch._foreach_lerp_(old, new, 0.1)},
    ],
    ids=["mean", "buffers", "own", "own of all"],
)
def test_an_average_that_is_no_model_of_the_step(options):
    torch.testing.assert_close(
        averaged(options, True), averaged(options, False), atol=1e-5, rtol=1e-4
    )


def normed(compiled):
    outside = nn.BatchNorm1d(3, momentum=None)

    def step(x):
        return outside(x)

    if compiled:
        step = treadle.compile(step, model=nn.Linear(3, 3))
    found = []
    for number in range(4):
        torch.manual_seed(number)
        found.append((step(torch.randn(8, 3)).detach(), outside.running_mean.clone()))
        found.append(outside.num_batches_tracked.clone())
    return found


def test_a_cumulative_norm_that_is_no_model_of_the_step():
    torch.testing.assert_close(normed(True), normed(False), atol=1e-5, rtol=1e-4)


def test_nothing_is_written_while_a_step_is_prepared():
    average, norm = AveragedModel(nn.Linear(3, 3)), nn.BatchNorm1d(3, momentum=None)
    count, model = torch.tensor(0), nn.Linear(3, 3)

    def step(x):
        average.update_parameters(model)
        count.add_(int(count) + 1)
        return norm(x) * int(count)

    treadle.compile(step, model=model).prepare(torch.randn(4, 3))
    assert (int(average.n_averaged), int(norm.num_batches_tracked), int(count)) == (0, 0, 0)


def hooked(kind, model, statistic):
    """A step in whose backward ``statistic`` is averaged with products of gradients."""

    def average(g):
        statistic.mul_(0.5)
        statistic.add_(g.t() @ g)

    class Averaged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            average(g)
            return g

    if kind == "module":
        model.register_full_backward_hook(lambda module, inner, outer: average(outer[0]))

    def step(x):
        model.zero_grad()
        y = model(x)
        if kind == "tensor":
            y.register_hook(lambda g: average(g))
        if kind == "function":
            y = Averaged.apply(y)
        loss = y.square().sum()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", ["module", "tensor", "function"])
def test_what_a_hook_of_a_backward_writes_is_written_once_a_call(kind):
    """The capture itself wrote to the user's tensor: nothing traced is in ``t.mul_(0.5)``."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, statistic = nn.Linear(4, 3), torch.eye(3)
        step = hooked(kind, model, statistic)
        if compiled:
            step = treadle.compile(step, model=model)
        losses = [step(torch.randn(5, 4)) for _ in range(3)]
        outcomes.append([*losses, statistic])
    torch.testing.assert_close(*outcomes)


def noting(model, norms):
    def step(x):
        model.zero_grad()
        y = model(x)
        y.register_hook(lambda g: norms.append(g.norm().item()))
        y.square().sum().backward()

    return step


def test_a_hook_of_a_backward_leaves_numbers():
    """A residual norm in a list, as of solvers in a backward."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, norms = nn.Linear(4, 3), []
        step = noting(model, norms)
        if compiled:
            step = treadle.compile(step, model=model)
        for _ in range(3):
            step(torch.randn(5, 4))
        outcomes.append(torch.tensor(norms))
    torch.testing.assert_close(*outcomes)
