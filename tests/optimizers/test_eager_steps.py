"""Optimizers that cannot be in the graph step after it, in eager's own way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a running mean, and looks at values; ``fails`` makes it raise half way
    through."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.grad.abs().sum().item() == 0.0:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(mean.sign(), alpha=group["lr"])
                if self.fails:
                    raise FloatingPointError("no more")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def signs(model):
    return [Signs(model.parameters())]


def mixed(model):
    """One in the graph, one outside."""
    adam = torch.optim.AdamW(model.first.parameters(), lr=0.01)
    return [adam, Signs([*model.second.parameters(), *model.idle.parameters()])]


def hooked(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def halve(stepped, *_):
        for p in stepped.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return [optimizer]


def lookahead(model):
    """A post hook that uses the new parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def pull(*_):
        for mine, p in zip(slow, model.parameters(), strict=True):
            mine.lerp_(p, 0.5)
            p.copy_(mine)

    optimizer.register_step_post_hook(pull)
    return [optimizer]


def clearing(model, optimizers, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for each in optimizers:
        each.step()
        each.zero_grad()
    return loss.detach()


def leaving(model, optimizers, x, y):
    for each in optimizers:
        each.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for each in optimizers:
        each.step()
    return loss.detach()


def filling(model, optimizers, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad(set_to_none=False)
    return loss.detach()


def made(make):
    torch.manual_seed(0)
    model = Net()
    return model, make(model)


def bound(body, model, optimizers):
    def step(x, y):
        return body(model, optimizers, x, y)

    return step


def assert_same(ours, theirs):
    (model, optimizers), (twin, others) = ours, theirs
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    for a, b in zip(optimizers, others, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("body", [clearing, leaving, filling])
@pytest.mark.parametrize("make", [signs, mixed, hooked, lookahead])
def test_equal_to_eager(make, body):
    ours, theirs = made(make), made(make)
    step = treadle.compile(bound(body, *ours), model=ours[0], optimizer=ours[1])
    eager = bound(body, *theirs)
    scheduler, other = (torch.optim.lr_scheduler.StepLR(o[1][-1], 2, 0.5) for o in (ours, theirs))
    for _ in range(6):
        x, y = torch.randn(4, 5), torch.randn(4, 3)
        torch.testing.assert_close(step(x, y), eager(x, y))
        assert_same(ours, theirs)
        scheduler.step()
        other.step()
    assert len(step.recompiles) <= (0 if body is clearing else 1)  # .grad appears once
    code = "TR-105" if make in (signs, mixed) else "TR-114"
    assert f"{code}: " in step.explain()
    assert "fallbacks: 1" in step.explain()


def test_strict_refuses_it():
    model, optimizers = made(signs)
    step = treadle.compile(
        bound(clearing, model, optimizers), model=model, optimizer=optimizers, strict=True
    )
    with pytest.raises(treadle.LoweringError, match=r"TR-302.*Signs has no update rule"):
        step(torch.randn(4, 5), torch.randn(4, 3))


def test_accumulation_leaves_it_alone():
    ours, theirs = made(signs), made(signs)
    step = treadle.compile(bound(clearing, *ours), model=ours[0], optimizer=ours[1])
    for number in range(4):
        x, y = torch.randn(4, 5), torch.randn(4, 3)
        step(x, y, update=number % 2 == 1)
        F.mse_loss(theirs[0](x), y).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(theirs[0].parameters(), 0.1)
            theirs[1][0].step()
            theirs[1][0].zero_grad()
        assert_same(ours, theirs)


def test_a_value_from_after_its_step_is_refused_with_the_line():
    model, optimizers = made(signs)

    def step(x):
        model(x).square().mean().backward()
        optimizers[0].step()
        return model(x).sum()  # the second forward pass

    compiled = treadle.compile(step, model=model, optimizer=optimizers)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(treadle.CaptureError, match="TR-115") as caught:
        compiled(torch.randn(4, 5))
    assert "test_eager_steps.py" in caught.value.where
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_is_read_before_its_step_is_not_what_it_leaves():
    """A view of a parameter, taken before; the old value is what eager's copy holds."""
    (model, optimizers), (twin, others) = made(signs), made(signs)

    def train(model, optimizers, x):
        norm = model.first.weight.detach().norm()
        model(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return norm

    step = treadle.compile(lambda x: train(model, optimizers, x), model=model, optimizer=optimizers)
    for _ in range(3):
        x = torch.randn(4, 5)
        torch.testing.assert_close(step(x), train(twin, others, x))


@pytest.mark.parametrize("make", [signs, mixed])
def test_a_failure_in_its_first_step_is_undone(make):
    model, optimizers = made(make)
    step = treadle.compile(bound(clearing, model, optimizers), model=model, optimizer=optimizers)
    before = copy.deepcopy(model.state_dict())
    optimizers[-1].fails = True
    x, y = torch.randn(4, 5), torch.randn(4, 3)
    with pytest.raises(FloatingPointError):
        step(x, y)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert not any(each.state for each in optimizers)
    optimizers[-1].fails = False
    other, others = made(make)
    torch.testing.assert_close(step(x, y), bound(clearing, other, others)(x, y))
    assert_same((model, optimizers), (other, others))
    optimizers[-1].fails = True
    with pytest.raises(treadle.TreadleError, match="TR-406"):
        step(x, y)


def test_twice_is_refused():
    model, optimizers = made(signs)

    def step(x):
        model(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].step()

    compiled = treadle.compile(step, model=model, optimizer=optimizers)
    with pytest.raises(treadle.CaptureError, match="TR-109"):
        compiled(torch.randn(4, 5))


def test_verify_and_plan_take_it():
    model, optimizers = made(signs)
    function = bound(clearing, model, optimizers)
    batch = torch.randn(4, 5), torch.randn(4, 3)
    assert treadle.plan(function, *batch, model=model, optimizer=optimizers).fits
    step = treadle.compile(function, model=model, optimizer=optimizers)
    assert step.verify([batch, batch]) is None
