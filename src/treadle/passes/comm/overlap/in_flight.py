"""Bytes of collectives that are in flight at the same time, while their starts and waits move.

::

    position:   0    1    2    3    4    5           a: Span(0, 3, 8 bytes)
                a ------------ wait                  b: Span(1, 5, 4 bytes)
                     b ----------------- wait
    bytes:      8    12   12   4    4    0

A collective is in flight from its start to its last wait, or to the end if there is none. Positions
are those of the graph before any move; a moved node is between two of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import final

from torch import fx

from treadle.graph.core.collectives import Collective, collectives_in


@final
@dataclass(frozen=True, slots=True)
class Span:
    """From ``start`` on, until ``end``, ``nbytes`` are under way."""

    start: float
    end: float
    nbytes: int


@final
class InFlight:
    """The spans of a graph's collectives. A span may grow while ``bound`` holds inside its growth;
    without a bound it always may."""

    def __init__(self, graph: fx.Graph, bound: int | None) -> None:
        self._bound = bound
        self._spans = {} if bound is None else spans_of(graph)

    def start_early(self, node: fx.Node, wanted: float) -> float:
        """Where the collective ``node``, which starts later, starts now: at ``wanted``, or right
        behind the last place where it is too much; where it did if that is everywhere."""
        if self._bound is None:
            return wanted
        span = self._spans[node]
        start = wanted
        for low, high in self._overfull(node, wanted, span.start):
            del low
            start = high if high == span.start else high + 0.5
        start = min(start, span.start)
        self._spans[node] = Span(start, span.end, span.nbytes)
        return start

    def end_late(self, node: fx.Node, wanted: float) -> float:
        """Where the last wait for the collective ``node`` stands now: at ``wanted``, or right ahead
        of the first place where it is too much. Never earlier than it did."""
        if self._bound is None:
            return wanted
        span = self._spans[node]
        end = max(wanted, span.end)
        overfull = next(self._overfull(node, span.end, end), None)
        if overfull is not None:
            end = max(span.end, overfull[0] - 0.5)
        self._spans[node] = Span(span.start, end, span.nbytes)
        return end

    def _overfull(self, node: fx.Node, low: float, high: float) -> Iterator[tuple[float, float]]:
        """Where, between ``low`` and ``high``, it and the others are more than the bound."""
        others = [span for key, span in self._spans.items() if key is not node]
        edges = {low, high}
        for span in others:
            edges |= {edge for edge in (span.start, span.end) if low < edge < high}
        ordered = sorted(edges)
        own = self._spans[node].nbytes
        for left, right in pairwise(ordered):
            there = sum(other.nbytes for other in others if other.start <= left < other.end)
            if own + there > (self._bound or 0):
                yield left, right


def spans_of(graph: fx.Graph) -> dict[fx.Node, Span]:
    """The span of each collective of the graph."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    return {collective.node: _span_of(collective, position) for collective in collectives_in(graph)}


def _span_of(collective: Collective, position: dict[fx.Node, int]) -> Span:
    end = max((position[wait] for wait in collective.waits), default=inf)
    return Span(position[collective.node], end, collective.nbytes)
