"""The variants of a step, of other shapes and on other paths, take turns in one arena: what stays
between calls is the largest one, and no call holds more than the largest promised peak."""

import copy
import gc
import itertools
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.runtime.execute.arena import Arena

SHAPES = (2, 3, 5, 7, 16, 33, 64, 100)
SCALES = (0.01, 1.0, 30.0)


def trained(**options):
    """A step of three paths, and the eager one beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 4))
    twin = copy.deepcopy(model)

    def stepping(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if loss > 100:
                loss = (model(x).tanh() - y).square().mean()
            elif loss < 0.1:
                loss = loss + sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, optimizer

    step, optimizer = stepping(model)
    chosen = treadle.Options(max_cached=64, **options)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=chosen)
    return compiled, model, stepping(twin)[0], twin


def batches():
    """Eight shapes and three paths, mixed."""
    every = list(itertools.product(SHAPES, SCALES))
    random.shuffle(every)
    for rows, scale in (*every, *random.sample(every, len(every))):
        yield torch.randn(rows, 24), scale * torch.randn(rows, 4)


@pytest.mark.parametrize("codegen", [False, True])
def test_shapes_and_paths_share_one_arena(codegen):
    step, model, eager, twin = trained(codegen=codegen)
    given = batches() if not codegen else itertools.islice(batches(), 8)
    for x, y in given:
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-4, atol=1e-5)
        report = step.measure(x, y)
        eager(x, y)
        summary = step.summary()
        assert report.peak_bytes <= summary.peak_of_any_call_bytes
    blocks = {id(each.executable.held()[0]) for each in step._dispatcher.variants}
    assert len(blocks) == 1
    arenas = [each.arena_bytes for each in summary.variants]
    assert len(arenas) == len({id(each.executable) for each in step._dispatcher.variants})
    assert step.compiled.executable.held()[0].numel() <= max(arenas)
    assert f"{len(arenas)} variants share one arena" in step.explain()


def test_no_variant_keeps_the_block_that_another_one_outgrew():
    step, _, _, _ = trained(codegen=False)
    step(torch.randn(4, 24), torch.randn(4, 4))
    small = weakref.ref(step.compiled.executable.held()[0].untyped_storage())
    step(torch.randn(400, 24), torch.randn(400, 4))
    assert small() is None
    large = step.compiled.executable.held()[0].numel()
    step(torch.randn(4, 24), torch.randn(4, 4))
    assert step.compiled.executable.held()[0].numel() == large


def storages():
    """Bytes of all tensors of this process by their address, but for the states of generators."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    memories = (tensor.untyped_storage() for tensor in tensors)
    found = {memory.data_ptr(): memory.nbytes() for memory in memories}
    state = torch.get_rng_state().numel()
    return {address: nbytes for address, nbytes in found.items() if nbytes != state}


SCALARS = 1024
"""Bytes of a variant's numbers, and of what an allocator adds to a block."""


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(1, 3)), min_size=8, max_size=16))
@settings(max_examples=6, deadline=None)
def test_eight_shapes_in_any_order_hold_one_arena(order):
    """Also where a batch comes several times: nothing keeps it."""
    step, model, eager, twin = trained(codegen=False)
    step(torch.randn(1, 24), torch.randn(1, 4))
    eager(torch.randn(1, 24), torch.randn(1, 4))
    twin.load_state_dict(model.state_dict())
    step.compiled.release()
    before = storages()
    for rows, times in order:
        x, y = torch.randn(rows, 24), torch.randn(rows, 4)
        for _ in range(times):
            torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    del x, y
    model.zero_grad()
    twin.zero_grad()
    held = sum(nbytes for at, nbytes in storages().items() if at not in before)
    summary = step.summary()
    largest = max(each.arena_bytes for each in summary.variants)
    own = sum(each.own_bytes for each in summary.variants)
    assert held <= largest + own + SCALARS * len(summary.variants)
    assert summary.peak_of_any_call_bytes >= max(each.peak_bytes for each in summary.variants)


class Lodger:
    """With an arena of ``arena`` bytes and ``beside`` of them elsewhere."""

    def __init__(self, arena, beside):
        sizes = {"arena_bytes": arena, "peak_bytes": arena + beside, "constants": {}}
        self.artifact = type("Sizes", (), {"host_bytes": 0, **sizes})
        self.left = 0

    def leave_arena(self):
        self.left += 1


def test_a_block_gives_way_where_it_would_break_the_promise():
    cpu = torch.device("cpu")
    arena, large, other = Arena(), Lodger(900, 100), Lodger(100, 850)
    arena.join(large)
    arena.join(other)
    assert arena.promised_bytes == 1000
    assert arena.get(large, cpu).numel() == 900
    assert arena.get(other, cpu).numel() == 100  # 900 beside 850 would be too much
    assert large.left == 2
    del large
    assert arena.promised_bytes == 950


def test_a_call_that_exchanges_the_block_is_measured_within_the_promise():
    """What measures it holds no other block meanwhile."""
    model = nn.Linear(64, 64)

    def step(x):
        y = model(x)
        if x.sum() > 0:  # much of a library's, beside a small arena
            order = torch.sort(y, 0).values
            return (order @ order.T).square().mean().detach()
        z = torch.tanh(y) @ model.weight
        return ((z.exp() @ z.T).square().mean() + z.sin().sum()).detach()

    compiled = treadle.compile(step, model=model)
    x = torch.rand(64, 64)
    for sign in (1, -1, 1):
        torch.testing.assert_close(compiled(sign * x), step(sign * x))
    arenas = [each.executable.artifact.arena_bytes for each in compiled._dispatcher.variants]
    assert len(set(arenas)) == 2
    for sign in (1, -1, 1, -1, -1):
        report = compiled.measure(sign * x)
        assert report.peak_bytes <= compiled.summary().peak_of_any_call_bytes


def test_tenants_that_are_running_keep_the_block():
    arena, first, second = Arena(grows_only=True), Lodger(50, 0), Lodger(10, 500)
    arena.join(first)
    arena.join(second)
    block = arena.get(second, torch.device("cpu"))
    assert block.numel() == 50
    assert arena.get(first, torch.device("cpu")) is block
