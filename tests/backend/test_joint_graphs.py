"""A forward and a backward that are one graph: calls that are open at once, gradients asked for
twice, what was written to in between, and graphs that have to be two."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from treadle import backend
from treadle.backend import treadle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x))))


def twins(model=None):
    """A model's compiled form, and a copy of it for eager."""
    model = model or Net()
    return torch.compile(model, backend=treadle), copy.deepcopy(model)


def same_gradients(ours, theirs):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def only_graph():
    """The one that was compiled since the last reset."""
    return max(backend.compiled(), key=lambda graph: graph.number)


def test_forward_and_backward_are_one_graph():
    ours, theirs = twins()
    x = torch.randn(5, 7)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    same_gradients(ours, theirs)
    graph = only_graph()
    assert graph.name.endswith("forward and backward")
    assert {phase.name for phase in graph.summary().phases} >= {"forward", "backward"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_calls_that_are_open_at_once_do_not_meet(order):
    ours, theirs = twins()
    batches = [torch.randn(5, 7) for _ in range(3)]
    for model in (ours, theirs):
        losses = [model(batch).square().sum() for batch in batches]
        for at in order:
            losses[at].backward()
    same_gradients(ours, theirs)


def test_gradients_are_asked_for_again_and_again():
    ours, theirs = twins()
    x = torch.randn(5, 7)
    for model in (ours, theirs):
        loss = model(x).square().sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        model(x).sum().backward()  # another call, while the first is open
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    same_gradients(ours, theirs)


def test_some_gradients_alone():
    ours, theirs = twins()
    x = torch.randn(5, 7, requires_grad=True)
    for _ in range(2):
        got, wanted = (torch.autograd.grad(net(x).square().sum(), x)[0] for net in (ours, theirs))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_forward_without_backward_gives_its_memory_back():
    ours, theirs = twins()
    x = torch.randn(5, 7)
    ours(x).sum().backward()
    for _ in range(5):
        ours(x)  # its backward can never be asked for
        gc.collect()
    ours.zero_grad()
    for model in (ours, theirs):
        model(x).sum().backward()
    same_gradients(ours, theirs)


def test_the_memory_of_open_calls_is_used_again():
    from treadle.runtime.execute import executable

    made = []
    original = executable.Executable.another
    ours, _ = twins()
    x = torch.randn(5, 7)

    def another(self):
        made.append(self)
        return original(self)

    executable.Executable.another = another
    try:
        for _ in range(4):
            first, second = ours(x).sum(), ours(x).square().sum()
            (first + second).backward()
    finally:
        executable.Executable.another = original
    assert len(made) == 1  # two were open at once


def test_a_parameter_that_was_written_to_before_the_backward():
    ours, theirs = twins()
    x = torch.randn(5, 7)
    for model in (ours, theirs):
        loss = model(x).square().sum()
        with torch.no_grad():
            model.down.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_result_that_the_backward_reads_was_written_to():
    ours, theirs = (torch.compile(torch.sigmoid, backend=treadle), torch.sigmoid)
    for function in (ours, theirs):
        x = torch.randn(5, requires_grad=True)
        y = function(x)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_on_what_is_saved():
    ours, theirs = twins()
    x = torch.randn(5, 7)
    for model in (ours, theirs):
        with save_on_cpu():
            loss = model(x).square().sum()
        loss.backward()
    same_gradients(ours, theirs)


def test_running_statistics_are_those_of_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(0))
    ours, theirs = twins(model)
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6)
        for net in (ours, theirs):
            net(x).square().sum().backward()
        same_gradients(ours, theirs)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_results_that_are_views_and_gradients_that_are_given_on(rows):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))

        def forward(self, x):
            y = x * self.scale
            return y, y[:1], y.t(), x + self.scale

    ours, theirs = twins(Views())
    x = torch.randn(rows, 7)
    for model in (ours, theirs):
        y, first, turned, added = model(x)
        (y.sum() + first.square().sum() + turned.cos().sum() + added.sum()).backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("rows", [0, 1, 31])
def test_rows(rows):
    for x in (torch.randn(rows, 7), torch.randn(rows, 7, requires_grad=True)):
        ours, theirs = twins()
        for model in (ours, theirs):
            model(x).square().sum().backward()
        same_gradients(ours, theirs)
        torch._dynamo.reset()


