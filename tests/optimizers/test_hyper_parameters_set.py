"""Hyper-parameters that the step itself sets before the update that reads them."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from optimizers.test_schedulers import SCHEDULERS
from treadle.options import Options

LIBRARY = Options(codegen=False)


class Own(torch.optim.Optimizer):
    """A step of its own, which is captured."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


class Outside(Own):
    """One that looks at values first, and steps outside of the graph."""

    def step(self, closure=None):
        if any(p.grad.norm().item() > 1e9 for p in self.param_groups[0]["params"]):
            return
        super().step(closure)


class Counter:
    def __init__(self):
        self.n = 0


TABLE = np.linspace(0.02, 0.001, 20)
KINDS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "own": Own,
    "outside": Outside,
}


def put(optimizer, **values):
    for group in optimizer.param_groups:
        group.update(values)


def cosine(it):
    if it < 3:
        return 0.01 * (it + 1) / 3
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (it - 3) / 5)) * 0.009


def counted(optimizer, loss, it, counter):
    put(optimizer, lr=0.01 * math.sqrt(counter.n + 1))
    counter.n += 1


def scaled(optimizer, loss, it, counter):
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def all_of_them(optimizer, loss, it, counter):
    put(optimizer, lr=0.1 / (1 + it), momentum=0.5 + 0.01 * it, weight_decay=0.01 * (it + 1))


def at_milestones(optimizer, loss, it, counter):
    counter.n += 1
    if counter.n in {2, 5}:
        put(optimizer, lr=0.5 * optimizer.param_groups[0]["lr"])


def filled(optimizer, loss, it, counter):
    optimizer.param_groups[0]["lr"].fill_(0.01).mul_(1 + it)


WAYS = {  # what sets it, of which optimizer, and the most recompiles
    "of an argument": (lambda o, loss, it, c: put(o, lr=0.01 * (it + 1)), "adamw", 0),
    "a schedule by hand": (lambda o, loss, it, c: put(o, lr=cosine(it)), "adamw", 1),
    "a counter": (counted, "nadam", 0),
    "a constant": (lambda o, loss, it, c: put(o, lr=0.5), "rmsprop", 0),
    "an entry of an array": (lambda o, loss, it, c: put(o, lr=TABLE[it]), "adamw", 0),
    "its own value": (scaled, "adamw", 0),
    "milestones": (at_milestones, "adamw", 1),
    "several": (all_of_them, "sgd", 0),
    "betas": (lambda o, loss, it, c: put(o, betas=(0.9 - 0.01 * it, 0.9)), "adamw", 0),
    "the loss": (lambda o, loss, it, c: put(o, lr=0.1 * loss.item()), "adamw", 0),
    "a tensor": (lambda o, loss, it, c: put(o, lr=loss.detach() * 0.1), "sgd", 1),
    "a tensor that is filled": (filled, "tensor", 2),
    "of a step of one's own": (lambda o, loss, it, c: put(o, lr=0.01 * (it + 1)), "own", 1),
    "of an optimizer outside": (lambda o, loss, it, c: put(o, lr=0.01 * (it + 1)), "outside", 0),
}


def training(kind, set_before, set_after=lambda *_: None):
    """A step, its model and its optimizer."""
    torch.manual_seed(0)
    model, counter = nn.Linear(5, 3), Counter()
    optimizer = KINDS[kind](model.parameters())

    def step(x, it):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :3])
        loss.backward()
        set_before(optimizer, loss, it, counter)
        optimizer.step()
        set_after(optimizer, loss, it, counter)
        return loss.detach()

    return step, model, optimizer


def beside_eager(make, calls=5):
    """Some calls, with the optimizer's state loaded anew after the third."""
    (step, *ours), (eager, *theirs) = make(), make()
    made = treadle.compile(step, model=ours[0], optimizer=ours[1], options=LIBRARY)
    for it in range(calls):
        x = torch.randn(4, 5)
        torch.testing.assert_close(made(x, it), eager(x, it))
        mine, other = (copy.deepcopy(each[1].state_dict()) for each in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
        state = ours[0].state_dict(), theirs[0].state_dict()
        torch.testing.assert_close(*state, rtol=1e-4, atol=1e-6)
        if it == 2:
            ours[1].load_state_dict(mine)
            theirs[1].load_state_dict(other)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_step_sets_it_before_its_update(way):
    set_before, kind, most = WAYS[way]
    step = beside_eager(lambda: training(kind, set_before))
    assert len(step.recompiles) <= most, step.recompiles


def test_it_is_set_and_put_back():
    def back(optimizer, *_):
        put(optimizer, lr=0.01)

    for kind in ("adamw", "outside"):
        step = beside_eager(lambda kind=kind: training(kind, WAYS["of an argument"][0], back))
        assert not step.recompiles


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR"])
def test_a_scheduler_steps_before_the_update(name):
    def make():
        step, model, optimizer = training("adamw", lambda *_: scheduler.step())
        scheduler = SCHEDULERS[name](optimizer)
        return step, model, optimizer

    step = beside_eager(make)
    assert len(step.recompiles) <= 1  # its first step counts as one


def test_weight_decay_that_is_turned_on_compiles_once():
    def on(optimizer, loss, it, counter):
        put(optimizer, weight_decay=0.1 if it > 2 else 0.0)

    step = beside_eager(lambda: training("adamw", on))
    assert len(step.recompiles) == 1


def test_another_update_is_refused():
    """Momentum needs a state of its own, which was not there before the call."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        put(optimizer, momentum=0.9)
        optimizer.step()

    with pytest.raises(treadle.CaptureError, match=r"TR-139.*momentum of SGD") as caught:
        treadle.compile(step, model=model, optimizer=optimizer)(torch.randn(4, 5))
    assert "optimizer.step()" in caught.value.where
    assert "other state" in caught.value.message
    assert optimizer.param_groups[0]["momentum"] == 0


@pytest.mark.parametrize(("make", "values", "words"), [
    (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}, r"sets momentum of SGD .* other state"),
    (torch.optim.NAdam, {"betas": (0.8, 0.99)}, r"sets betas of NAdam .* counts"),
    (torch.optim.SGD, {"momentum": None}, r"sets momentum of SGD .* computes in the same call"),
], ids=["state", "counter", "computed"])  # fmt: skip
def test_each_reason_for_another_update_has_its_words(make, values, words):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = make(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        put(optimizer, **{k: loss.detach().item() if v is None else v for k, v in values.items()})
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(treadle.CaptureError, match=f"TR-139.*{words}") as caught:
        treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)(torch.randn(4, 5))
    assert "before the call" in caught.value.remedy


def test_each_of_several_in_a_tuple_decides_for_itself():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        first, second = optimizer.param_groups[0]["betas"]
        scale = (10.0 if first < 0.5 else 1.0) * (3.0 if second < 0.5 else 1.0)
        return model(x).sum() * 0 + scale

    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    found = []
    for betas in ((0.9, 0.99), (0.9, 0.4), (0.4, 0.99)):
        put(optimizer, betas=betas)
        found.append(compiled(torch.randn(2, 5)).item())
    assert found == [1.0, 3.0, 10.0]


@pytest.mark.parametrize("values", [{"lr": "fast"}, {"betas": 0.9}, {"weight_decay": None}])
def test_what_is_no_number_is_an_error_of_the_user_s(values):
    step, model, optimizer = training("adamw", lambda optimizer, *_: put(optimizer, **values))
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(TypeError, match=rf"TR-132.*AdamW cannot step with {next(iter(values))}="):
        compiled(torch.randn(4, 5), 1)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
