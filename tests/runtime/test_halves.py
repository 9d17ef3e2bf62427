"""Batch norms of halves on CPUs, of PyTorch's kernels and of ours, beside eager and float64."""

import copy

import pytest
import torch
from torch import nn

import treadle


def made(dtype, parameters):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5)
    ).to(dtype)
    model[1].to(parameters)
    return model


def trained(model, steps, compiled=None, dtype=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = step
    if compiled is not None:
        call = treadle.compile(step, model=model, optimizer=optimizer, options=compiled)
    torch.manual_seed(1)
    losses = [call(torch.randn(6, 3, 5, 5).to(dtype)) for _ in range(steps)]
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("codegen", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("parameters", ["alike", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_as_near_to_float64_as_eager(dtype, parameters, training, codegen):
    start = made(dtype, dtype if parameters == "alike" else torch.float32).train(training)
    models = [copy.deepcopy(start) for _ in range(3)]
    models[2].double()
    options = treadle.Options(codegen=codegen)
    ours = trained(models[0], 3, options, dtype)
    eager = trained(models[1], 3, None, dtype)
    exact = trained(models[2], 3, None, torch.float64)
    for mine, theirs, right in zip(ours, eager, exact, strict=True):
        assert mine.dtype is theirs.dtype
        scale = right.abs().max().double() + 1e-3
        error = [((each.double() - right.double()).abs().max() / scale) for each in (mine, theirs)]
        assert error[0] <= 2 * error[1] + 4 * torch.finfo(dtype).eps, (mine, theirs, right)
