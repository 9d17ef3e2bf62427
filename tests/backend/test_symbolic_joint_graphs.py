"""Sizes that change: one graph of a forward and a backward for each set of them, each within the
budget, and none that keeps memory while another one runs."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from treadle import backend
from treadle.backend import treadle
from treadle.session.joint.joint_graph import JointGraph


class Net(nn.Module):
    """Results in the sizes of the batch, a size itself, and a buffer that changes."""

    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        h = self.norm(x)
        for layer in self.layers:
            h = torch.tanh(layer(h)) * F.gelu(h)
        return h, h.mean(1), x.shape[0]


def dynamic(model, **options):
    compiled = torch.compile(model, backend=treadle, dynamic=True, options=options)
    return compiled, copy.deepcopy(model)


def same_gradients(ours, theirs):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def loss_of(model, batch):
    wide, narrow, count = model(batch)
    assert count == len(batch)
    return wide.square().sum() + narrow.sin().sum()


def test_each_size_is_one_graph():
    others = backend.compiled()
    ours, theirs = dynamic(Net())
    for rows in (5, 9, 5, 13):
        batch = torch.randn(rows, 8)
        for model in (ours, theirs):
            loss_of(model, batch).backward()
        same_gradients(ours, theirs)
    names = [graph.name for graph in backend.compiled() if graph not in others]
    assert len(names) == 3
    assert all(name.endswith("forward and backward") for name in names)


@pytest.mark.parametrize("compiles_in", [(0, 1, 2), (2, 1, 0)])
def test_calls_of_several_sizes_are_open_at_once(compiles_in):
    """Backward passes in every order, the first of them those that compile."""
    ours, theirs = dynamic(Net())
    for order in (compiles_in, *itertools.permutations(range(3))):
        batches = [torch.randn(rows, 8) for rows in (5, 9, 5)]
        for model in (ours, theirs):
            model.zero_grad()
            losses = [loss_of(model, batch) for batch in batches]
            for at in order:
                losses[at].backward()
        same_gradients(ours, theirs)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 40), st.booleans()), min_size=1, max_size=6))
def test_any_sizes_and_calls_without_a_backward(calls):
    torch._dynamo.reset()
    ours, theirs = dynamic(Net(depth=1))
    for rows, goes_back in calls:
        batch = torch.randn(rows, 8)
        for model in (ours, theirs):
            loss = loss_of(model, batch)
            if goes_back:
                loss.backward()
    if any(goes_back for _, goes_back in calls):
        same_gradients(ours, theirs)


def test_gradients_are_asked_for_again():
    ours, theirs = dynamic(Net())
    batch, other = torch.randn(6, 8), torch.randn(11, 8)
    for model in (ours, theirs):
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss_of(model, other).backward()
        loss.backward()
    same_gradients(ours, theirs)


def test_a_budget_holds_for_every_size():
    peaks = {}
    for memory in (1.0, 0.0):
        torch._dynamo.reset()
        ours, theirs = dynamic(Net(depth=8), memory=memory)
        for rows in (256, 512):
            batch = torch.randn(rows, 8)
            for model in (ours, theirs):
                loss_of(model, batch).backward()
            same_gradients(ours, theirs)
            graph = max(backend.compiled(), key=lambda graph: graph.number)
            peaks[memory, rows] = graph.summary().arena_bytes
    for rows in (256, 512):
        assert peaks[0.0, rows] < 0.8 * peaks[1.0, rows]


def test_a_size_that_does_not_run_keeps_no_arena():
    others = backend.compiled()
    ours, _ = dynamic(Net())
    for rows in (256, 512, 256, 1024):
        loss_of(ours, torch.randn(rows, 8)).backward()
    graphs = [graph for graph in backend.compiled() if graph not in others]
    assert len(graphs) == 3
    arenas = [graph._built.executable._arena.bytes for graph in graphs]
    assert sum(arena is not None for arena in arenas) <= 1


def test_sizes_that_cannot_be_one_graph_have_no_budget(monkeypatch):
    monkeypatch.setattr(JointGraph, "why_apart", lambda _: "an operation has a side effect")
    batch = torch.randn(4, 8)
    ours, theirs = dynamic(Net())
    for model in (ours, theirs):
        loss_of(model, batch).backward()
    same_gradients(ours, theirs)
    budgeted, _ = dynamic(Net(), memory=0.5)
    with pytest.raises(
        Exception,
        match=r"TR-207.*dynamic sizes cannot be planned.*: an operation has a side effect",
    ):
        budgeted(batch)


def test_every_size_knows_the_lines_of_the_model():
    ours, _ = dynamic(Net())
    for rows in (6, 10):
        loss_of(ours, torch.randn(rows, 8)).backward()
        graph = max(backend.compiled(), key=lambda graph: graph.number)
        assert "h = torch.tanh(layer(h)) * F.gelu(h)" in graph.explain()


def test_what_is_checkpointed_is_computed_again_at_every_size():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda h, layer=layer: torch.sigmoid(layer(h)).sin(), x,
                               use_reentrant=False)  # fmt: skip
            return x

    ours, theirs = dynamic(Checkpointed())
    for rows in (300, 500):
        batch = torch.randn(rows, 64)
        for model in (ours, theirs):
            model(batch).square().sum().backward()
        same_gradients(ours, theirs)
        graph = max(backend.compiled(), key=lambda graph: graph.number)
        assert graph.summary().arena_bytes < 10 * 64 * rows * 4  # 12 are kept without


@pytest.mark.parametrize("backward", [True, False])
def test_attention_whose_workspace_is_measured(backward):
    """The first call of a graph has a mode of AOTAutograd's around it, which is none of ours."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.split = nn.Linear(32, 96)

        def forward(self, x):
            heads = self.split(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*heads)

    ours, theirs = dynamic(Attention())
    for length in (9, 17):
        batch = torch.randn(2, length, 32)
        with torch.set_grad_enabled(backward):
            mine, other = ours(batch), theirs(batch)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        if backward:
            mine.square().sum().backward()
            other.square().sum().backward()
            same_gradients(ours, theirs)
