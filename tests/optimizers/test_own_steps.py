"""Optimizers that people write: their own ``step``, their own state, other optimizers inside."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.capture.optimizers.registry import has_update_rule
from treadle.options import Options

LIBRARY = Options(codegen=False)


def with_gradient(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p, optimizer.state[p]


class Momentum(torch.optim.Optimizer):
    """A state that begins as the first gradient."""

    def __init__(self, parameters, lr=0.1, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group, p, state in with_gradient(self):
            if "buffer" not in state:
                state["buffer"] = p.grad.clone()
            else:
                state["buffer"].mul_(group["momentum"]).add_(p.grad)
            p.add_(state["buffer"], alpha=-group["lr"])


class OwnAdam(torch.optim.Optimizer):
    """Counts in Python, and writes by ``.data``."""

    def __init__(self, parameters, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    def step(self, closure=None):
        for group, p, state in with_gradient(self):
            if len(state) == 0:
                state["step"] = 0
                state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
            state["step"] += 1
            first, second = group["betas"]
            state["m"].mul_(first).add_(p.grad.data, alpha=1 - first)
            state["v"].mul_(second).addcmul_(p.grad.data, p.grad.data, value=1 - second)
            rate = math.sqrt(1 - second ** state["step"]) / (1 - first ** state["step"])
            p.data.addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-group["lr"] * rate)


class Averaged(torch.optim.Optimizer):
    """Sets its entries anew; a counter of its own; lists of tensors at once."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for _, p, state in with_gradient(self):
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            means = [self.state[p]["m"] for p in found]
            torch._foreach_add_(found, means, alpha=-group["lr"] / math.sqrt(self.calls))


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware: climbs, and steps back down with the gradient from up there. The optimizer
    inside has the same groups."""

    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm() for _, p, _ in with_gradient(self)]
        norm = torch.stack(norms).norm()
        for group, p, state in with_gradient(self):
            state["old"] = p.data.clone()
            p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for _, p, state in with_gradient(self):
            p.data = state["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        closure()
        self.second_step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Climbing(torch.optim.Optimizer):
    """Another style: keeps what it added, and is given the optimizer inside."""

    def __init__(self, parameters, optimizer, rho=0.05):
        self.optimizer = optimizer
        super().__init__(parameters, {"rho": rho})

    @torch.no_grad()
    def first_step(self):
        for group, p, state in with_gradient(self):
            state["added"] = p.grad * group["rho"]
            p.add_(state["added"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for _, p, state in with_gradient(self):
            p.sub_(state["added"])
        self.optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


class Slow(torch.optim.Optimizer):
    """Looks ahead: every second step half way back; its weights are in the state of the other."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.optimizer.state[p]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(p)
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


def stepping(optimizer, loss_of):
    loss = loss_of()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def stepping_read(optimizer, loss_of):
    before = stepping(optimizer, loss_of)
    with torch.no_grad():
        return before, loss_of()


def climbing(optimizer, loss_of):
    loss = loss_of()
    loss.backward()
    optimizer.first_step()
    loss_of().backward()
    optimizer.second_step()
    return loss.detach()


def by_closure(optimizer, loss_of):
    loss = loss_of()
    loss.backward()
    optimizer.step(lambda: loss_of().backward())
    return loss.detach()


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
WAYS = {  # the optimizers, of which the first is used; the body; how often it compiles again
    "momentum": (lambda ps: [Momentum(ps)], stepping, 1),
    "adam": (lambda ps: [OwnAdam(ps)], stepping, 1),
    "read after it": (lambda ps: [OwnAdam(ps)], stepping_read, 1),
    "set anew": (lambda ps: [Averaged(ps)], stepping, 1),
    "sharp": (lambda ps: [Sharp(ps, SGD, lr=0.1, momentum=0.9)], climbing, 0),
    "sharp closure": (lambda ps: [Sharp(ps, ADAMW, lr=0.01)], by_closure, 0),
    "sharp own": (lambda ps: [Sharp(ps, Momentum, lr=0.1)], climbing, 1),
    "climbing": (lambda ps: [Climbing(ps, ADAMW(ps, lr=0.01))], climbing, 0),
    "slow": (lambda ps: [Slow(ADAMW(ps, lr=0.01))], stepping, 2),
    "slow own": (lambda ps: [Slow(Momentum(ps))], stepping, 3),
}


def made(make, body):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh())
    optimizers = make(list(model.parameters()))

    def step(x, y):
        return body(optimizers[0], lambda: F.mse_loss(model(x), y))

    return step, model, optimizers


def states(optimizer):
    held = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    return [each.state_dict() for each in (optimizer, *held)]


