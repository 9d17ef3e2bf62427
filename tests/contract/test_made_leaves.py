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


def squares(world, of):
    return (of @ world["model"].weight.T).square().sum()


def with_gradient(world, x):
    d = torch.zeros_like(x, requires_grad=True)
    squares(world, x + d).backward()
    return d


def with_its_gradient(world, x):
    d = with_gradient(world, x)
    return d, d.grad


def copied_input(world, x):
    x = x.clone().detach().requires_grad_(True)
    squares(world, x).backward()
    world["x"] = x
    return x.grad * 2


def view_of_the_input(world, x):
    view = x.detach().requires_grad_()
    squares(world, view).backward()
    return view


def parameter_with_gradient(world, x):
    world["p"] = nn.Parameter(torch.ones(2))
    ((x @ world["model"].weight.T) * world["p"]).sum().backward()
    return x.sum()


def gradient_cleared(world, x):
    d = with_gradient(world, x)
    gradient, d.grad = d.grad, None
    return d, gradient


def gradient_set(world, x):
    d = with_gradient(world, x)
    d.grad = d.grad * 2
    return d


def gradient_added(world, x):
    d = with_gradient(world, x)
    squares(world, x * d).backward()
    world["d"] = d
    return x.sum()


def gradient_kept_inside(world, x):
    """What a hook of a feature map leaves for Grad-CAM."""
    y = x @ world["model"].weight.T
    y.retain_grad()
    world["features"] = y
    y.square().sum().backward()
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
        results = run(torch.randn(3, 4))
        results = results if isinstance(results, tuple) else (results,)
        left = [world[name] for name in ("d", "old", "x", "p", "features") if name in world]
        tensors = (*results, *left, *world.get("more", ()))
        found.append([*map(seen, tensors), results[0].grad is results[-1]])
        world["model"].zero_grad()
    return found, getattr(run, "recompiles", [])


@pytest.mark.parametrize(
    "step",
    [
        returned, kept, kept_in_place, parameter, in_a_list, switched, with_gradient,
        with_its_gradient, copied_input, view_of_the_input, parameter_with_gradient,
        gradient_cleared, gradient_set, gradient_added, gradient_kept_inside,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_leaf_is_a_leaf_afterwards(step):
    (found, recompiles), (want, _) = calls(step, True), calls(step, False)
    assert recompiles == []
    for ours, theirs in zip(found, want, strict=True):
        assert len(ours) == len(theirs)
        assert ours.pop() == theirs.pop()
        for one, other in zip(ours, theirs, strict=True):
            is_inside = step is gradient_kept_inside and not other[2]
            assert one[:3] == other[:3] or is_inside  # what is inside is detached
            assert (one[3] is None) == (other[3] is None)
            torch.testing.assert_close(one[4], other[4])
            if one[3] is not None:
                torch.testing.assert_close(one[3], other[3])
