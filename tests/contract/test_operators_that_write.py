"""Operators of users' that write to their arguments: in place where nobody needs what was there,
into a copy where somebody does, with eager's numbers either way."""

import copy
import warnings

import pytest
import torch
from torch import nn

import treadle
from treadle import Options
from treadle.runtime.store.artifact import CallStep


@torch.library.custom_op("treadle_writing::average", mutates_args=("avg",))
def average(avg: torch.Tensor, x: torch.Tensor, rate: float = 0.1) -> None:
    avg.mul_(1 - rate).add_(x, alpha=rate)


@average.register_fake
def _(avg, x, rate=0.1):
    return None


@torch.library.custom_op("treadle_writing::moments", mutates_args=("mean", "square"))
def moments(
    x: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, *, rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    before = mean.norm()
    mean.lerp_(x, rate)
    square.lerp_(x * x, rate)
    return before, square.sum()


@moments.register_fake
def _(x, mean, square, *, rate):
    return mean.new_empty(()), mean.new_empty(())


@torch.library.triton_op("treadle_writing::doubled", mutates_args={"out"})
def doubled(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("avg", torch.zeros(4))
        self.register_buffer("square", torch.ones(4))
        self.register_buffer("table", torch.zeros(3, 4))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def buffer(model, x):
    h = model(x)
    average(model.avg, h.detach().mean(0))
    return (h * model.avg).square().mean()


def several_buffers(model, x):
    h = model(x)
    before, total = moments(h.detach().mean(0), model.avg, square=model.square, rate=0.3)
    return (h * model.avg / model.square).square().mean() + before * 0.1 + total


def temporary(model, x):
    h = model(x)
    weights = h.detach().exp()
    average(weights, torch.ones_like(weights))
    return (h * weights).square().mean()


def old_value_is_read(model, x):
    h = model(x)
    old = h.detach().sort(-1).values * 3
    new = old.clone()
    average(new, torch.ones_like(new))
    return (h * new).square().mean() + (h * old.cumsum(0)).mean()


def old_buffer_is_read(model, x):
    h = model(x)
    before = model.avg.clone()
    average(model.avg, h.detach().mean(0))
    return (h * model.avg).square().mean() + (h * before).mean()


def twice(model, x):
    h = model(x)
    average(model.avg, h.detach().mean(0))
    average(model.avg, h.detach().amax(0), rate=0.5)
    return (h * model.avg).square().mean()


def one_after_another(model, x):
    """Operators of users' keep their order."""
    h = model(x)
    average(model.avg, h.detach().mean(0))
    average(model.square, model.avg)
    return (h * model.avg * model.square).square().mean()


def row_of_a_buffer(model, x):
    h = model(x)
    average(model.table[1], h.detach().mean(0))
    return (h * model.table.sum(0)).square().mean()


def in_another_order(model, x):
    h = model(x)
    across = h.detach().exp().t().contiguous().t()
    average(across, torch.ones_like(across))
    return (h * across).square().mean()


def of_the_batch(model, x):
    average(x, torch.ones_like(x))
    return model(x).square().mean()


def as_triton_does(model, x):
    h = model(x)
    out = torch.empty_like(h)
    doubled(out, h.detach())
    return (h * out).square().mean()


PLACES = {  # (arguments written to, of them copied)
    buffer: (1, 0),
    several_buffers: (2, 0),
    temporary: (1, 0),
    old_value_is_read: (1, 1),
    old_buffer_is_read: (1, 1),
    twice: (2, 1),
    one_after_another: (2, 0),
    row_of_a_buffer: (1, 1),
    in_another_order: (1, 0),
    of_the_batch: (1, 0),
    as_triton_does: (1, 0),
}


def pair(tmp_path, loss_of, **options):
    torch.manual_seed(0)
    mine = Net()
    twin = copy.deepcopy(mine)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

        def step(x):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    (ours, optimizer), (theirs, _) = step_of(mine), step_of(twin)
    options = Options(cache_dir=tmp_path, **options)
    return (
        treadle.compile(ours, model=mine, optimizer=optimizer, options=options),
        theirs,
        mine,
        twin,
    )


def check(step, theirs, mine, twin, batches):
    for batch in batches:
        other = batch.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            got = step(batch)
        torch.testing.assert_close(got, theirs(other), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batch, other)
        for (name, a), b in zip(mine.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def writing(artifact):
    return [step for step in artifact.steps if isinstance(step, CallStep) and step.updates]


@pytest.mark.parametrize("codegen", [True, False])
@pytest.mark.parametrize("loss_of", PLACES, ids=lambda each: each.__name__)
def test_numbers_are_eagers(loss_of, codegen, tmp_path):
    made = pair(tmp_path, loss_of, codegen=codegen)
    check(*made, [torch.randn(5, 6) for _ in range(3)])


@pytest.mark.parametrize("loss_of", PLACES, ids=lambda each: each.__name__)
def test_arguments_are_copied_only_where_they_are_needed(loss_of, tmp_path):
    step, *_ = pair(tmp_path, loss_of)
    artifact = step.prepare(torch.randn(5, 6)).artifact
    calls = writing(artifact)
    written = sum(len(call.updates) for call in calls)
    copied = sum(artifact.copied_by(call) for call in calls)
    assert (written, copied) == PLACES[loss_of]
    assert (f"copied arguments that it writes to: {copied} of" in step.explain()) == bool(copied)


def test_an_input_is_written_where_it_is(tmp_path, monkeypatch):
    seen = []
    step, _, mine, _ = pair(tmp_path, several_buffers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step(torch.randn(5, 6))
        monkeypatch.setattr(torch.Tensor, "lerp_", seen_by(seen, torch.Tensor.lerp_))
        step(torch.randn(5, 6))
    assert seen == [mine.avg.data_ptr(), mine.square.data_ptr()]


def seen_by(seen, function):
    def lerp_(self, *args):
        seen.append(self.data_ptr())
        return function(self, *args)

    return lerp_


def test_many_sizes_share_a_compile(tmp_path):
    made = pair(tmp_path, temporary)
    check(*made, [torch.randn(rows, 6) for rows in (5, 7, 4, 9)])
    assert len(made[0].recompiles) <= 2


def test_another_process_copies_as_little(tmp_path):
    """The artifact says what is written, and where: no trace is needed."""
    first = pair(tmp_path, several_buffers)
    check(*first, [torch.randn(5, 6)])
    second = pair(tmp_path, several_buffers)
    check(*second, [torch.randn(5, 6) for _ in range(2)])
    artifact = second[0].prepare(torch.randn(5, 6)).artifact
    assert [artifact.copied_by(call) for call in writing(artifact)] == [0]


class Broken(Exception):
    pass


FAILS = [False]


@torch.library.custom_op("treadle_writing::may_fail", mutates_args=("avg",))
def may_fail(avg: torch.Tensor) -> None:
    avg.add_(1)
    if FAILS[0]:
        raise Broken("told to")


@may_fail.register_fake
def _(avg):
    return None


def test_a_first_call_that_fails_leaves_everything_as_it_was(tmp_path):
    def fails(model, x):
        may_fail(model.avg)
        return (model(x) * model.avg).square().mean()

    step, _, mine, _ = pair(tmp_path, fails)
    before = copy.deepcopy(mine.state_dict())
    FAILS[0] = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises((Broken, treadle.TreadleError)):
                step(torch.randn(5, 6))
    finally:
        FAILS[0] = False
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, msg=name)