@pytest.mark.parametrize("way", WAYS)
def test_equal_to_eager(way):
    """Also where the state is loaded anew between two calls. No part is outside of the graph."""
    make, body, most = WAYS[way]
    (step, model, ours), (eager, twin, theirs) = made(make, body), made(make, body)
    given = {"model": model, "optimizer": ours, "options": LIBRARY}
    compiled = treadle.compile(step, **given)
    for number in range(5):
        x, y = torch.randn(3, 5), torch.randn(3, 2)
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)
        mine, other = states(ours[0]), states(theirs[0])
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        if number == 2:
            for optimizer in (ours[0], theirs[0]):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(compiled.recompiles) <= most, compiled.recompiles
    assert "TR-105" not in compiled.explain()


def test_an_optimizer_and_the_one_inside_may_both_be_given():
    make = WAYS["sharp"][0]
    (step, model, ours), (eager, twin, _) = made(make, climbing), made(make, climbing)
    both = [ours[0], ours[0].base_optimizer]
    compiled = treadle.compile(step, model=model, optimizer=both, options=LIBRARY)
    for _ in range(3):
        x, y = torch.randn(3, 5), torch.randn(3, 2)
        torch.testing.assert_close(compiled(x, y), eager(x, y))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)


def test_strict_takes_it():
    step, model, ours = made(*WAYS["momentum"][:2])
    compiled = treadle.compile(step, model=model, optimizer=ours, strict=True)
    compiled(torch.randn(3, 5), torch.randn(3, 2))


def test_without_an_update_nothing_steps():
    step, model, ours = made(*WAYS["adam"][:2])
    compiled = treadle.compile(step, model=model, optimizer=ours, options=LIBRARY)
    before = copy.deepcopy(model.state_dict())
    compiled(torch.randn(3, 5), torch.randn(3, 2), update=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not ours[0].state


def test_numbers_that_come_apart_are_looked_at_again():
    """Counts that are equal are one number in the graph, until they are not."""
    (step, model, ours), (eager, twin, theirs) = (made(*WAYS["adam"][:2]) for _ in range(2))
    compiled = treadle.compile(step, model=model, optimizer=ours, options=LIBRARY)
    for number in range(5):
        if number == 3:
            ours[0].state[model[0].weight]["step"] = theirs[0].state[twin[0].weight]["step"] = 40
        x, y = torch.randn(3, 5), torch.randn(3, 2)
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)


class Warm:
    """No optimizer itself: sets the rate, and steps the one that it holds."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * min(self.calls**-0.5, self.calls * 0.1)
        self.optimizer.step()


class Viewing(torch.optim.Optimizer):
    """Keeps a tensor and a view of it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for _, p, state in with_gradient(self):
            if not state:
                state["whole"] = torch.zeros(2, *p.shape)
                state["view"] = state["whole"][0]
            state["view"].add_(p.grad)
            p.sub_(state["whole"].sum(0), alpha=0.01)


class Twice(Viewing):
    """Keeps one tensor under two keys, exchanges two others, and has an empty state somewhere."""

    @torch.no_grad()
    def step(self, closure=None):
        for _, p, state in with_gradient(self):
            if p.ndim == 1:
                continue
            if not state:
                state["one"], state["a"], state["b"] = (torch.zeros_like(p) for _ in range(3))
                state["other"] = state["one"]
            state["a"], state["b"] = state["b"], state["a"].add_(p.grad)
            state["one"].add_(state["a"])
            p.sub_(state["other"], alpha=0.01)


@pytest.mark.parametrize("kind", [Warm, Viewing, Twice])
def test_what_is_kept_stays_what_it_is(kind):
    def make(ps):
        return [Warm(ADAMW(ps)) if kind is Warm else kind(ps)]

    (step, model, ours), (eager, twin, theirs) = (made(make, stepping) for _ in range(2))
    compiled = treadle.compile(step, model=model, optimizer=ours[0], options=LIBRARY)
    for _ in range(5):
        x, y = torch.randn(3, 5), torch.randn(3, 2)
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)
    if kind is not Warm:
        torch.testing.assert_close(ours[0].state_dict(), theirs[0].state_dict())


class Looking(Momentum):
    def step(self, closure=None):
        if all(p.grad.norm().item() < 1e9 for p in self.param_groups[0]["params"]):
            super().step()


def test_one_that_looks_at_values_steps_outside_and_says_why():
    step, model, ours = made(lambda ps: [Looking(ps)], stepping)
    compiled = treadle.compile(step, model=model, optimizer=ours, options=LIBRARY)
    compiled(torch.randn(3, 5), torch.randn(3, 2))
    assert "its own step cannot be captured" in compiled.explain()
    assert "TR-102" in compiled.explain()


def test_a_class_whose_step_is_set_to_another_one_has_no_rule_from_then_on():
    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine([nn.Parameter(torch.ones(2))], lr=0.1)
    assert has_update_rule(optimizer)
    own = Mine.step
    Mine.step = lambda self: None
    assert not has_update_rule(optimizer)
    Mine.step = own
    assert has_update_rule(optimizer)
