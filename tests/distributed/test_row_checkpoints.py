"""State that ranks divide, through ``torch.distributed.checkpoint``."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import treadle


def trained(batches):
    """A model, its optimizer and a step, after these batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    parallel = treadle.DataParallel(shard="optimizer")
    step = treadle.compile(step, model=net, optimizer=optimizer, parallel=parallel)
    for x in batches:
        step(x)
    return net, optimizer, step


def goes_on_from_a_checkpoint(folder, calls):
    """Whether parameters are bit for bit those of a run that was not interrupted. ``calls``: how
    many the loading run has made before."""
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(4, 5) for _ in range(4)]
    net, optimizer, step = trained(batches[:2])
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "state": state}, checkpoint_id=folder)
    for x in batches[2:]:
        step(x)
    other, second, again = trained(batches[:calls])
    model, state = get_state_dict(other, second)
    dcp.load({"model": model, "state": state}, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=model, optim_state_dict=state)
    for x in batches[2:]:
        again(x)
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), again.recompiles


@pytest.mark.parametrize("calls", [0, 1])
def test_a_checkpoint_of_divided_state_goes_on_bit_for_bit(launch, tmp_path, calls):
    for rank in launch(2, goes_on_from_a_checkpoint, str(tmp_path / "checkpoint"), calls):
        assert rank.value == (True, [])
