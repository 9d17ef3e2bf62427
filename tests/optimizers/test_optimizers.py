"""Every optimizer in the graph against ``torch.optim``: a hundred steps, groups, options, state."""

import copy

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.optimizers.registry import ZEROS, OptimizerUpdate

OPTIM = torch.optim
CASES = {
    "SGD": (OPTIM.SGD, {"lr": 0.05}),
    "SGD momentum": (OPTIM.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": (OPTIM.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "SGD ascent": (OPTIM.SGD, {"lr": 1e-5, "maximize": True, "weight_decay": 0.01}),
    "Adam": (OPTIM.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adam amsgrad": (OPTIM.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW": (OPTIM.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW ascent": (OPTIM.AdamW, {"lr": 1e-3, "amsgrad": True, "maximize": True}),
    "Adagrad": (OPTIM.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.2}),
    "Adagrad decay": (OPTIM.Adagrad, {"lr": 1e-3, "weight_decay": 0.01, "maximize": True}),
    "RMSprop": (OPTIM.RMSprop, {"lr": 1e-2}),
    "RMSprop momentum": (OPTIM.RMSprop, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
    "RMSprop centered": (OPTIM.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    "Adadelta": (OPTIM.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.01}),
    "Adamax": (OPTIM.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    "NAdam": (OPTIM.NAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "NAdam decoupled": (
        OPTIM.NAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RAdam": (OPTIM.RAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "RAdam decoupled": (
        OPTIM.RAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.8, 0.95)},
    ),
    "Adafactor": (OPTIM.Adafactor, {"lr": 0.05}),
    "Adafactor decay": (OPTIM.Adafactor, {"lr": 0.05, "weight_decay": 0.1, "d": 1.5}),
    "ASGD": (OPTIM.ASGD, {"lr": 0.05, "t0": 20, "weight_decay": 0.01}),
    "Rprop": (OPTIM.Rprop, {"lr": 1e-2}),
}


class Odd(nn.Module):
    """Parameters of awkward shapes: a scalar, one element, a prime, a matrix, a filter."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.one = nn.Parameter(torch.randn(1))
        self.prime = nn.Parameter(torch.randn(13))
        self.matrix = nn.Parameter(torch.randn(13, 5) * 0.3)
        self.filters = nn.Parameter(torch.randn(2, 1, 3, 2) * 0.3)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        h = torch.tanh(x @ self.matrix * self.scalar).sum(-1) + self.one
        return h + (self.filters.square().sum() + (self.prime * x).sum(-1).sin())


def training(model, optimizer):
    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def pair(kind, options, groups=False):
    made = []
    torch.manual_seed(0)
    first = Odd()
    for model in (first, copy.deepcopy(first)):
        parameters = list(model.parameters())
        given = parameters
        if groups:
            given = [
                {"params": parameters[:2]},
                {"params": parameters[2:], "lr": options["lr"] / 3},
            ]
        made.append((model, kind(given, **options)))
    return made


def same_state(ours, theirs, **close):
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for key, values in other["state"].items():
        assert mine["state"][key].keys() == values.keys()
        for name, value in values.items():
            found = mine["state"][key][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found, value, **close)


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_equal_torch_optim(name):
    kind, options = CASES[name]
    (model, optimizer), (twin, reference) = pair(kind, options, groups=True)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    eager = training(twin, reference)
    for _ in range(100):
        x, y = torch.randn(3, 13), torch.randn(3)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=2e-3, atol=1e-4)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
    same_state(optimizer, reference, rtol=2e-2, atol=1e-3)
    assert step.recompiles == []
    assert not step.compiled.artifact.fallbacks


@pytest.mark.parametrize(
    "name", ["AdamW", "NAdam", "Adafactor", "SGD momentum", "RMSprop centered"]
)
def test_state_moves_between_eager_and_compiled(name):
    """Two steps eager, two compiled, two eager again: as six eager ones."""
    kind, options = CASES[name]
    (model, optimizer), (twin, reference) = pair(kind, options)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    mine, eager = training(model, optimizer), training(twin, reference)
    for number in range(6):
        x, y = torch.randn(3, 13), torch.randn(3)
        found = step(x, y) if number in (2, 3) else mine(x, y)
        torch.testing.assert_close(found, eager(x, y), rtol=1e-4, atol=1e-5)
    same_state(optimizer, reference, rtol=1e-4, atol=1e-5)


def test_muon_turns_matrices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False))
    twin = copy.deepcopy(model)
    optimizer = OPTIM.Muon(model.parameters(), lr=0.01, weight_decay=0.1)
    reference = OPTIM.Muon(twin.parameters(), lr=0.01, weight_decay=0.1)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    eager = training(twin, reference)
    for _ in range(20):  # the iterations are in bfloat16: eight bits
        x, y = torch.randn(6, 7), torch.randn(6, 5)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=2e-2, atol=1e-2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=1e-2)


class Lion(OPTIM.Optimizer):
    """Signs of a momentum (Chen et al., 2023)."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.sub_((m * beta1 + p.grad * (1 - beta1)).sign(), alpha=group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class LionForm(OptimizerUpdate):
    @property
    def counters(self):
        return {}

    def structure(self, group):
        return ()

    def states(self, parameter, group):
        return {"exp_avg": ZEROS}

    def scalars(self, group):
        beta1, beta2 = group["betas"]
        return {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2}

    def prepare(self, scalars, group):
        return scalars

    def update(self, parameter, grad, state, shared, group):
        m = state["exp_avg"]
        mixed = m * shared["beta1"] + grad * (1.0 - shared["beta1"])
        parameter.copy_(parameter - mixed.sign() * shared["lr"])
        m.copy_(m * shared["beta2"] + grad * (1.0 - shared["beta2"]))


def test_an_optimizer_of_ones_own():
    (model, optimizer), (twin, reference) = pair(Lion, {"lr": 0.01})
    treadle.register_optimizer(Lion, LionForm())
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    eager = training(twin, reference)
    for _ in range(20):
        x, y = torch.randn(3, 13), torch.randn(3)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    same_state(optimizer, reference)
    with pytest.raises(treadle.CaptureError, match=r"TR-105.*Lion has an update rule already"):
        treadle.register_optimizer(Lion, LionForm())
    with pytest.raises(treadle.CaptureError, match=r"TR-105.*class Linear is not a class of optim"):
        treadle.register_optimizer(nn.Linear, LionForm())
    with pytest.raises(treadle.CaptureError, match=r"TR-105.*the class LionForm is not an update"):
        treadle.register_optimizer(torch.optim.ASGD, LionForm)


def test_a_subclass_is_served_unless_it_steps_otherwise():
    class Named(OPTIM.AdamW):
        pass

    class Other(OPTIM.AdamW):
        def step(self, closure=None):
            raise ArithmeticError("its own step")

    (model, optimizer), (twin, reference) = pair(Named, {"lr": 0.01})
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    x, y = torch.randn(3, 13), torch.randn(3)
    torch.testing.assert_close(step(x, y), training(twin, reference)(x, y))
    ((model, optimizer), _) = pair(Other, {"lr": 0.01})
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    with pytest.raises(ArithmeticError, match="its own step"):
        step(x, y)


def test_options_that_change_the_graph_compile_again_and_say_so():
    ((model, optimizer), (twin, reference)) = pair(OPTIM.AdamW, {"lr": 0.01, "weight_decay": 0.1})
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    eager = training(twin, reference)
    for decay in (0.1, 0.2, 0.0):
        optimizer.param_groups[0]["weight_decay"] = decay
        reference.param_groups[0]["weight_decay"] = decay
        x, y = torch.randn(3, 13), torch.randn(3)
        torch.testing.assert_close(step(x, y), eager(x, y))
    assert step.recompiles == ["an optimizer's options or parameter groups changed"]


@pytest.mark.parametrize("kind", [OPTIM.SGD, OPTIM.AdamW, OPTIM.RMSprop])
def test_a_closure_is_called_once(kind):
    def training_by_closure(model, optimizer):
        def step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step

    (model, optimizer), (twin, reference) = pair(kind, {"lr": 0.01})
    step = treadle.compile(training_by_closure(model, optimizer), model=model, optimizer=optimizer)
    eager = training_by_closure(twin, reference)
    for _ in range(5):
        x, y = torch.randn(3, 13), torch.randn(3)
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-5, atol=1e-6)
    same_state(optimizer, reference)
    before = [each.clone() for each in model.parameters()]
    step(x, y, update=False)
    torch.testing.assert_close(list(model.parameters()), before)
    assert len(step.recompiles) == 1  # for gradients alone
