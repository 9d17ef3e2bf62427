"""Equal blocks of a graph: where they are, and that each is a copy of the first."""

from itertools import pairwise

import pytest
import torch
from torch import fx

from testing import trace
from treadle.graph.repeats import Repeat, find_repeats


def chain(x, *weights):
    for weight in weights:
        x = torch.relu(torch.mm(x, weight))
    return x.sum()


def stack(count: int, width: int = 4) -> fx.Graph:
    """``count`` equal layers, each with a weight of its own."""
    names = ", ".join(f"w{n}" for n in range(count))
    program = eval(f"lambda x, {names}: chain(x, {names})", {"chain": chain})
    inputs = [torch.randn(3, width), *(torch.randn(width, width) for _ in range(count))]
    return trace(program, *inputs).graph


def expanded(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph from its repeats and what stands between them."""
    nodes, found, at = list(graph.nodes), [], 0
    for each in find_repeats(graph):
        found += nodes[at : each.start]
        for time in range(each.times):
            found += [nodes[position] for position in each.block(time)]
        at = each.stop
    return found + nodes[at:]


def inner_reads(graph: fx.Graph, block: range) -> list[list[int | None]]:
    """Per node of a block its operands by their place inside; ``None`` for those outside."""
    nodes = list(graph.nodes)
    place = {nodes[position]: n for n, position in enumerate(block)}
    return [[place.get(each) for each in nodes[at].all_input_nodes] for at in block]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_layers_are_one_repeat(count):
    graph = stack(count)
    first = 1 + count  # after the inputs
    assert find_repeats(graph) == (Repeat(first, 2, count),)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_expanding_gives_the_nodes(count):
    graph = stack(count)
    assert expanded(graph) == list(graph.nodes)


def test_blocks_call_and_read_alike():
    graph = stack(5)
    nodes = list(graph.nodes)
    for each in find_repeats(graph):
        first = each.block(0)
        for time in range(1, each.times):
            block = each.block(time)
            assert [nodes[at].target for at in block] == [nodes[at].target for at in first]
            assert inner_reads(graph, block) == inner_reads(graph, first)


def test_types_tell_layers_apart():
    def program(x, a, b):
        return torch.relu(torch.mm(torch.relu(torch.mm(x, a)), b))

    graph = trace(program, torch.randn(3, 4), torch.randn(4, 5), torch.randn(5, 6)).graph
    assert find_repeats(graph) == ()


def test_plain_arguments_tell_layers_apart():
    def program(x):
        return x.mul(2.0).exp().mul(3.0).exp()

    assert find_repeats(trace(program, torch.randn(3)).graph) == ()


def test_what_is_read_inside_tells_blocks_apart():
    def program(x, y):
        a = x + y
        b = a * a  # its own block's sum, twice
        c = b + y
        d = c * b  # and here of the block before as well
        return d.sum()

    graph = trace(program, torch.randn(3), torch.randn(3)).graph
    assert find_repeats(graph) == ()


def test_repeats_never_overlap():
    graph = stack(6)
    found = find_repeats(graph)
    assert all(a.stop <= b.start for a, b in pairwise(found))
