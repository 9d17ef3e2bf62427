"""Every module of torch.nn in a whole step, beside eager: values, gradients, buffers, draws.

All of them, or a part: ``MODULES=0/8 python -m pytest tests/models/test_modules.py`` runs the first
of eight; ``MODULES=all`` every one. Without it a slice runs.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from module_samples import Sample, samples
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import treadle
from treadle.options import from_environment
from treadle.util.errors import TreadleError

PLAIN = replace(from_environment(), codegen=False)
EVERY = 199  # of the samples, in the slice that always runs


def chosen() -> list[Sample]:
    found = samples()
    part = os.environ.get("MODULES", "")
    if part == "all":
        return found
    at, count = map(int, part.split("/")) if part else (0, EVERY)
    return found[at::count]


def make_step(module: nn.Module, optimizer: Any) -> Callable[..., Any]:
    """Forward, the gradient of every float input, backward, an update."""

    def step(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [
            each.detach().clone().requires_grad_()
            if isinstance(each, Tensor) and each.is_floating_point()
            else each
            for each in leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = module(*args, **kwargs)
        outputs = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        loss = sum(
            (each * torch.linspace(0.5, 1.5, each.numel()).view(each.shape)).sum()
            for each in outputs
            if each.is_floating_point()
        )
        inputs = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        if loss.requires_grad:
            loss.backward(inputs=[*inputs, *(p for p in module.parameters() if p.requires_grad)])
            grads = [None if each.grad is None else each.grad.detach() for each in inputs]
        else:
            grads = []
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach() for each in outputs], grads

    return step


def optimizer_of(module: nn.Module) -> Any:
    parameters = [each for each in module.parameters() if each.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05) if parameters else None


def both(sample: Sample) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = sample.make()
    args, kwargs = sample.inputs()
    if any(
        isinstance(each, nn.parameter.UninitializedParameter) for each in module.parameters()
    ) or any(isinstance(each, nn.parameter.UninitializedBuffer) for each in module.buffers()):
        module(*args, **kwargs)
    return module, copy.deepcopy(module)


@pytest.mark.parametrize("sample", chosen(), ids=lambda sample: sample.name)
@pytest.mark.filterwarnings("ignore")
def test_a_module_trains_as_in_eager(sample: Sample) -> None:
    module, twin = both(sample)
    args, kwargs = sample.inputs()
    ours, theirs = optimizer_of(module), optimizer_of(twin)
    eager = make_step(twin, theirs)
    given = () if ours is None else ours
    step = treadle.compile(make_step(module, ours), model=module, optimizer=given, options=PLAIN)
    torch.manual_seed(1)
    try:
        expected = eager(*args, **kwargs)
    except Exception as error:  # what eager refuses, compiled refuses
        with pytest.raises((type(error), TreadleError)):
            step(*args, **kwargs)
        return
    after = torch.get_rng_state()
    torch.manual_seed(1)
    try:
        found = step(*args, **kwargs)
    except TreadleError as refusal:
        pytest.skip(f"refused: {refusal.code}")
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    for (name, mine), other in zip(
        module.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
