"""The step of an ``Accelerator`` on two ranks: what each sends is part of it."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn


def train(kind):
    """Losses and parameters of six batches on each rank."""
    import accelerate

    from treadle.integrations.accelerate import Accelerator

    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    accelerator = (Accelerator if kind == "compiled" else accelerate.Accelerator)(cpu=True)
    assert accelerator.num_processes == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1 + accelerator.process_index)

    def train_step(x):
        loss = (model(x) - x[:, :4]).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = accelerator.compile_step(train_step) if kind == "compiled" else train_step
    losses = [step(torch.randn(4, 8)).item() for _ in range(6)]
    return losses, [each.detach().tolist() for each in model.parameters()]


def test_two_ranks_train_as_in_eager(launch):
    pytest.importorskip("accelerate")
    eager = launch(2, train, "eager", imports=("accelerate",))
    compiled = launch(2, train, "compiled", imports=("accelerate",))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours.value[0] == pytest.approx(theirs.value[0], rel=1e-4)
        for a, b in zip(ours.value[1], theirs.value[1], strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)
    assert compiled[0].value[1] == compiled[1].value[1]
