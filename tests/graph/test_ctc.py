"""The CTC loss as one operation, in a whole step: PyTorch's values and gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.options import from_environment

TARGETS = torch.tensor([[1, 2, 1, 3], [4, 4, 0, 0], [2, 1, 3, 0]])
JOINED = torch.tensor([1, 2, 1, 3, 4, 4, 2, 1, 3])
LENGTHS = (6, 6, 5), (4, 2, 3)


def make_step(model, optimizer, reduction):
    def step(x, targets, times, lengths):
        settings = {"reduction": reduction, "zero_infinity": True}
        tuples = F.ctc_loss(model(x).log_softmax(-1), targets, *LENGTHS, **settings)
        tensors = F.ctc_loss(model(x).log_softmax(-1), JOINED, times, lengths, **settings)
        one = F.ctc_loss(model(x[:, 0]).log_softmax(-1), targets[0], times[:1], lengths[:1])
        loss = tuples.sum() + 2 * tensors.sum() + one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), tuples.detach()

    return step


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_steps_equal_eager(reduction):
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    options = replace(from_environment(), codegen=False)
    function = make_step(model, ours, reduction)
    step = treadle.compile(function, model=model, optimizer=ours, options=options)
    eager = make_step(twin, theirs, reduction)
    for times in ([6, 6, 5], [6, 1, 4]):  # one too short for its target: an infinite loss
        given = torch.randn(6, 3, 5), TARGETS, torch.tensor(times), torch.tensor(LENGTHS[1])
        torch.testing.assert_close(step(*given), eager(*given), rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
