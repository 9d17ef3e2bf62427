"""Ordinary models of ordinary users: five steps of each equal eager's.

The time of a compile grows with the number of operations, and AdamW adds ten for each parameter.
So most models have one layer here and are trained by SGD; ``LAYERS`` and ``ADAMW`` name the others.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from treadle.runtime.store.artifact import CallStep

pytest.importorskip("transformers")
from architectures import (
    ALL,
    EXPERTS,
    bert,
    gemma2,
    gpt2,
    mixtral,
    mixtral_by_default,
    qwen3_moe,
    resnet,
    t5,
    tokens,
)

LAYERS = {gpt2: 2, gemma2: 2}
"""Of models with more than one. GPT-2 stands for equal layers; those of Gemma 2 take turns."""

ADAMW = (gpt2, mixtral_by_default)
"""Models trained by AdamW: an ordinary one, and one whose experts may get no row."""

Optimizer = torch.optim.Optimizer


def _step(model: nn.Module, optimizer: Optimizer) -> Callable[..., torch.Tensor]:
    def step(**batch: torch.Tensor) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _documented() -> dict[str, str]:
    """The column of fallbacks of docs/reference/architectures.md, by model."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line[:1] == "|"]
    return {row[0].strip(): row[4].strip() for row in rows[2:]}


def _adamw(model: nn.Module) -> Optimizer:
    """Some gradients are zero but for rounding: of the bias of keys, which softmax takes away, of a
    bias before a norm. With the default ``eps`` Adam makes of such a one a step of up to ``lr``,
    into a direction that is another one on each machine. With an ``eps`` far above rounding the
    update changes as little as the gradient does, so that every parameter can be compared."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def _optimizer(make: Callable[..., object], model: nn.Module) -> Optimizer:
    if make in ADAMW:
        return _adamw(model)
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _made(make):
    torch.manual_seed(0)
    return make() if make in EXPERTS else make(layers=LAYERS.get(make, 1))


def _compare(make, ours, batch, *, steps=5, memory=None):
    """Losses of both ways and the two models after ``steps`` steps from the same seed."""
    ours.train()
    theirs = copy.deepcopy(ours)
    optimizers = [_optimizer(make, each) for each in (ours, theirs)]
    function = _step(ours, optimizers[0])
    step = treadle.compile(function, model=ours, optimizer=optimizers[0], memory=memory)
    eager = _step(theirs, optimizers[1])
    step.prepare(**batch)
    torch.manual_seed(1)
    mine = [step(**batch).item() for _ in range(steps)]
    torch.manual_seed(1)
    expected = [eager(**batch).item() for _ in range(steps)]
    return step, mine, expected, theirs


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_five_steps_equal_eager(make):
    ours, batch = _made(make)
    before = [each.detach().clone() for each in ours.parameters()]
    step, mine, expected, theirs = _compare(make, ours, batch)
    assert mine == pytest.approx(expected, rel=1e-4)
    ways = zip(ours.named_parameters(), theirs.parameters(), before, strict=True)
    for (name, a), b, start in ways:
        # Biases that start at zero are held to the distance that five steps can take them, and
        # what hardly moves, as what attention compares, to the distance that it went.
        scale = max(b.abs().max().item(), 0.05)
        moved = (b - start).abs().max().item()
        assert (a - b).abs().max().item() <= min(1e-4 * scale, 1e-2 * moved + 2e-7), name
    assert not step.compiled.artifact.fallbacks, step.compiled.artifact.fallbacks
    assert _documented()[make.__name__] == "none"


def test_the_page_has_a_row_for_each_architecture():
    assert list(_documented()) == [make.__name__ for make in ALL]


@pytest.mark.parametrize(
    "make", [gpt2, bert, t5, gemma2, mixtral, qwen3_moe, resnet], ids=lambda make: make.__name__
)
def test_the_smallest_plan_gives_the_same_losses(make):
    ours, batch = _made(make)
    step, mine, expected, _ = _compare(make, ours, batch, steps=3, memory=0.0)
    assert mine == pytest.approx(expected, rel=1e-4)
    report = step.measure(**batch)
    assert report.peak_bytes <= step.compiled.artifact.peak_bytes * 1.05


@pytest.mark.parametrize("make", [gpt2, resnet], ids=lambda make: make.__name__)
def test_float64_losses_are_eagers(make):
    ours, batch = _made(make)
    ours.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    _, mine, expected, _ = _compare(make, ours, batch)
    assert mine == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("make", EXPERTS, ids=lambda make: make.__name__)
def test_experts_that_get_other_rows_at_each_step(make):
    """A gradient that is zero but for rounding is none of Adam's here, see ``_adamw``."""
    ours, _ = _made(make)
    theirs = copy.deepcopy(ours)
    optimizers = [_optimizer(make, each) for each in (ours, theirs)]
    step = treadle.compile(_step(ours, optimizers[0]), model=ours, optimizer=optimizers[0])
    eager = _step(theirs, optimizers[1])
    for seed in range(4):
        torch.manual_seed(seed)
        batch = tokens()
        torch.testing.assert_close(step(**batch), eager(**batch), rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max().item() <= 1e-5, name
    calls = [each.op for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert sum(each == "treadle.grouped_mm.default" for each in calls) == 6
    assert not step.compiled.artifact.fallbacks, step.compiled.artifact.fallbacks
