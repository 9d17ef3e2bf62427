"""Whether a gradient was there does not count where the step drops it before anybody looks."""

import pytest
import torch
from torch import nn

import treadle


def parts():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    other = nn.Linear(4, 2, bias=False)
    both = [*model.parameters(), *other.parameters()]
    return model, other, torch.optim.SGD(both, lr=0.1, momentum=0.9)


def first(model, other, x):
    return model(x).square().mean() + other(x).abs().mean()


def zero_grad(model, other, optimizer, x):
    first(model, other, x).backward()
    optimizer.zero_grad()


def made_zero(model, other, optimizer, x):
    first(model, other, x).backward()
    optimizer.zero_grad(set_to_none=False)


def by_model(model, other, optimizer, x):
    first(model, other, x).backward()
    model.zero_grad()
    other.zero_grad()


def by_hand(model, other, optimizer, x):
    first(model, other, x).backward()
    for each in [*model.parameters(), *other.parameters()]:
        each.grad = None


def another_tensor(model, other, optimizer, x):
    first(model, other, x).backward()
    for each in [*model.parameters(), *other.parameters()]:
        each.grad = torch.ones_like(each)


def twice(model, other, optimizer, x):
    first(model, other, x).backward()
    first(model, other, x + 1).backward()
    optimizer.zero_grad()
    first(model, other, x + 2).backward()
    optimizer.zero_grad()


def grad_alone(model, other, optimizer, x):
    torch.autograd.grad(first(model, other, x), list(model.parameters()))
    optimizer.zero_grad()


def inputs(model, other, optimizer, x):
    x = x.detach().requires_grad_()
    first(model, other, x).backward()
    optimizer.zero_grad()
    return x.grad.sign()


def hooked(model, other, optimizer, x):
    seen = []
    handle = model[0].weight.register_hook(lambda grad: seen.append(grad.norm()))
    first(model, other, x).backward()
    handle.remove()
    optimizer.zero_grad()
    return seen[0]


def halves(model, other, optimizer, x):
    first(model, other, x).backward()
    model.zero_grad()
    other.zero_grad(set_to_none=False)


DROPPED = [
    zero_grad, by_model, by_hand, another_tensor, twice, grad_alone, inputs, hooked,
]  # fmt: skip


def clipped(model, other, optimizer, x):
    first(model, other, x).backward()
    norm = nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.1)
    optimizer.zero_grad()
    return norm


def summed(model, other, optimizer, x):
    first(model, other, x).backward()
    total = model[0].weight.grad.sum()
    optimizer.zero_grad()
    return total


def stepped(model, other, optimizer, x):
    first(model, other, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def not_reached(model, other, optimizer, x):
    model(x).sum().backward()
    optimizer.zero_grad(set_to_none=False)  # zeros, or nothing, are left in ``other``


def after_accumulation(model, other, optimizer, x):
    seen = []
    weight = model[0].weight
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    first(model, other, x).backward()
    handle.remove()
    optimizer.zero_grad()
    return seen[0]


def one_of_two(model, other, optimizer, x):
    first(model, other, x).backward()
    model.zero_grad()


READ = [
    clipped, summed, stepped, not_reached, after_accumulation, one_of_two, made_zero, halves,
]  # fmt: skip


def pair(before):
    def make():
        model, other, optimizer = parts()

        def step(x):
            found = before(model, other, optimizer, x)
            loss = model(x).sum(1).square().mean()
            loss = loss if found is None else loss + found.mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [*model.parameters(), *other.parameters()], model, other, optimizer

    (step, ours, model, other, optimizer), (eager, theirs, *_) = make(), make()
    both = {"model": model, "other": other}
    return treadle.compile(step, model=both, optimizer=optimizer), eager, ours, theirs


@pytest.mark.parametrize("before", [*DROPPED, *READ], ids=lambda each: each.__name__)
def test_gradients_that_are_there_or_not(before):
    step, eager, ours, theirs = pair(before)
    generator = torch.Generator().manual_seed(8)
    for call in range(6):
        x = torch.randn(3, 4, generator=generator)
        for at in range(len(ours)):
            if call in (2, 4) and (call == 4 or at % 2):
                ours[at].grad = theirs[at].grad = None
            if call == 5 and at % 3:
                given = torch.randn(ours[at].shape, generator=generator)
                ours[at].grad, theirs[at].grad = given.clone(), given.clone()
        torch.testing.assert_close(step(x), eager(x))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)
    if before in DROPPED:
        assert step.recompiles == []
