"""A step that is refused on some ranks: an error on all of them; on all: nothing is lost."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import treadle
from distributed.ranks import told
from treadle.util.errors import TreadleError


def trained(odd, wraps):
    """A step that is refused for batches of three rows, on the ranks ``odd``."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    model = DistributedDataParallel(net) if wraps else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    refused = dist.get_rank() in odd

    def step(x):
        if refused and x.shape[0] == 3:
            torch.manual_seed(1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    parallel = None if wraps else treadle.DataParallel()
    return net, treadle.compile(step, model=model, optimizer=optimizer, parallel=parallel)


def calls(odd, rows, wraps):
    """What each of several calls gives: the code and the text of its error, or nothing; and all
    seconds."""
    net, step = trained(odd, wraps)
    began = time.monotonic()
    found = []
    for count in rows[dist.get_rank()]:
        try:
            step(torch.randn(count, 6))
            found.append(("", ""))
        except TreadleError as error:
            found.append((error.code, str(error)))
    return found, time.monotonic() - began, net.state_dict()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("before", [0, 2])
def test_a_refusal_on_one_rank_is_an_error_on_all(launch, before, wraps):
    """At the first call, or where the other waits in a collective of a variant that it knows; the
    rank that goes on is paired with nothing."""
    rows = {0: [4] * before + [3, 4], 1: [4] * (before + 2)}
    ranks = launch(2, calls, [0], rows, wraps)
    refused, other = (each.value[0] for each in ranks)
    assert [code for code, _ in refused[:before] + other[:before]] == [""] * 2 * before
    assert refused[before][0] == "TR-120", told(ranks)
    code, text = other[before]
    assert code == "TR-502", told(ranks)
    assert "no step: TR-120" in text
    assert {refused[-1][0], other[-1][0]} <= {"TR-502", "TR-506"}, told(ranks)
    assert max(each.value[1] for each in ranks) < 20


@pytest.mark.parametrize("wraps", [False, True])
def test_ranks_that_are_refused_alike_lose_nothing(launch, wraps):
    rows = {rank: [3, 4, 3, 4] for rank in range(2)}
    ranks = launch(2, calls, [0, 1], rows, wraps)
    for each in ranks:
        assert [code for code, _ in each.value[0]] == ["TR-120", "", "TR-120", ""], told(ranks)
    one, other = (each.value[2] for each in ranks)
    for name, value in one.items():
        assert torch.equal(value, other[name])
