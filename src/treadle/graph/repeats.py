"""Equal blocks that follow each other, found by structure: the layers of a model.

::

    graph:    x; a = mm(x, w1); b = relu(a); c = mm(b, w2); d = relu(c); s = sum(d)
    repeat:   start 1, length 2, times 2:   mm, relu | mm, relu

Two nodes are alike if operation, plain arguments, type and the types of their operands are. Two
blocks are equal if their nodes are alike in order, and whatever a node reads inside of its block
stands at the same place of each. What it reads from outside (weights, the block before, in the
backward pass the forward's values) is what differs.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from torch import fx

from treadle.graph.arguments import Argument, map_argument
from treadle.graph.canonical import text_of_value
from treadle.graph.node_info import info, known_value
from treadle.graph.types import tensors_in, type_of_tensor

_PERIODS = 64
"""Lengths of blocks that are tried: those at which most nodes come again."""


@final
@dataclass(frozen=True, slots=True)
class Repeat:
    """``times`` equal blocks of ``length`` nodes each, the first at position ``start``."""

    start: int
    length: int
    times: int

    @property
    def stop(self) -> int:
        """The position after the last block."""
        return self.start + self.length * self.times

    @property
    def saved(self) -> int:
        """Nodes that are copies of the first block's."""
        return self.length * (self.times - 1)

    def block(self, time: int) -> range:
        """The positions of one block."""
        first = self.start + time * self.length
        return range(first, first + self.length)


def find_repeats(graph: fx.Graph) -> tuple[Repeat, ...]:
    """The repeats of ``graph`` in order, none of which overlap: those that save most come first."""
    nodes = list(graph.nodes)
    kinds = _kinds(nodes)
    reads = _reads(nodes)
    found = [each for length in _periods(kinds) for each in _runs(kinds, reads, length)]
    chosen: list[Repeat] = []
    for each in sorted(found, key=lambda one: (-one.saved, one.length, one.start)):
        if all(each.stop <= other.start or other.stop <= each.start for other in chosen):
            chosen.append(each)
    return tuple(sorted(chosen, key=lambda one: one.start))


def _kinds(nodes: Sequence[fx.Node]) -> list[int]:
    """A number per node, equal for nodes that are alike; inputs and results are like no other."""
    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for at, node in enumerate(nodes):
        key: Hashable = _structure(node) if node.op == "call_function" else at
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _structure(node: fx.Node) -> Hashable:
    def plain(argument: Argument) -> Argument:
        return _type(argument) if isinstance(argument, fx.Node) else argument

    given = map_argument(plain, (node.args, node.kwargs))
    return node.target, text_of_value(given), info(node).phase, _type(node)


def _type(node: fx.Node) -> str:
    types = map(type_of_tensor, tensors_in(known_value(node)))
    return "; ".join(f"{each} {each.strides} {each.device}" for each in types)


def _reads(nodes: Sequence[fx.Node]) -> list[tuple[int, ...]]:
    """How far before each node its operands stand."""
    position = {node: at for at, node in enumerate(nodes)}
    return [tuple(at - position[n] for n in node.all_input_nodes) for at, node in enumerate(nodes)]


def _periods(kinds: Sequence[int]) -> list[int]:
    """The distances at which most nodes come again."""
    places: dict[int, list[int]] = {}
    for at, kind in enumerate(kinds):
        places.setdefault(kind, []).append(at)
    again = Counter(b - a for each in places.values() for a, b in pairwise(each))
    return [length for length, _ in again.most_common(_PERIODS)]


def _runs(kinds: Sequence[int], reads: Sequence[tuple[int, ...]], length: int) -> Iterator[Repeat]:
    """Every longest row of equal blocks of ``length`` nodes."""
    at, last = 0, len(kinds) - length
    while at < last:
        if kinds[at] != kinds[at + length]:
            at += 1
            continue
        end = at
        while end < last and kinds[end] == kinds[end + length]:
            end += 1
        yield from _whole_blocks(reads, Repeat(at, length, (end - at) // length + 1))
        at = end


def _whole_blocks(reads: Sequence[tuple[int, ...]], row: Repeat) -> Iterator[Repeat]:
    """The parts of a row of alike blocks that are equal in what they read as well."""
    first = 0
    for time in range(1, row.times + 1):
        if time < row.times and _read_alike(reads, row, first, time):
            continue
        if time - first > 1:
            yield Repeat(row.block(first).start, row.length, time - first)
        first = time


def _read_alike(reads: Sequence[tuple[int, ...]], row: Repeat, one: int, other: int) -> bool:
    for place, (a, b) in enumerate(zip(row.block(one), row.block(other), strict=True)):
        pairs = zip(reads[a], reads[b], strict=False)
        same = len(reads[a]) == len(reads[b]) and all(
            x == y or (x > place and y > place) for x, y in pairs
        )
        if not same:
            return False
    return True


__all__ = ["Repeat", "find_repeats"]
