"""``shard="optimizer"``: which means of gradients are whole, and which are in rows, as captured."""

import gc
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import treadle
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.compiler.pipeline import compile_graph
from treadle.graph.core.collectives import CollectiveKind, collectives_in
from treadle.graph.core.node_info import value_of
from treadle.options import Options
from treadle.runtime.store.cache import Cache
from treadle.session.data_parallel import rank_group

AR, RS, AG = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
)


@pytest.fixture(autouse=True)
def ranks():
    """This is the last of three ranks; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    yield
    dist.destroy_process_group()
    gc.collect()


class Net(nn.Module):
    """Rows that three ranks do not divide, and a parameter without dims."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


def captured(net, step, optimizers, update=True):
    group = rank_group(treadle.DataParallel(shard="optimizer"))
    return capture(
        step,
        models={"": net},
        optimizers=optimizers,
        args=(torch.randn(6, 3),),
        kwargs={},
        group=group,
        update=update,
    )


def sent_by(net, between, optimizers=None, **options):
    """What a step sends that does ``between(net)`` between backward and update: each kind."""
    made = optimizers or {"": torch.optim.AdamW(net.parameters())}

    def step(x):
        net(x).square().mean().backward()
        found = between(net)
        for each in made.values():
            each.step()
            each.zero_grad()
        return found

    cleaned = clean(captured(net, step, made, **options).step)
    whole = [each for each in collectives_in(cleaned.graph) if each.kind is AR]
    assert all(value_of(each.node).dim() == 0 for each in whole) or options.get("update") is False
    return Counter(each.kind for each in collectives_in(cleaned.graph))


def clip(*args, **kwargs):
    return lambda net: nn.utils.clip_grad_norm_(net.parameters(), *args, **kwargs)


ONCE = {AR: 1, RS: 4, AG: 4 + 1}
"""The number as a whole; four gradients, four parameters, and the parts of norms."""


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_of_any_kind(order, foreach):
    assert sent_by(Net(), clip(1.0, norm_type=order, foreach=foreach)) == ONCE


def test_a_norm_that_has_to_be_finite():
    assert sent_by(Net(), clip(1.0, error_if_nonfinite=True)) == ONCE


@pytest.mark.parametrize("foreach", [False, True])
def test_values_are_clipped_without_a_word(foreach):
    def between(net):
        nn.utils.clip_grad_value_(net.parameters(), 0.1, foreach=foreach)

    assert sent_by(Net(), between) == {AR: 1, RS: 4, AG: 4}


def test_a_norm_that_is_only_looked_at():
    def between(net):
        return [each.grad.norm() for each in net.parameters()]

    assert sent_by(Net(), between) == ONCE


def test_norms_after_clipping_are_gathered_after_it():
    def between(net):
        before = clip(1.0)(net)
        return before, nn.utils.get_total_norm([each.grad for each in net.parameters()])

    assert sent_by(Net(), between) == ONCE | {AG: 4 + 2}


def test_groups_that_are_clipped_apart():
    net = Net()
    groups = [
        {"params": [*net.up.parameters()], "lr": 0.1},
        {"params": [*net.down.parameters(), net.scale]},
    ]

    def between(net):
        for each in groups:
            nn.utils.clip_grad_norm_(each["params"], 0.5)

    assert sent_by(net, between, {"": torch.optim.AdamW(groups)}) == ONCE | {AG: 4 + 2}


def test_what_looks_at_whole_parameters_gets_whole_gradients():
    net = Net()
    others = [net.up.bias, net.down.bias, net.scale]
    optimizers = {
        "muon": torch.optim.Muon([net.up.weight, net.down.weight]),
        "adam": torch.optim.Adam(others),
    }

    def step(x):
        net(x).square().mean().backward()
        norm = clip(1.0)(net)
        for each in optimizers.values():
            each.step()
            each.zero_grad()
        return norm

    cleaned = clean(captured(net, step, optimizers).step)
    kinds = Counter(each.kind for each in collectives_in(cleaned.graph))
    assert kinds == {AR: 3, RS: 2, AG: 2 + 1}


def test_a_tied_parameter_is_sent_once():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert sent_by(net, clip(1.0)) == {RS: 3, AG: 3 + 1}


def test_gradients_of_several_backwards():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        for each in x.chunk(2):
            net(each).square().mean().backward()
        clip(1.0)(net)
        optimizer.step()
        optimizer.zero_grad()

    cleaned = clean(captured(net, step, {"": optimizer}).step)
    assert Counter(each.kind for each in collectives_in(cleaned.graph)) == ONCE


def test_a_call_that_accumulates_sends_nothing():
    assert sent_by(Net(), clip(1.0), update=False) == {}


def leaves_gradients(net, optimizer):
    def step(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        clip(1.0)(net)
        optimizer.step()

    return step


def test_gradients_that_stay_in_grad_are_whole():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    cleaned = clean(captured(net, leaves_gradients(net, optimizer), {"": optimizer}).step)
    assert Counter(each.kind for each in collectives_in(cleaned.graph)) == {AR: 5, AG: 4}


def test_a_gradient_that_is_looked_at_otherwise_is_whole():
    def between(net):
        clip(1.0)(net)
        return net.up.weight.grad @ net.up.weight.grad.t()

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        net(x).square().mean().backward()
        found = between(net)
        optimizer.step()
        optimizer.zero_grad()
        return found

    cleaned = clean(captured(net, step, {"": optimizer}).step)
    assert Counter(each.kind for each in collectives_in(cleaned.graph)) == ONCE | {AR: 2, RS: 3}


class Pooled(nn.Module):
    """What the first layer leaves to its backward is there as long as the gradients of all others,
    which are many."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 48)
        self.rest = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(12)])

    def forward(self, x):
        return self.rest(self.first(x).sin().view(16, 128, 48).mean(0))


ROWS = "optimizer"


def peak_of(clips, shard):
    net = Pooled()
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, lr=0.1)

    def step(x):
        net(x).square().mean().backward()
        if clips:
            clip(1.0)(net)
        optimizer.step()
        optimizer.zero_grad()

    found = capture(
        step,
        models={"": net},
        optimizers={"": optimizer},
        args=(torch.randn(16 * 128, 3),),
        kwargs={},
        group=rank_group(treadle.DataParallel(shard=shard)),
    )
    options = Options(buckets=0)
    return compile_graph(found, options, cache=Cache(options.cache_dir)).artifact.peak_bytes


def test_clipping_costs_no_memory():
    """Less than the state of two thirds, and half of all gradients."""
    gradients = 12 * 48 * 48 * 4
    whole, rows, clipped = (peak_of(*each) for each in ((True, None), (False, ROWS), (True, ROWS)))
    assert clipped <= rows + 4096
    assert clipped < whole - 2 / 3 * gradients - gradients / 2
