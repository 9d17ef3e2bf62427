"""What a step says to other processes is a part of its graph, or is refused by name and line."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import treadle
from treadle.runtime.store.artifact import CallStep


@pytest.fixture(autouse=True)
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduces_gradients(net):
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)


def reduces_by_an_object(net):
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp(dist.ReduceOp.AVG))


def reduces_scaled(net):
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, dist._make_nccl_premul_sum(2.0))


def reduces_asynchronously(net):
    for work in [dist.all_reduce(each.grad, async_op=True) for each in net.parameters()]:
        work.wait()


def reduces_functionally(net):
    reduced = functional.all_reduce(net.weight.grad, "sum", dist.group.WORLD)
    net.weight.grad.copy_(reduced)


TENSOR = torch.ones(3)


def reduces_what_the_step_does_not_compute(net):
    dist.all_reduce(TENSOR)


def waits_for_the_others(net):
    dist.barrier()


def gathers_objects(net):
    found = [None]
    dist.all_gather_object(found, 3)


TALKS = [
    reduces_asynchronously,
    reduces_scaled,
    waits_for_the_others,
    gathers_objects,
]


def compiled(net, forward, talk=lambda net: None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = forward(x).square().mean()
        loss.backward()
        talk(net)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return treadle.compile(step, model=net, optimizer=optimizer)


@pytest.mark.parametrize("talk", TALKS)
def test_a_collective_in_the_step_is_refused(talk):
    net = nn.Linear(4, 3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(treadle.CaptureError, match="TR-130") as caught:
        compiled(net, net, talk)(torch.randn(5, 4))
    assert "test_communication.py" in caught.value.where
    assert "outside" in caught.value.remedy or "after the call" in caught.value.remedy
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(TENSOR, torch.ones(3))


@pytest.mark.parametrize(
    "talk",
    [
        reduces_gradients,
        reduces_by_an_object,
        reduces_functionally,
        reduces_what_the_step_does_not_compute,
    ],
)
def test_collectives_of_a_group_of_one_change_nothing(talk):
    net = nn.Linear(4, 3)
    twin = copy.deepcopy(net)
    x = torch.randn(5, 4)
    step = compiled(net, net, talk)
    assert torch.allclose(step(x), compiled(twin, twin)(x))
    names = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert "treadle_c10d.all_reduce.out" in names
    for ours, alone in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, alone)


class Quiet(nn.parallel.DistributedDataParallel):
    def forward(self, *args):
        return super().forward(*args) * 2


@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, Quiet])
@pytest.mark.parametrize("given", ["module", "wrapper"])
def test_a_wrapper_around_the_model_is_understood(kind, given, monkeypatch):
    monkeypatch.setenv("TREADLE_BUCKETS", "0")
    net = nn.Linear(4, 3)
    wrapper = kind(net)
    step = compiled(net if given == "module" else wrapper, wrapper)
    assert torch.isfinite(step(torch.randn(5, 4)))
    calls = [each for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert sum(each.out == "treadle_c10d.all_reduce.out" for each in calls) == 2


def test_the_forward_of_a_wrapper_that_was_kept_before_is_refused():
    """It goes past what stands in its place while a step is captured."""
    net = nn.Linear(4, 3)
    forward = nn.parallel.DistributedDataParallel(net).forward
    with pytest.raises(treadle.CaptureError, match=r"TR-130.*Reducer"):
        compiled(net, forward)(torch.randn(5, 4))


def with_a_hook(wrapper):
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)


def in_a_join(wrapper):
    wrapper._join_config = wrapper._join_config._replace(enable=True)


@pytest.mark.parametrize(
    ("change", "words"), [(with_a_hook, "a communication hook"), (in_a_join, r"join\(\)")]
)
def test_what_cannot_be_read_off_a_wrapper_is_refused_by_name(change, words):
    net = nn.Linear(4, 3)
    wrapper = nn.parallel.DistributedDataParallel(net)
    change(wrapper)
    with pytest.raises(treadle.CaptureError, match=f"TR-501.*{words}") as caught:
        compiled(net, wrapper)(torch.randn(5, 4))
    assert "test_communication.py" in caught.value.where


def test_a_collective_in_a_gradient_hook_runs_where_the_gradient_is_final():
    net = nn.Linear(4, 3)
    net.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    assert torch.isfinite(compiled(net, net)(torch.randn(5, 4)))


@pytest.mark.parametrize("before", [False, True])
def test_hooks_at_the_accumulator_are_refused(before):
    net = nn.Linear(4, 3)
    node = net.weight.expand_as(net.weight).grad_fn.next_functions[0][0]
    handle = (node.register_prehook if before else node.register_hook)(lambda *_: None)
    step = compiled(net, net)
    with pytest.raises(treadle.CaptureError, match=r"TR-131.*weight"):
        step(torch.randn(5, 4))
    handle.remove()
    step(torch.randn(5, 4))


def test_a_group_that_the_step_does_not_use_is_no_reason():
    net = nn.Linear(4, 3)
    step = compiled(net, net, lambda net: dist.get_rank())
    assert torch.isfinite(step(torch.randn(5, 4)))


RANK = """
    import copy, sys, torch, torch.distributed as dist, treadle
    from torch import nn
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    twin = copy.deepcopy(net)
    wrapped = nn.parallel.DistributedDataParallel(twin)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    def eager(x):
        loss = wrapped(x).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
    def backward(x):
        net(x).square().mean().backward()
    step = treadle.compile(backward, model=net)
    torch.manual_seed(rank)
    for _ in range(3):
        x = torch.randn(5, 4)
        eager(x)
        step(x)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    print(max((a - b).abs().max().item() for a, b in zip(net.parameters(), twin.parameters())))
"""


def test_two_ranks_that_reduce_outside_of_the_step_train_as_the_wrapper_does(tmp_path, forks):
    ranks = [forks.start(RANK, str(rank), str(tmp_path / "two")) for rank in range(2)]
    for rank in ranks:
        done = forks.finish(rank, 150)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 1e-6
