"""What wrappers demand of a graph is looked for in it, also where what inserts it is broken."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import treadle
from treadle.capture.distributed import gradient_sync
from treadle.capture.distributed.gradient_sync import GradientSync, RankGroup
from treadle.capture.integrations import fully_sharded
from treadle.capture.step import capture
from treadle.util.errors import CaptureError


@pytest.fixture(autouse=True)
def ranks():
    """This is the last of four ranks; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()
    gc.collect()


class Net(nn.Module):
    """Norms, a number, and a parameter that is used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layers(self.layers(x) * self.scale)


def wrapped():
    return DistributedDataParallel(Net())


def sharded(copies=False):
    shape, names = ((2, 2), ("copies", "parts")) if copies else ((4,), ("parts",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = Net()
    for module in (net.layers[0], net):
        fully_shard(module, mesh=mesh)
    return net


def replicated():
    return sharded(copies=True)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def trains(model, clips=True, regularizes=False):
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        if regularizes:
            loss = loss + sum(whole(each.square().sum()) for each in model.parameters())
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"": optimizer}


def captured(model, step, optimizers, **options):
    inputs = (torch.randn(5, 3),)
    return capture(
        step, models={"": model}, optimizers=optimizers, args=inputs, kwargs={}, **options
    )


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [wrapped, sharded, replicated])
def test_what_is_demanded_is_there(make, clips):
    model = make()
    captured(model, *trains(model, clips))


@pytest.mark.parametrize("make", [wrapped, sharded])
def test_a_penalty_is_the_same_on_all_ranks(make):
    """Its gradient is of parameters and of no batch: nothing has to reduce it."""
    model = make()
    captured(model, *trains(model, regularizes=True))


@pytest.mark.parametrize("make", [wrapped, sharded])
def test_gradients_that_are_left(make):
    model = make()
    captured(model, lambda x: model(x).sum().backward(), {})
    captured(model, *trains(model), update=False)


def test_what_a_wrapper_does_not_send_is_not_demanded():
    model = wrapped()

    def accumulates(x):
        with model.no_sync():
            model(x).sum().backward()

    captured(model, accumulates, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        accumulates(x)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured(model, step, {"": optimizer})


def refused(model, step, optimizers, code, *words):
    with pytest.raises(CaptureError, match=code) as caught:
        captured(model, step, optimizers)
    assert all(each in str(caught.value) for each in words), str(caught.value)
    assert caught.value.remedy
    assert caught.value.where


def test_a_reduction_that_is_left_out(monkeypatch):
    monkeypatch.setattr(GradientSync, "after_backward", lambda self: None)
    model = wrapped()
    words = "DistributedDataParallel requires an all-reduce over group 0 of the gradient of module."
    refused(model, *trains(model), "TR-517", words)
    refused(model, lambda x: model(x).sum().backward(), {}, "TR-517", words)


def test_one_parameter_that_is_left_out(monkeypatch):
    average = GradientSync._average

    def most(self, leaf, group):
        if leaf.shape != (1,):
            average(self, leaf, group)

    monkeypatch.setattr(GradientSync, "_average", most)
    model = wrapped()
    refused(model, *trains(model), "TR-517", "the gradient of module.scale")


def test_another_group(monkeypatch):
    other = dist.new_group([2, 3])
    mean = gradient_sync.mean_over_ranks
    group = RankGroup(other.group_name, 2)
    monkeypatch.setattr(gradient_sync, "mean_over_ranks", lambda x, _: mean(x, group))
    model = wrapped()
    refused(model, *trains(model), "TR-517", "over group 0")


def test_a_gradient_that_takes_another_way():
    model = wrapped()

    def step(x):
        for each in torch.autograd.grad(model(x).sum(), [*model.parameters()])[:1]:
            with torch.no_grad():
                next(model.parameters()).sub_(0.1 * each)

    refused(model, step, {}, "TR-517", "no_sync()")


def test_parts_that_are_not_reduced(monkeypatch):
    monkeypatch.setattr(fully_sharded, "_reduce", lambda grad, plan, group: grad[: plan.rows])
    model = sharded()
    refused(model, *trains(model), "TR-517", "fully_shard requires a reduce-scatter")


def test_copies_that_are_not_reduced(monkeypatch):
    original = fully_sharded.group_of_ranks

    def once(group):
        once.count += 1
        return None if once.count % 2 == 0 else original(group)

    once.count = 0

    def reduce(grad, plan, group):
        monkeypatch.setattr(fully_sharded, "group_of_ranks", once)
        once.count = 0
        try:
            return reduced(grad, plan, group)
        finally:
            monkeypatch.setattr(fully_sharded, "group_of_ranks", original)

    reduced = fully_sharded._reduce
    monkeypatch.setattr(fully_sharded, "_reduce", reduce)
    model = replicated()
    refused(model, *trains(model), "TR-517", "fully_shard requires an all-reduce")


def test_a_part_in_the_place_of_a_parameter(monkeypatch):
    def repeat(part, plan, group):
        ones = part.new_ones(plan.shape)
        return ones * part.sum()

    monkeypatch.setattr(fully_sharded, "_gather", repeat)
    model = sharded()
    refused(model, *trains(model), "TR-518", "fully_shard requires an all-gather", "computes with")


def test_without_wrappers_nothing_is_demanded():
    model = Net()
    captured(model, *trains(model))
    assert treadle.CaptureError is CaptureError
