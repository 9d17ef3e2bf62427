"""Schedulers that the step itself steps after its update, and Accelerate's prepared ones."""

import pytest
import torch
from torch import nn

import treadle
from optimizers.test_schedulers import SCHEDULERS
from treadle.options import Options

LIBRARY = Options(codegen=False)

INSIDE = (
    "StepLR",
    "LambdaLR",
    "CosineAnnealingLR",
    "OneCycleLR",
    "SequentialLR",
    "ExponentialLR",
    "MultiStepLR",
)

BY_FORMULA = ("ExponentialLR",)
"""Takes one path at every call."""


def ran(scheduler_of, *, compiled, calls=12):
    """What each call gave, the learning rate and the count after it; the reasons of recompiles."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = scheduler_of(optimizer)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    made = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
    found = []
    for _ in range(calls):
        loss = made(torch.randn(4, 5)).item()
        found.append((loss, optimizer.param_groups[0]["lr"], scheduler.last_epoch))
    return found, [*made.recompiles, *made.recaptures] if compiled else []


@pytest.mark.parametrize("name", INSIDE)
def test_a_scheduler_may_step_after_the_update(name):
    theirs, _ = ran(SCHEDULERS[name], compiled=False)
    ours, reasons = ran(SCHEDULERS[name], compiled=True)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    if name in BY_FORMULA:
        assert reasons == []
    assert "_step_count" not in " ".join(reasons)


def test_a_scheduler_that_steps_first_warns_as_in_eager():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x):
        scheduler.step()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    made = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        made(torch.randn(4, 5))


def test_a_step_may_set_the_learning_rate_after_its_update():
    class Warmup:
        def __init__(self, optimizer):
            self.groups, self.last_epoch = optimizer.param_groups, 0

        def step(self):
            self.last_epoch += 1
            for group in self.groups:
                group["lr"] = 1e-2 * min(1.0, (self.last_epoch + 1) / 5)

    theirs, _ = ran(Warmup, compiled=False)
    ours, reasons = ran(Warmup, compiled=True)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert reasons == []


def test_one_that_looks_at_the_loss_takes_a_path():
    """``ReduceLROnPlateau`` compares: one compile for each way that it takes first."""

    def plateau(optimizer):
        made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        return lambda loss: made.step(loss.item())

    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        after = plateau(optimizer)

        def step(x, model=model, optimizer=optimizer, after=after):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
            return loss.detach()

        given = {"model": model, "optimizer": optimizer, "options": LIBRARY}
        made = treadle.compile(step, **given) if compiled else step
        torch.manual_seed(1)
        losses = [made(torch.randn(4, 5)).item() for _ in range(10)]
        found.append([*losses, optimizer.param_groups[0]["lr"]])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][-1] < 1e-3
    assert len(made.recompiles) <= 1, made.recompiles


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_accelerates_prepared_scheduler(inside):
    accelerate = pytest.importorskip("accelerate")
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

        def step(x, model=model, optimizer=optimizer, scheduler=scheduler):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if inside:
                scheduler.step()
            return loss.detach()

        made = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
        rows = []
        for _ in range(7):
            rows.append((made(torch.randn(4, 5)).item(), optimizer.param_groups[0]["lr"]))
            if not inside:
                scheduler.step()
        found.append(rows)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert made.recompiles == []
