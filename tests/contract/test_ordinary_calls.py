"""Calls that scripts make in passing: shifts in place, sets, lists of numbers, other optimizers."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treadle


def shifts(world, x, t):
    bits = (x * 4).to(torch.int64)
    bits <<= 2
    bits >>= 1
    bits |= 1
    bits ^= 3
    return bits, bits << 1


def sets(world, x, t):
    found = world["set"]
    found.difference_update({1, 2}, [3])
    found.symmetric_difference_update({7, 30})
    found.intersection_update(range(15))
    found.update({50}, (51,))
    return x.sum()


def listed(world, x, t):
    rows = torch.tensor([[t, 2.0], [world["tensor"], 1]])
    whole = torch.tensor([world["tensor"].long(), 3, True])
    half = torch.as_tensor([t, 1], dtype=torch.float16)
    assert not rows.requires_grad
    return rows, whole, half, torch.tensor((t * 2, x.sum()))


def whole_factors(world, x, t):
    return x * int(t), x * int(t.item()) + float(t)


def calls(step, compiled):
    world = {"set": set(range(20)), "tensor": torch.tensor(3.0)}

    def run(x, t):
        return step(world, x, t)

    if compiled:
        run = treadle.compile(run, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    found = []
    for at in range(4):
        torch.manual_seed(at)
        world["tensor"] += at
        result = run(torch.randn(3), torch.tensor(at + 0.5, requires_grad=step is listed))
        found.append((result, sorted(world["set"])))
    return found, getattr(run, "recompiles", [])


@pytest.mark.parametrize(
    "step", [shifts, sets, listed, whole_factors], ids=lambda each: each.__name__
)
def test_calls_are_those_of_eager(step):
    (found, recompiles), (want, _) = calls(step, True), calls(step, False)
    for (ours, mine), (theirs, others) in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert mine == others
    assert len(recompiles) <= 1, recompiles


class Lookahead(torch.optim.Optimizer):
    """As it was published: ``Optimizer.__init__`` does not run."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group):
        for fast in group["params"]:
            state = self.state[fast]
            if "slow_param" not in state:
                state["slow_param"] = torch.zeros_like(fast.data)
                state["slow_param"].copy_(fast.data)
            slow = state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("has_model", [True, False])
def test_an_optimizer_whose_init_did_not_run(has_model):
    def world():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4))

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    (model, optimizer, step), (twin, other, eager) = world(), world()
    given = model if has_model else None
    compiled = treadle.compile(step, model=given, optimizer=optimizer)
    for at in range(6):
        torch.manual_seed(at)
        batch = torch.randn(5, 4), torch.randn(5, 1)
        torch.testing.assert_close(compiled(*batch), eager(*batch))
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[ours], other.state[theirs])


def test_an_optimizer_around_the_one_that_was_passed_is_to_be_passed_itself():
    model = nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = Lookahead(inner)

    def step(x):
        model(x).square().mean().backward()
        outer.step()
        outer.zero_grad()

    compiled = treadle.compile(step, model=model, optimizer=inner)
    with pytest.raises(treadle.CaptureError, match="TR-117") as error:
        compiled(torch.randn(3, 4))
    assert "a key of outer.state that is a tensor" in str(error.value)
    assert "pass that one in optimizer=" in str(error.value)
    treadle.compile(step, model=model, optimizer=outer)(torch.randn(3, 4))


def test_neither_model_nor_optimizer():
    with pytest.raises(treadle.CaptureError, match="TR-108"):
        treadle.compile(lambda x: x, model=None)
