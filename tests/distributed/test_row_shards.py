"""``DataParallel(shard="optimizer")``: each rank has state for some rows, and all are as one."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import treadle
from treadle.runtime.store.artifact import CallStep

CLOSE = 1e-6
EACH = {"TREADLE_BUCKETS": "0"}
"""Every collective by itself, to count them."""
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, centered=True),
    "plain": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


class Scaled(nn.Module):
    """A parameter without dims, one of one row, and rows that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 17), nn.LayerNorm(17), nn.Linear(17, 3))
        self.row = nn.Parameter(torch.randn(1, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layers(x + self.row) * self.scale


def training(net, optimizer, clip):
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled(net, optimizer, clip=False):
    return treadle.compile(
        training(net, optimizer, clip),
        model=net,
        optimizer=optimizer,
        parallel=treadle.DataParallel(shard="optimizer"),
    )


def batches(count):
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(6, 8), torch.randint(0, 3, (6,))


def gap(ours, theirs):
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_gap(ours, theirs):
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    found = [0.0]
    for a, b in pairs:
        for key, value in theirs.state[b].items():
            mine = whole(ours.state[a][key]) if value is not None else torch.zeros(())
            expected = torch.zeros(()) if value is None else value
            found.append((mine - expected).abs().max().item())
    return max(found)


def local_bytes(optimizer):
    states = (each for state in optimizer.state.values() for each in state.values())
    locals_ = [v.to_local() if hasattr(v, "to_local") else v for v in states if v is not None]
    return sum(each.nbytes for each in locals_ if each.dim())


def trains(name, clip):
    torch.manual_seed(dist.get_rank())
    net = Scaled()
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    own, other = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](twin.parameters())
    step, eager = compiled(net, own, clip), training(wrapped, other, clip)
    losses = [abs((step(x, y) - eager(x, y)).item()) for x, y in batches(4)]
    calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    kinds = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
    sent = [calls.count(f"treadle_c10d.{each}.out") for each in kinds]
    share = local_bytes(own) / max(local_bytes(other), 1)
    difference = step.verify(list(batches(1)))
    return max(losses), gap(net, twin), state_gap(own, other), sent, share, difference


@pytest.mark.parametrize(("world", "name"), [(2, "adamw"), (2, "rmsprop"), (3, "rmsprop")])
def test_updates_of_rows_are_those_of_whole_parameters(launch, world, name):
    for rank in launch(world, trains, name, False, environment=EACH):
        loss, apart, state, sent, share, difference = rank.value
        assert max(loss, apart, state) < CLOSE
        assert sent == [1, 7, 7], "the number without dims is averaged as a whole"
        assert share < 1.3 / world + 0.2
        assert difference is None


def test_what_is_sent_of_rows_is_joined(launch):
    for rank in launch(3, trains, "adamw", False):
        loss, apart, state, sent, _, difference = rank.value
        assert max(loss, apart, state) < CLOSE
        assert sent == [1, 1, 1]
        assert difference is None


@pytest.mark.parametrize(("world", "name"), [(2, "momentum"), (3, "adamw")])
def test_clipping_needs_no_whole_gradients(launch, world, name):
    for rank in launch(world, trains, name, True, environment=EACH):
        loss, apart, state, sent, _, difference = rank.value
        assert max(loss, apart, state) < CLOSE
        assert sent == [1, 7, 8], "the number without dims as a whole; parts of the norm at once"
        assert difference is None


def clipped(model, optimizer, order, foreach):
    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), 0.1, order, error_if_nonfinite=True, foreach=foreach
        )
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def norms():
    """Of several kinds: ours, eager's, and how far the parameters are apart."""
    found = []
    for order, foreach in ((1.0, True), (3.0, False), (math.inf, True)):
        torch.manual_seed(0)
        net = Scaled()
        twin = copy.deepcopy(net)
        own, other = (OPTIMIZERS["momentum"](each.parameters()) for each in (net, twin))
        step = treadle.compile(
            clipped(net, own, order, foreach),
            model=net,
            optimizer=own,
            parallel=treadle.DataParallel(shard="optimizer"),
        )
        eager = clipped(DistributedDataParallel(twin), other, order, foreach)
        pairs = [(step(x, y).item(), eager(x, y).item()) for x, y in batches(2)]
        found.append((pairs, gap(net, twin)))
    return found


def test_norms_are_the_same_on_all_ranks(launch):
    ranks = [rank.value for rank in launch(3, norms)]
    for per_rank in zip(*ranks, strict=True):
        assert all(pairs == per_rank[0][0] for pairs, _ in per_rank), "the same bits"
        for pairs, apart in per_rank:
            assert apart < CLOSE
            assert all(ours == pytest.approx(theirs, rel=1e-5) for ours, theirs in pairs)


@pytest.mark.parametrize("name", ["plain", "adafactor"])
def test_what_has_no_state_or_looks_at_whole_parameters_is_not_divided(launch, name):
    for rank in launch(2, trains, name, False, environment=EACH):
        loss, apart, state, sent, _, difference = rank.value
        assert max(loss, apart, state) < CLOSE
        assert sent == [8, 0, 0]
        assert difference is None


def goes_on(divided_first):
    """Whole state from a checkpoint, and rows given back as whole state."""
    torch.manual_seed(0)
    net = Scaled()
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    own, other = OPTIMIZERS["adamw"](net.parameters()), OPTIMIZERS["adamw"](twin.parameters())
    step, eager = compiled(net, own), training(wrapped, other, False)
    given = list(batches(4))
    for x, y in given[:2]:
        eager(x, y)
        if divided_first:
            step(x, y)
    net.load_state_dict(twin.state_dict())
    own.load_state_dict(copy.deepcopy(other.state_dict()))
    for x, y in given[2:]:
        eager(x, y)
        step(x, y)
    return gap(net, twin), state_gap(own, other)


@pytest.mark.parametrize("divided_first", [False, True])
def test_a_checkpoint_of_whole_state_is_divided(launch, divided_first):
    for rank in launch(2, goes_on, divided_first):
        assert max(rank.value) < CLOSE


def keeps_accumulating():
    torch.manual_seed(0)
    net = Scaled()
    twin = copy.deepcopy(net)
    wrapped = DistributedDataParallel(twin)
    own, other = OPTIMIZERS["adamw"](net.parameters()), OPTIMIZERS["adamw"](twin.parameters())
    step = compiled(net, own)
    for at, (x, y) in enumerate(batches(4)):
        update = at % 2 == 1
        step(x, y, update=update)
        if update:
            F.cross_entropy(wrapped(x), y).backward()
            other.step()
            other.zero_grad()
        else:
            with wrapped.no_sync():
                F.cross_entropy(wrapped(x), y).backward()
    return gap(net, twin), state_gap(own, other)


def test_accumulation_over_calls(launch):
    for rank in launch(2, keeps_accumulating):
        assert max(rank.value) < CLOSE


def test_another_way_to_divide_is_refused():
    with pytest.raises(treadle.TreadleError, match="TR-500") as caught:
        treadle.DataParallel(shard="parameters")
    assert "fully_shard" in caught.value.remedy
