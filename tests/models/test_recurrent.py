"""Recurrent layers stay one call a layer, forward and backward, and train as in eager."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.options import from_environment
from treadle.runtime.kernels.rng import STATE_BYTES
from treadle.runtime.store.artifact import CallStep
from treadle.util.errors import CaptureError

PLAIN = replace(from_environment(), codegen=False)


class Reader(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(31, 8), kind(8, 12, 2, batch_first=True)
        self.out = nn.Linear(12, 31)

    def forward(self, ids):
        return self.out(self.body(self.embed(ids))[0])


class Many(nn.Module):
    """Layers side by side, so that one step holds them all."""

    def __init__(self) -> None:
        super().__init__()
        both = {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}
        self.layers = nn.ModuleList([
            nn.LSTM(6, 8, **both),
            nn.GRU(6, 8, **both),
            nn.RNN(6, 8, **both),
            nn.RNN(6, 8, nonlinearity="relu", bias=False, batch_first=True),
            nn.LSTM(6, 8, proj_size=5, num_layers=2, batch_first=True),
            nn.LSTM(6, 8, bias=False, batch_first=True),
            nn.GRU(6, 8, bias=False, batch_first=True),
        ])  # fmt: skip

    def forward(self, x, states):
        return [layer(x, state) for layer, state in zip(self.layers, states, strict=True)]


def make_step(model, optimizer):
    def step(ids):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-3)


def twins(model, optimizer=ADAM):
    twin = copy.deepcopy(model)
    return [(m, optimizer(m.parameters())) for m in (model, twin)]


def tensors(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize(
    ("kind", "memory"), [(nn.LSTM, None), (nn.GRU, None), (nn.RNN, None), (nn.LSTM, 0.0)]
)
def test_steps_equal_eager(kind, memory):
    torch.manual_seed(0)
    (model, ours), (twin, theirs) = twins(Reader(kind))
    step = treadle.compile(make_step(model, ours), model=model, optimizer=ours, memory=memory)
    eager = make_step(twin, theirs)
    for _ in range(2):
        ids = torch.randint(31, (3, 6))
        torch.testing.assert_close(step(ids), eager(ids), rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert not step.compiled.artifact.fallbacks
    calls = [each.op for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert sum("lstm" in each or "recurrent" in each for each in calls) == 4
    report = step.measure(ids)
    promised = step.compiled.artifact.peak_bytes - STATE_BYTES  # kept at the first call alone
    assert report.peak_bytes == pytest.approx(promised, rel=0.05)


def carried(model, optimizer, *, low=False):
    """A step whose hidden states go from call to call, detached."""

    def step(x, states):
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            found = model(x, states)
        loss = sum(y.float().square().mean() for y, _ in found)
        last = [state if isinstance(state, tuple) else (state,) for _, state in found]
        loss = loss + sum(each.float().sin().mean() for state in last for each in state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = [tuple(each.detach() for each in state) for state in last]
        return loss.detach(), [state if len(state) == 2 else state[0] for state in after]

    return step


@pytest.mark.parametrize("low", [False, True])
def test_states_are_carried_and_draws_are_eager_s(low):
    torch.manual_seed(0)
    (model, ours), (twin, theirs) = twins(Many(), partial(torch.optim.SGD, lr=1e-2))
    step = treadle.compile(
        carried(model, ours, low=low), model=model, optimizer=ours, options=PLAIN
    )  # the layers matter here; kernels for all of them take long to compile
    eager = carried(twin, theirs, low=low)
    mine = others = [None] * len(model.layers)
    for _ in range(2):
        x = torch.randn(3, 5, 6)
        seed = torch.get_rng_state()
        loss, mine = step(x, mine)
        after = torch.get_rng_state()
        torch.set_rng_state(seed)
        expected, others = eager(x, others)
        assert torch.equal(torch.get_rng_state(), after)
        bounds = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(loss, expected, **bounds)
        for a, b in zip(tensors(mine), tensors(others), strict=True):
            torch.testing.assert_close(a, b, **bounds)


def checkpointed(model, optimizer, *, reentrant):
    def step(x):
        loss = checkpoint(lambda each: model(each)[0], x, use_reentrant=reentrant).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize(("kind", "reentrant"), [(nn.LSTM, False), (nn.GRU, True)])
def test_a_checkpointed_layer_equals_eager(kind, reentrant):
    torch.manual_seed(0)
    (model, ours), (twin, theirs) = twins(kind(4, 6))
    step = treadle.compile(
        checkpointed(model, ours, reentrant=reentrant),
        model=model,
        optimizer=ours,
        options=PLAIN,
    )
    eager = checkpointed(twin, theirs, reentrant=reentrant)
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(step(x.clone().requires_grad_()), eager(x.clone().requires_grad_()))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_one_compile_serves_many_lengths():
    torch.manual_seed(0)
    (model, ours), (twin, theirs) = twins(Reader(nn.LSTM))
    shapes = treadle.dynamic({"ids": (None, "time")}, time=(3, 40))
    step = treadle.compile(make_step(model, ours), model=model, optimizer=ours, shapes=shapes)
    eager = make_step(twin, theirs)
    for time in (6, 11):
        ids = torch.randint(31, (3, time))
        torch.testing.assert_close(step(ids), eager(ids), rtol=1e-4, atol=1e-5)


def test_a_penalty_on_its_gradient_is_refused():
    model = nn.LSTM(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        (gradient,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        gradient.square().sum().backward()
        optimizer.step()

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    with pytest.raises(CaptureError, match=r"TR-140[\s\S]*gradient.square"):
        compiled(torch.randn(4, 2, 3, requires_grad=True))
