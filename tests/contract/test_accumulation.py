"""Gradients over several batches, steps without an optimizer, and several models at once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import treadle


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def training(model, optimizer):
    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(n=4):
    return torch.randn(n, 5), torch.randn(n, 3)


def test_calls_without_update_are_included_in_the_next_one_with():
    model = network()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    for _ in range(3):
        batches = [batch() for _ in range(3)]
        for each in batches[:-1]:
            before = copy.deepcopy(model.state_dict())
            step(*each, update=False)
            assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        step(*batches[-1])
        for x, y in batches:
            (twin(x) - y).square().mean().backward()
        clip_grad_norm_(twin.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
            assert mine.grad is None
    assert optimizer.state[model[0].weight]["step"] == 3
    assert any("update=" in note for note in step.recompiles)
    assert len(step.recompiles) == 2  # first, accumulating, and updating with gradients there


def test_gradients_without_update_are_the_sum():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    batches = [batch(), batch()]
    for each in batches:
        step(*each, update=False)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for x, y in batches:
        (twin(x) - y).square().mean().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_parameter_called_update_is_the_users():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, update):
        return model(x).sum().detach() * (2.0 if update else 1.0)

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    x = torch.randn(2, 5)
    torch.testing.assert_close(compiled(x, update=True), compiled(x, update=False) * 2)


def test_evaluation_needs_no_optimizer():
    model = network()

    @torch.no_grad()
    def evaluate(x, y):
        return (model(x) - y).abs().mean()

    step = treadle.compile(evaluate, model=model)
    x, y = batch()
    torch.testing.assert_close(step(x, y), evaluate(x, y))


def test_gradients_without_an_optimizer_stay():
    model = network()
    twin = copy.deepcopy(model)
    x, y = batch()

    def backward(x, y):
        (model(x) - y).square().mean().backward()

    step = treadle.compile(backward, model=model)
    for _ in range(2):
        assert step(x, y) is None
        (twin(x) - y).square().mean().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_model_is_still_needed():
    with pytest.raises(treadle.CaptureError, match="TR-108"):
        treadle.compile(lambda: None, model=[])


def test_two_models_and_two_optimizers_take_turns():
    """A GAN's step: the critic first, then the generator."""

    def make():
        torch.manual_seed(0)
        models = {
            "g": nn.Linear(3, 5),
            "d": nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)),
        }
        optimizers = {k: torch.optim.Adam(m.parameters(), lr=1e-2) for k, m in models.items()}

        def step(z, real):
            fake = models["g"](z)
            loss_d = models["d"](fake.detach()).mean() - models["d"](real).mean()
            optimizers["d"].zero_grad()
            loss_d.backward()
            optimizers["d"].step()
            optimizers["g"].zero_grad()
            loss_g = -models["d"](fake).mean()
            loss_g.backward()
            optimizers["g"].step()
            return {"d": loss_d.detach(), "g": loss_g.detach()}

        return models, optimizers, step

    models, optimizers, step = make()
    twins, _, eager = make()
    compiled = treadle.compile(step, model=models, optimizer=optimizers)
    for _ in range(5):
        z, real = torch.randn(6, 3), torch.randn(6, 5)
        ours, theirs = compiled(z, real), eager(z, real)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, model in models.items():
        for mine, other in zip(model.parameters(), twins[name].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_an_averaged_model_by_hand_inside_the_step():
    model = network()
    average = copy.deepcopy(model)
    twin, twin_average = copy.deepcopy(model), copy.deepcopy(model)

    def make(model, average, optimizer):
        inner = training(model, optimizer)

        def step(x, y):
            loss = inner(x, y)
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            return loss

        return step

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = treadle.compile(
        make(model, average, optimizer), model=[model, average], optimizer=optimizer
    )
    eager = make(twin, twin_average, reference)
    for _ in range(5):
        x, y = batch()
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-6)
    for mine, other in zip(average.parameters(), twin_average.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_an_averaged_model_beside_the_step():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    expected = None
    for _ in range(4):
        step(*batch())
        average.update_parameters(model)
        now = model[0].weight.detach().clone()
        expected = now if expected is None else expected * 0.9 + now * 0.1
    torch.testing.assert_close(average.module[0].weight, expected)
