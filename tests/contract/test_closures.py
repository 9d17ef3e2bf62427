"""Optimizers outside of the graph that call a closure as they like: the closure is compiled."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

POINTS = torch.linspace(-1, 1, 23)[:, None]


def lbfgs(parameters, **named):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, **named)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021), which asks for the loss at two points."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "radius": 0.05})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            moves = [group["radius"] * grad / norm for grad in grads]
            for p, move in zip(group["params"], moves, strict=True):
                p.add_(move)
            closure()
            for p, move in zip(group["params"], moves, strict=True):
                p.sub_(move).sub_(group["lr"] * p.grad)
        return loss


class Fit:
    """A model, an optimizer, and ways to write a step with a closure."""

    def __init__(self, make):
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = make(self.model.parameters())
        self.losses = []
        self.calls = 0

    def loss(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss

    def nested(self, x, y):
        def closure():
            return self.loss(x, y)

        return self.optimizer.step(closure).detach()

    def anonymous(self, x, y):
        return self.optimizer.step(lambda: self.loss(x, y)).item()

    def writes_outside(self, x, y):
        last = None

        def closure():
            nonlocal last
            last = self.loss(x, y)
            self.losses.append(last.item())
            return last

        self.optimizer.step(closure)
        return last.detach()

    def method(self, x, y):
        self.x, self.y = x, y
        return self.optimizer.step(self.closure).detach()

    def closure(self):
        self.calls += 1
        return self.loss(self.x, self.y)

    def no_gradients(self, x, y):
        def closure():
            if torch.is_grad_enabled():
                self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            if loss.requires_grad:
                loss.backward()
            return loss

        self.optimizer.step(closure)
        with torch.no_grad():
            return closure()

    def left(self):
        parameters = list(self.model.parameters())
        grads = [each.grad for each in parameters]
        return [*parameters, *grads, torch.tensor(self.losses), torch.tensor(self.calls)]


def batches(count):
    generator = torch.Generator().manual_seed(9)
    for _ in range(count):
        x = torch.cat([POINTS, POINTS**2, POINTS**3], 1)
        yield x + 0.1 * torch.randn(x.shape, generator=generator), POINTS.sin()


WAYS = ("nested", "anonymous", "writes_outside", "method", "no_gradients")


def searching(parameters):
    return lbfgs(parameters, line_search_fn="strong_wolfe")


@pytest.mark.parametrize(
    ("make", "way"),
    [(lbfgs, way) for way in WAYS] + [(searching, "method"), (Sharpness, "nested")],
)
def test_numbers_are_eagers(way, make):
    """Gradients, what closures write outside, and how often they were called, too."""
    eager, ours = Fit(make), Fit(make)
    step = treadle.compile(getattr(ours, way), model=ours.model, optimizer=ours.optimizer)
    for x, y in batches(5):
        expected, found = getattr(eager, way)(x, y), step(x, y)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.left(), eager.left(), rtol=1e-3, atol=1e-5)
    assert step.recompiles == []


def test_explain_and_strict_tell_of_it():
    fit = Fit(lbfgs)
    step = treadle.compile(fit.nested, model=fit.model, optimizer=fit.optimizer)
    for x, y in batches(2):
        step(x, y)
    assert "LBFGS.step(closure) x1: TR-105" in step.explain()
    assert step.summary().fallbacks == 1
    assert step.measure(x, y).peak_bytes > 0
    strict = treadle.compile(fit.nested, model=fit.model, optimizer=fit.optimizer, strict=True)
    with pytest.raises(treadle.LoweringError, match=r"TR-302.*closure"):
        strict(x, y)


def test_without_an_update_the_call_is_eager_and_says_so():
    fit, eager = Fit(lbfgs), Fit(lbfgs)
    step = treadle.compile(fit.nested, model=fit.model, optimizer=fit.optimizer)
    (x, y), (more, target) = batches(2)
    step(x, y), eager.nested(x, y)
    step(more, target, update=False)
    loss = F.mse_loss(eager.model(more), target)
    grads = torch.autograd.grad(loss, list(eager.model.parameters()))
    found = [each.grad for each in fit.model.parameters()]
    torch.testing.assert_close(found, list(grads), rtol=1e-3, atol=1e-5)
    assert step.recompiles == ["a call ran eagerly: update=False for a step with a closure"]


def test_the_first_phase_is_one_graph_and_the_second_is_not():
    """Two optimizers by turns, as for physics-informed networks."""

    def phases(fit, adam):
        def step(x, y, second):
            if second:
                return fit.optimizer.step(lambda: fit.loss(x, y)).detach()
            loss = fit.loss(x, y)
            adam.step()
            return loss.detach()

        return step

    losses = []
    for compiled in (False, True):
        fit = Fit(lbfgs)
        adam = torch.optim.Adam(fit.model.parameters())
        step = phases(fit, adam)
        if compiled:
            step = treadle.compile(step, model=fit.model, optimizer=[adam, fit.optimizer])
        turns = [False, False, True, True, False, True]
        losses.append([step(*b, s) for b, s in zip(batches(6), turns, strict=True)])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    assert not any("eagerly" in each for each in step.recompiles)


def test_without_a_closure_the_next_call_is_captured_again():
    """What decides it is nothing that a call without a capture looks at."""
    fit = Fit(lbfgs)
    adam = torch.optim.Adam(fit.model.parameters())

    def step(x, y):
        if fit.calls == 0:
            return fit.optimizer.step(lambda: fit.loss(x, y)).detach()
        loss = fit.loss(x, y)
        adam.step()
        return loss.detach()

    step = treadle.compile(step, model=fit.model, optimizer=[adam, fit.optimizer])
    for number, (x, y) in enumerate(batches(4)):
        fit.calls = number // 2
        step(x, y)
    assert [each for each in step.recompiles if "eagerly" in each] == [
        "a call ran eagerly: its optimizer received no closure"
    ]
    assert "Adam" not in step.explain().split("captured:")[0]


def test_a_closure_that_fails_fails_as_in_eager():
    fit = Fit(lbfgs)
    step = treadle.compile(fit.nested, model=fit.model, optimizer=fit.optimizer)
    (x, y), (good, target) = batches(2)
    with pytest.raises(treadle.CaptureError, match="TR-132"):
        step(x[:, :2], y)
    assert "step" not in vars(fit.optimizer)
    step(good, target)


def test_a_saved_step_finds_its_closures(tmp_path):
    fit = Fit(lbfgs)
    step = treadle.compile(fit.nested, model=fit.model, optimizer=fit.optimizer)
    for x, y in batches(2):
        step(x, y)
    step.save(tmp_path / "fit.treadle")
    loaded = treadle.load(
        tmp_path / "fit.treadle", fit.nested, model=fit.model, optimizer=fit.optimizer
    )
    loaded(x, y)
    assert loaded.compiled.from_cache
    assert loaded.recompiles == []
