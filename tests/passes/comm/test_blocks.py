import torch

from passes.comm.communicating import all_gather, all_reduce, wait
from testing import trace
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.analysis.dataflow import readers_of
from treadle.passes.comm.blocks import blocks_in, is_view

X, Y = torch.randn(4, 3), torch.randn(4, 3)


def words(nodes):
    return [node.name for node in nodes]


def test_a_block_is_collective_waits_and_tail():
    def program(x):
        gathered = wait(all_gather(x * 2))
        joined = torch.cat(torch.chunk(gathered, 2), 1)
        return joined.sin(), gathered.t() + 1

    (block,) = blocks_in(trace(program, X).graph)
    assert words(block.inputs) == ["mul"]
    assert words(block.waits) == ["wait_tensor"]
    assert words(block.tail) == ["split", "getitem", "getitem_1", "cat", "t"]
    assert words(block.outputs) == ["cat", "t"]
    assert words(block.nodes) == [
        "all_gather_into_tensor", "wait_tensor", "split", "getitem", "getitem_1", "cat", "t",
    ]  # fmt: skip


def test_names_and_distance_do_not_matter():
    def program(x):
        r = all_reduce(x)
        for _ in range(30):
            x = x.sin()
        return wait(r).view(-1) + x.view(-1)

    step = trace(program, X)
    for at, node in enumerate(step.graph.nodes):
        if node.op == "call_function":
            node.name = f"wait_tensor_all_reduce_{at}"
    (block,) = blocks_in(step.graph)
    assert len(block.tail) == 1
    assert block.collective.group == "0"


def test_arithmetic_and_foreign_values_are_no_tail():
    def program(x, y):
        w = wait(all_reduce(x))
        return torch.cat([w, y]), w * 1, w.double(), torch.cat([w, wait(all_reduce(y))])

    first, second = blocks_in(trace(program, X, Y).graph)
    assert first.tail == second.tail == ()
    assert words(first.outputs) == ["wait_tensor"]


def test_several_results_and_several_waits():
    def program(x, y):
        a, b = collective_op("all_reduce_coalesced")([x, y], "sum", "0")
        return wait(a).t() + 1, wait(b).view(-1), wait(b) + 1

    (block,) = blocks_in(trace(program, X, Y).graph)
    assert words(block.inputs) == ["x", "y"]
    assert len(block.waits) == 3
    assert words(block.tail) == ["t", "view"]
    assert words(block.nodes)[:3] == ["all_reduce_coalesced", "getitem", "getitem_1"]


def test_nobody_waits():
    def program(x):
        all_reduce(x)
        return x + 1

    (block,) = blocks_in(trace(program, X).graph)
    assert block.waits == block.tail == block.outputs == ()


def test_readers_are_behind_views():
    def program(x):
        w = wait(all_reduce(x))
        a, b = torch.split(w.t(), 2, 1)
        return a.sin(), w, b

    step = trace(program, X)
    (block,) = blocks_in(step.graph)
    assert words(readers_of(block.waits[0], is_view)) == ["output", "sin"]
