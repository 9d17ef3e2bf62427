"""Every scheduler of ``torch.optim.lr_scheduler`` drives a compiled step without a recompile."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedule
from torch.optim.swa_utils import SWALR

import treadle

SCHEDULERS = {
    "LambdaLR": lambda o: schedule.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: schedule.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: schedule.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedule.MultiStepLR(o, [3, 7], 0.5),
    "ConstantLR": lambda o: schedule.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedule.LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: schedule.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedule.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: schedule.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedule.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: schedule.CyclicLR(o, 1e-4, 1e-2, 5, cycle_momentum=True),
    "OneCycleLR": lambda o: schedule.OneCycleLR(o, 1e-2, total_steps=40),
    "ReduceLROnPlateau": lambda o: schedule.ReduceLROnPlateau(o, patience=1, threshold=0.5),
    "ChainedScheduler": lambda o: schedule.ChainedScheduler(
        [schedule.ConstantLR(o, 0.1, 3), schedule.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: schedule.SequentialLR(
        o, [schedule.LinearLR(o, 0.1, total_iters=5), schedule.ExponentialLR(o, 0.9)], [5]
    ),
    "SWALR": lambda o: SWALR(o, 1e-3, anneal_epochs=5),
}


def training(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_thirty_steps_equal_eager(name):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    step = treadle.compile(training(model, optimizer), model=model, optimizer=optimizer)
    eager = training(twin, reference)
    metric = name == "ReduceLROnPlateau"
    rates = set()
    for number in range(30):
        x = torch.randn(4, 5)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-6)
        ours.step(*[1.0] * metric)
        theirs.step(*[1.0] * metric)
        rates.add(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"], number
    assert step.recompiles == []
    assert len(rates) > 1
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)
