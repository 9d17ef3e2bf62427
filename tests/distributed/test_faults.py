"""Ranks that fail in real processes: the others end soon, say which rank and why, and leave
parameters and optimizer state as they were before the call."""

import copy
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import told
from torch import nn

import treadle
from treadle.util.errors import GroupFailure


def trained(bad=None):
    """A model, its optimizer and a compiled step; ``bad``: what the batch is given to first."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x):
        loss = net(x if bad is None else bad(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=net, optimizer=optimizer, parallel=treadle.DataParallel()
    )
    return net, optimizer, compiled


def batches(count, size=4):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(size, 6, generator=generator) for _ in range(count)]


def state(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def is_same(one, other):
    leaves = [torch.utils._pytree.tree_leaves(each) for each in (one, other)]
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*leaves, strict=True)
    )


def failing(step, net, optimizer, *batch):
    """Code, text and seconds of the error of a call, and whether it left everything alone."""
    before = state(net, optimizer)
    began = time.monotonic()
    try:
        step(*batch)
    except GroupFailure as error:
        seconds = time.monotonic() - began
        return error.code, str(error), seconds, is_same(before, state(net, optimizer))
    return None


def agrees(count):
    net, optimizer, step = trained()
    for x in batches(count):
        step(x)
    return state(net, optimizer)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_do_not_fail_have_the_same(launch, world):
    values = [each.value for each in launch(world, agrees, 3)]
    assert all(is_same(values[0], each) for each in values[1:])
