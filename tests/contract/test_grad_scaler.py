"""``torch.amp.GradScaler`` in a step, beside eager: steps are skipped where gradients are not
finite, scales grow and shrink, and nothing compiles again."""

import pytest
import torch
from torch import nn

import treadle


def optimizer_of(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class World:
    """A model, its optimizer, a scaler, and a step that uses them."""

    def __init__(self, kind, *, clips=True, enabled=True, start=4.0):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.optimizer = optimizer_of(kind, self.model)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=start, growth_interval=2, enabled=enabled
        )
        self.clips = clips

    def step(self, x, y):
        loss = (self.model(x) - y).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def left(self):
        states = self.optimizer.state_dict()["state"]
        return [
            *self.model.state_dict().values(),
            *(p.grad for p in self.model.parameters()),
            *(value for state in states.values() for value in state.values()),
            self.scaler.state_dict(),
        ]


def batches(calls, infinite):
    torch.manual_seed(7)
    for call in range(calls):
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        if call in infinite:
            y[0, 0] = float("inf")
        yield x, y


@pytest.mark.parametrize("infinite", [(), (2,), (0, 3, 4)], ids=str)
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_scaled_step_is_eagers(kind, clips, infinite):
    eager, ours = World(kind, clips=clips), World(kind, clips=clips)
    step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
    for x, y in batches(7, infinite):
        torch.testing.assert_close(step(x, y), eager.step(x, y))
        found, expected = ours.left(), eager.left()
        assert len(found) == len(expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert step.recompiles == []


def test_the_least_and_the_largest_scales():
    for start in (2.0**127, 2.0**-126):
        eager, ours = World("sgd", start=start, clips=False), World("sgd", start=start, clips=False)
        step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
        for x, y in batches(5, (1,)):
            step(x, y)
            eager.step(x, y)
            assert ours.scaler.state_dict() == eager.scaler.state_dict()


def test_a_scaler_that_is_disabled_does_nothing():
    eager, ours = World("adamw", enabled=False), World("adamw", enabled=False)
    step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
    for x, y in batches(4, ()):
        torch.testing.assert_close(step(x, y), eager.step(x, y))
    torch.testing.assert_close(ours.left(), eager.left())
    assert step.recompiles == []


def test_two_optimizers_of_one_scaler():
    def build():
        torch.manual_seed(1)
        models = nn.Linear(3, 3), nn.Linear(3, 3)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        def step(x):
            first, second = models[0](x).square().mean(), models[1](x).exp().mean()
            for each in optimizers:
                each.zero_grad()
            scaler.scale([first, second])[0].backward()
            scaler.scale(second).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            return scaler.get_scale()

        return models, optimizers, step

    (theirs, others, eager), (models, optimizers, function) = build(), build()
    step = treadle.compile(function, model=list(models), optimizer=optimizers)
    for call in range(4):
        x = torch.randn(4, 3) * (100 if call == 2 else 1)  # the second model's loss is infinite
        assert step(x) == eager(x)
        for a, b in zip(models, theirs, strict=True):
            torch.testing.assert_close(a.state_dict(), b.state_dict())
        for a, b in zip(optimizers, others, strict=True):
            torch.testing.assert_close(a.state_dict()["state"], b.state_dict()["state"])
    assert step.recompiles == []


def test_gradients_only():
    ours = World("sgd", clips=False)
    step = treadle.compile(ours.step, model=ours.model, optimizer=ours.optimizer)
    before = [each.clone() for each in ours.model.parameters()]
    for x, y in batches(2, ()):
        step(x, y, update=False)
        ours.model.zero_grad()
        (4.0 * (ours.model(x) - y).square().mean()).backward()
    torch.testing.assert_close(list(ours.model.parameters()), before)
    assert ours.scaler.state_dict()["_growth_tracker"] == 0


def refused(name, world, loss):
    scaler, optimizer = world.scaler, world.optimizer
    scaler.scale(loss).backward()
    if name == "no update":
        scaler.step(optimizer)
    if name == "twice":
        optimizer.step()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("name", ["no update", "twice"])
def test_what_a_scaler_cannot_do_in_a_graph_is_refused(name):
    world = World("sgd")

    def step(x, y):
        refused(name, world, (world.model(x) - y).square().mean())

    compiled = treadle.compile(step, model=world.model, optimizer=world.optimizer)
    with pytest.raises(treadle.CaptureError, match="TR-106"):
        compiled(*next(batches(1, ())))


def test_errors_of_a_scaler_are_eagers():
    world = World("sgd")

    def step(x):
        world.scaler.scale(world.model(x).sum()).backward()
        world.scaler.unscale_(world.optimizer)
        world.scaler.unscale_(world.optimizer)

    with pytest.raises(RuntimeError, match=r"unscale_\(\) twice"):
        treadle.compile(step, model=world.model, optimizer=world.optimizer)(torch.randn(2, 4))


def test_a_scaler_that_is_made_in_the_step_is_refused():
    world = World("sgd")

    def step(x, y):
        world.scaler = torch.amp.GradScaler("cpu")
        return world.step(x, y)

    compiled = treadle.compile(step, model=world.model, optimizer=world.optimizer)
    with pytest.raises(treadle.CaptureError, match=r"TR-106(.|\n)*created in the step"):
        compiled(torch.randn(6, 4), torch.randn(6, 2))