SCALE = 1.0
"""Changed by the loop below, as scripts do at module level."""


def scaled(model, x):
    return (model(x) * SCALE).square().mean()


def test_a_global_that_changes():
    """Dynamo's guards say when; each value is right, and none is compiled twice."""
    global SCALE
    ours, theirs = twins()
    compiled, x = torch.compile(scaled, backend=treadle), torch.randn(5, 7)
    before = len(backend.compiled())
    for number in (1.0, 2.0, 1.0, 2.0, 1.0):
        SCALE = number
        compiled(ours, x).backward()
        scaled(theirs, x).backward()
        same_gradients(ours, theirs)
    assert len(backend.compiled()) - before <= 2


def test_a_wrong_shape_is_the_user_s_error_and_changes_nothing():
    ours, theirs = twins()
    words = r"a and b must have same reduction dim|cannot be multiplied"  # Dynamo's, or a kernel's
    with pytest.raises(Exception, match=words):
        ours(torch.randn(5, 9))
    for model in (ours, theirs):
        model(torch.ones(5, 7)).sum().backward()
    same_gradients(ours, theirs)


def test_dropout_draws_once():
    model = nn.Sequential(nn.Linear(7, 50), nn.Dropout(0.5))
    compiled = torch.compile(model, backend=treadle)
    x = torch.randn(5, 7)
    out = compiled(x)
    out.sum().backward()
    kept = (out != 0).sum(0).float()
    torch.testing.assert_close(model[0].bias.grad, 2 * kept)


def test_calls_of_two_threads():
    ours, theirs = twins()
    batches = [torch.randn(5, 7) for _ in range(8)]
    ours(batches[0])
    wanted = [torch.autograd.grad(theirs(x).square().sum(), theirs.up.weight)[0] for x in batches]
    got = [None] * len(batches)

    def work(part):
        for at in part:
            (got[at],) = torch.autograd.grad(ours(batches[at]).square().sum(), ours.up.weight)

    threads = [threading.Thread(target=work, args=(range(n, 8, 2),)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


CONSTANTS = {
    "ones_like": lambda x: torch.ones_like(x[:, 0]),
    "arange": lambda x: torch.arange(4),
    "mask": lambda x: torch.ones(4, 4).tril().bool(),
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "number": lambda x: torch.tensor(3.0),
    "expanded": lambda x: torch.zeros(1, 3).expand(2, 3),
    "transposed": lambda x: torch.full((2, 3), 7, dtype=torch.int32).t(),
}
"""What no step of a program computes, since nothing has to be read for it."""


@pytest.mark.parametrize("constant", CONSTANTS.values(), ids=CONSTANTS)
@pytest.mark.parametrize("is_read", [False, True])
def test_a_result_that_reads_nothing_is_there_after_the_forward(constant, is_read):
    def function(x):
        made = constant(x)
        return (x * w).tanh() * (made.sum() if is_read else 1.0), made

    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True)
    compiled = torch.compile(function, backend="treadle", fullgraph=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        expected, got = function(x), compiled(x)
        torch.testing.assert_close(got, expected)
        (ours,), (theirs,) = (torch.autograd.grad(y.sum(), [w]) for (y, _) in (got, expected))
        torch.testing.assert_close(ours, theirs)


CHECKED = {
    "inverse": torch.linalg.inv,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3)),
    "solve": lambda a: torch.linalg.solve(a, torch.ones(3, 2)),
    "determinant": torch.linalg.det,
}


@pytest.mark.parametrize("operation", CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_operations_that_check_their_results_have_gradients(operation, dynamic):
    """AOTAutograd orders their checks by a token, which is an input without a value."""

    def function(x):
        return operation(x @ w).square().mean()

    torch.manual_seed(0)
    w = torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(function, backend="treadle", dynamic=dynamic)
    for count in (2, 2, 5):
        x = torch.randn(count, 3, 3)
        got, expected = compiled(x), function(x)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        (ours,), (theirs,) = (torch.autograd.grad(y, [w]) for y in (got, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_singular_matrix_is_eager_s_error():
    w = torch.ones(3, 3, requires_grad=True)
    compiled = torch.compile(torch.linalg.inv, backend="treadle")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(w @ torch.ones(3, 3))
