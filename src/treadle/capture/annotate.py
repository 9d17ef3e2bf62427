"""The origin of each node of a trace, and the random numbers that it draws."""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, final

from torch import fx

from treadle.capture.explain_errors import show_line
from treadle.capture.tensors.rng_guard import seeds
from treadle.capture.tracing.checkpointed_regions import Span
from treadle.capture.tracing.run import Run
from treadle.compat.operators.rng_operators import BY_GENERATOR
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.node_info import (
    NodeInfo,
    describe,
    info,
    known_value,
    value_of,
)
from treadle.graph.core.operators import arguments, draw_reads_values, is_random, set_argument
from treadle.graph.core.types import tensors_in
from treadle.graph.core.values import gather_results, refresh
from treadle.graph.custom_ops.expect import expect
from treadle.util.generators import GeneratorRef

T = TypeVar("T")


def annotate(graph: fx.Graph, run: Run) -> None:
    """Give each node its ``phase``, ``module``, user's line, and the number of its draw. Nodes of
    checkpointed regions that run again also get the ``region``, and the request of a selective
    policy (``asked``): ``must_save``, ``prefer_save``, ``must_recompute`` or
    ``prefer_recompute``."""
    recorder = run.recorder
    provenance = recorder.provenance
    phases = _Phases(recorder.backward, run.steps.spans)
    module, line = _Following(provenance.modules), _Following(provenance.lines)
    draw = _Draws(recorder.random.events)
    _name_generators(graph, run.positions, recorder.random.of_users)
    asked = iter(recorder.conditions.asked)
    regions = {at: n for n, span in enumerate(recorder.regions.again) for at in range(*span)}
    marks = {at: how.name.lower() for span, how in recorder.regions.marks for at in range(*span)}
    gathers = {at: number for span, number in recorder.gathers for at in range(*span)}
    for node in graph.nodes:
        at = run.positions.get(node, len(run.positions))  # the output is behind the others
        phase = phases.of(at)
        known = NodeInfo(
            phase=phase,
            where=show_line(line.at(at)),
            module="" if phase == "optimizer" else module.at(at),
            region=regions.get(at),
            asked=marks.get(at, ""),
            asked_at=next(asked) if node.target is expect else None,
            draw=draw.of(at, node),
            lost=at in run.steps.lost,
            gathered=gathers.get(at),
            own_rows=run.updates.own_rows.get(at),
        )
        describe(node, known_value(node), known)
    draw.finish()


@final
class _Phases:
    """Whether a node is of the forward pass, of a backward pass, or of an update."""

    def __init__(self, backward: Sequence[Span], updates: Sequence[Span]) -> None:
        self._backward, self._updates = backward, updates
        self._last = max((end for _, end in backward), default=1 << 60)

    def of(self, at: int) -> str:
        """The phase of a node; everything after the last backward pass is update."""
        if any(start <= at < end for start, end in self._backward):
            return "backward"
        if at >= self._last or any(start <= at < end for start, end in self._updates):
            return "optimizer"
        return "forward"


def _name_generators(
    graph: fx.Graph, positions: Mapping[fx.Node, int], drawn: Sequence[tuple[Span, int]]
) -> None:
    """Give draws from a generator of the user's, which were traced without it, its number.

    before:  r = rand.generator([3], generator=None)
    after:   r = rand.generator([3], generator=generator 0)
    """
    number_at = {at: number for span, number in drawn for at in range(*span)}
    for node in filter(is_random, graph.nodes):
        number = number_at.get(positions[node])
        if number is not None:
            if isinstance(node.target, OpOverload):
                node.target = BY_GENERATOR.get(node.target, node.target)
            set_argument(node, "generator", GeneratorRef(number))


class _Following(Generic[T]):
    """The value of the last event at or before a node; nodes are asked for in order."""

    def __init__(self, events: Sequence[tuple[int, T]]) -> None:
        self._events = events
        self._next = 1

    def at(self, node: int) -> T:
        while self._next < len(self._events) and self._events[self._next][0] <= node:
            self._next += 1
        return self._events[self._next - 1][1]


class _Draws:
    """Numbers the random operations; after a generator state is restored, the same numbers follow
    again."""

    def __init__(self, events: Sequence[tuple[int, bool, int]]) -> None:
        self._events = events
        self._next = 0
        self._kept: dict[int, int] = {}
        self._draw = 0
        self._most = 0

    def of(self, at: int, node: fx.Node) -> int:
        """The number of the draw of ``node``; -1 if it draws nothing."""
        while self._next < len(self._events) and self._events[self._next][0] <= at:
            _, put_back, state = self._events[self._next]
            if put_back:
                self._draw = self._kept.get(state, self._draw)
            else:
                self._kept[state] = self._draw
            self._next += 1
        if not is_random(node) or isinstance(arguments(node).get("generator"), GeneratorRef):
            return -1  # a generator of the user's has a state of its own
        self._draw += 1
        self._most = max(self._most, self._draw)
        return self._draw - 1

    def finish(self) -> None:
        """Called after the last node. ``CaptureError`` TR-120 if a state was restored and stays
        restored."""
        for _, put_back, state in self._events[self._next :]:
            if put_back:
                self._draw = self._kept.get(state, self._draw)
            else:
                self._kept[state] = self._draw
        if self._draw != self._most:
            raise seeds("PyTorch's random generator", "")


def draw_once(graph: fx.Graph) -> None:
    """A checkpointed region that runs again gets the random numbers of its first run.

    before:  m = bernoulli(e, 0.9); ...; m2 = bernoulli(e2, 0.9)   | the same draw
    after:   m = bernoulli(e, 0.9); ...; m is read instead of m2
    """
    first: dict[int, tuple[fx.Node, tuple[object, ...]]] = {}
    again: list[fx.Node] = []
    for node in list(graph.nodes):
        draw = info(node).draw
        if draw < 0 or not is_random(node):
            continue
        numbers = repr([a for a in node.args if not isinstance(a, fx.Node)])
        shapes = repr([tensor.shape for tensor in tensors_in(value_of(node))])
        key = node.target, shapes, numbers
        original, drawn = first.setdefault(draw, (node, key))
        if original is node:
            continue
        alike = not draw_reads_values(node) or _is_second_run(original, node)
        if key != drawn or not alike:  # other numbers from the same state
            raise seeds("PyTorch's random generator", info(node).where)
        node.replace_all_uses_with(original)
        graph.erase_node(node)
        again.append(original)
    gather_results(again)
    refresh(graph, again)


def _is_second_run(original: fx.Node, node: fx.Node) -> bool:
    """Whether the backward pass runs a region of the forward pass again."""
    return info(original).phase == "forward" and info(node).phase == "backward"
