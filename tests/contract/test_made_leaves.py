"""Tensors that a step makes, and from which others are to be differentiated: returned, or left
outside for the next call."""

import pytest
import torch
from torch import nn

import treadle


def returned(world, x):
    return (x * 2).detach().requires_grad_()


def kept(world, x):
    """A perturbation that is learned from call to call, as free adversarial training has it."""
    d = world["d"]
    loss = (world["model"].weight @ (x[0] + d)).square().sum()
    loss.backward()
    world["model"].zero_grad()
    world["d"] = (d - 0.1 * d.grad).detach().requires_grad_()
    return loss.detach()


def kept_in_place(world, x):
    d = world["d"]
    (world["model"].weight @ (x[0] + d)).square().sum().backward()
    world["model"].zero_grad()
    d.data = d.data - 0.1 * d.grad
    d.grad = None
    return d.detach().clone()


def parameter(world, x):
    world["d"] = nn.Parameter(x[0] * 2)
    return x.sum()


def in_a_list(world, x):
    world["more"] = [(x * 1).requires_grad_(), x * 2]
    return x.sum()


def switched(world, x):
    """The old one gets its gradient, the new one has none."""
    old = world["d"]
    (old * x[0]).sum().backward()
    world["old"], world["d"] = old, torch.ones(4, requires_grad=True)
    return x.sum()


def seen(tensor):
    gradient = None if tensor.grad is None else tensor.grad.clone()
    return type(tensor), tensor.requires_grad, tensor.is_leaf, gradient, tensor.detach().clone()


def calls(step, compiled):
    torch.manual_seed(0)
    world = {"model": nn.Linear(4, 2), "d": torch.zeros(4, requires_grad=True)}

    def run(x):
        return step(world, x)

    if compiled:
        run = treadle.compile(run, model=world["model"], options=treadle.Options(codegen=False))
    found = []
    for _ in range(5):
        result = run(torch.randn(3, 4))
        more = [*world.get("more", ()), *([world["old"]] if "old" in world else ())]
        found.append([seen(each) for each in (result, world["d"], *more)])
    return found, getattr(run, "recompiles", [])


@pytest.mark.parametrize(
    "step",
    [returned, kept, kept_in_place, parameter, in_a_list, switched],
    ids=lambda f: f.__name__,
)
def test_a_leaf_is_a_leaf_afterwards(step):
    (found, recompiles), (want, _) = calls(step, True), calls(step, False)
    assert recompiles == []
    for ours, theirs in zip(found, want, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one[:3] == other[:3]
            assert (one[3] is None) == (other[3] is None)
            torch.testing.assert_close(one[4], other[4])
            if one[3] is not None:
                torch.testing.assert_close(one[3], other[3])
