"""Tensors that need gradients and belong to no module: an image, a temperature, points."""

import pytest
import torch
from torch import nn

import treadle


class Trained:
    """A small network, and tensors beside it."""

    def __init__(self):
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.adam = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.x = torch.rand(10, 1, requires_grad=True)
        self.t = torch.rand(10, 1).requires_grad_(True)
        self.temperature = torch.zeros(1, requires_grad=True)
        self.image = torch.rand(6, 2).requires_grad_()
        self.held = {"points": [self.x, self.t]}

    def gradients(self):
        points = [*self.held["points"], self.temperature, self.image]
        return [None if each.grad is None else each.grad.clone() for each in points]

    def update(self, loss, *optimizers):
        self.adam.zero_grad()
        loss.backward()
        for each in optimizers or [self.adam]:
            each.step()
        return loss.detach()


def residual(each):
    """A physics-informed network: gradients by points, which a backward also reaches."""

    def step():
        x, t = each.held["points"]
        u = each.net(torch.cat([x, t], 1))
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        return each.update((u_x**2 + u).pow(2).mean())

    return step, [each.adam]


def temperature(each):
    """One that an optimizer of its own steps, beside the network's."""
    optimizer = torch.optim.Adam([each.temperature], lr=3e-2)

    def step():
        u = each.net(torch.cat(each.held["points"], 1).detach())
        loss = (u * each.temperature.exp()).pow(2).mean() - 0.1 * each.temperature.sum()
        optimizer.zero_grad()
        return each.update(loss, optimizer, each.adam), each.temperature.detach().exp()

    return step, [each.adam, optimizer]


def picture(each):
    """An image is trained, the network is not."""
    each.net.requires_grad_(False)
    optimizer = torch.optim.SGD([each.image], lr=0.3, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = (each.net(each.image) - 0.7).pow(2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            each.image.clamp_(0, 1)
        return loss.item()

    return step, [optimizer]


def clears(each):
    """Gradients of points that the step itself clears and reads."""

    def step():
        x, t = each.held["points"]
        x.grad = None
        loss = each.net(torch.cat([x, t], 1)).pow(2).mean()
        result = each.update(loss)
        return result, x.grad.norm()

    return step, [each.adam]


def left(each):
    state = [v for o in each.optimizers for s in o.state.values() for v in s.values()]
    return [*each.net.parameters(), each.temperature, each.image, *state]


def between(number, each):
    """What a script does meanwhile."""
    match number:
        case 1:
            each.x.grad = each.temperature.grad = None
        case 2:
            each.t.grad = torch.ones_like(each.t)
        case 3:
            each.held["points"] = [torch.rand(10, 1, requires_grad=True), each.t]
        case 4:
            with torch.no_grad():
                each.temperature.add_(0.5), each.t.mul_(0.9), each.image.mul_(0.9)


@pytest.mark.parametrize("make", [residual, temperature, picture, clears])
def test_they_train_and_have_eagers_gradients(make):
    eager, ours = Trained(), Trained()
    expected, eager.optimizers = make(eager)
    function, ours.optimizers = make(ours)
    step = treadle.compile(function, model=ours.net, optimizer=ours.optimizers)
    for number in range(6):
        torch.manual_seed(number)
        torch.testing.assert_close(step(), expected(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.gradients(), eager.gradients(), rtol=1e-4, atol=1e-6)
        for each in (eager, ours):
            torch.manual_seed(number)
            between(number, each)
    torch.testing.assert_close(left(ours), left(eager), rtol=1e-4, atol=1e-6)
    assert step.recompiles == []


def test_no_model_at_all():
    image = torch.rand(3, 3, requires_grad=True)
    optimizer = torch.optim.Adam([image], lr=0.1)

    def function(target):
        loss = (image - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    assert treadle.plan(function, torch.ones(3, 3), model=[], optimizer=optimizer).fits
    step = treadle.compile(function, model=[], optimizer=optimizer)
    losses = [step(torch.ones(3, 3)) for _ in range(20)]
    assert losses[-1] < 0.1 * losses[0]


def test_what_was_computed_outside_is_refused():
    model = nn.Linear(3, 3)
    outside = torch.rand(3, requires_grad=True).exp()

    def function(x):
        loss = (model(x) * outside).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(treadle.CaptureError, match=r"TR-110.*computed outside"):
        treadle.compile(function, model=model)(torch.randn(2, 3))


def test_parameters_that_an_optimizer_gets_later_are_refused():
    model, extra = nn.Linear(3, 3), torch.rand(3, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x):
        loss = (model(x) * extra).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = treadle.compile(function, model=model, optimizer=optimizer)
    step(torch.randn(2, 3))
    optimizer.add_param_group({"params": [extra]})
    with pytest.raises(treadle.CaptureError, match="TR-103"):
        step(torch.randn(2, 3))
