"""A reduction of which each rank reads only its rows becomes a reduce-scatter.

::

    g1  g2  g3        whole gradients, of this rank's batch
    r1  r2  r3        this rank's rows of their means       never: whole means
    |r1|² + ...       gathered from all ranks, and added    one small collective
    p1' p2' p3'       updates of these rows

(Xu et al., 2020, weight-update sharding; Rajbhandari et al., 2020, stage 2.)
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import final

from torch import fx

from treadle.graph.analysis.dataflow import operands, readers
from treadle.graph.core.collectives import Collective, CollectiveKind, collective_of, is_wait
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.comm.sharding.row_computation import RowComputation
from treadle.passes.comm.sharding.row_rules import ByElement, OwnRows, use_of
from treadle.passes.comm.sharding.same_values import may_differ
from treadle.util.errors import require
from treadle.util.reach import reached
from treadle.util.refusals import NoMatch, attempt


@dataclass(frozen=True)
class ScatterReductions(GraphPass):
    """An all-reduce whose result is read in this rank's rows alone is a reduce-scatter.

    before:  a = all_reduce(g, sum); w = wait(a); n = norm(w); c = f(n); s = mul(w, c)
             r = slice(s, 0, begin, end)                                   | own_rows
    after:   a = reduce_scatter(pad(g), sum); w = wait(a)[:end - begin]
             q = all_gather(stack([sum(mul(w, w))])); n = sqrt(sum over ranks of wait(q))
             c = f(n); r = mul(w, c)

    Between the all-reduce and the rows stand operations that work element by element, and those
    that make one number (``row_rules.py``): of that number each rank computes its part, and parts
    that nobody reads in between are gathered together. All else reads all of a value, which then
    stays whole, and so does what it is made of; ``refusals`` says why. That is the same on all
    ranks: it depends on which operation reads what, and not on which rows a rank has.

    The slices are those that the capture has marked: where a rank takes what it updates. Numbers
    are those of before to rounding. Memory: rows instead of whole values.
    """

    contract = Contract()

    def run(self, step: StepGraph) -> int:
        reductions = _reductions_to_scatter(step)
        if reductions.collectives:
            RowComputation(step.graph, reductions.rows, reductions.collectives).run()
        return len(reductions.collectives)


def refusals(step: StepGraph) -> dict[fx.Node, str]:
    """Why results of all-reduces, and what is computed of them, stay whole."""
    return _reductions_to_scatter(step).whole


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """``collectives``: by the wait for it, each that becomes a reduce-scatter. ``rows``: of what is
    computed of rows, which they are. ``whole``: of what is not, why."""

    collectives: dict[fx.Node, Collective]
    rows: dict[fx.Node, OwnRows]
    whole: dict[fx.Node, str]


def _reductions_to_scatter(step: StepGraph) -> _Found:
    if all(info(node).own_rows is None for node in step.graph.nodes):
        return _Found({}, {}, {})
    waits = dict(_waits(step.graph))
    reductions = _found(step.graph, waits, set())
    groups = {collective.group for collective in reductions.collectives.values()}
    apart = {node for group in groups for node in may_differ(step, group)}
    return _found(step.graph, waits, apart)


def _found(graph: fx.Graph, waits: Mapping[fx.Node, Collective], apart: Set[fx.Node]) -> _Found:
    by_element = _reached_by_element(waits)
    needs = _Needs(apart)
    for node in reversed(graph.nodes):
        if node in by_element:
            needs.note(node)
    for wait in waits:
        if needs.rows.get(wait, wait) is None:
            needs.whole[wait] = f"no rank takes its rows of {wait}"
    goes = {wait: collective for wait, collective in waits.items() if wait not in needs.whole}
    rows: dict[fx.Node, OwnRows] = {}
    for node in graph.nodes:
        if node not in by_element or node in needs.whole:
            continue
        operand_rows = [rows[operand] for operand in operands(node) if operand in rows]
        known = needs.rows[node] if node in goes else next(iter(operand_rows), None)
        if known is not None:
            rows[node] = known
    return _Found(goes, rows, needs.whole)


def _waits(graph: fx.Graph) -> Iterable[tuple[fx.Node, Collective]]:
    """Each wait that alone reads a reduction of one value with rows, and what it waits for."""
    for node in graph.nodes:
        collective = collective_of(node)
        if collective is None or collective.kind is not CollectiveKind.ALL_REDUCE:
            continue
        users = list(node.users)
        is_single = not collective.coalesced and len(users) == 1 and is_wait(users[0])
        if is_single and type_of(users[0]).ndim:
            yield users[0], collective


@final
class _Needs:
    """What is needed of values, those that read them first: ``rows``, or all of a value that is in
    ``whole``. ``None``: any rows will do. ``apart``: what need not be the same on all ranks, and of
    which no number is made of parts."""

    def __init__(self, apart: Set[fx.Node]) -> None:
        self._apart = apart
        self.rows: dict[fx.Node, OwnRows | None] = {}
        self.whole: dict[fx.Node, str] = {}

    def note(self, node: fx.Node) -> None:
        """All of what reads ``node`` is known."""
        rows = attempt(self._rows_of, node)
        if isinstance(rows, NoMatch):
            self.whole[node] = rows.message
        else:
            self.rows[node] = rows

    def _rows_of(self, node: fx.Node) -> OwnRows | None:
        needed = {self._rows_for(reader, node) for reader in readers(node)} - {None}
        require(len(needed) < 2, NoMatch, f"ranks divide {node} in several ways")
        return needed.pop() if needed else None

    def _rows_for(self, reader: fx.Node, node: fx.Node) -> OwnRows | None:
        match use_of(reader, node):
            case OwnRows() as rows:
                return rows
            case ByElement():
                why = self.whole.get(reader)
                require(why is None, NoMatch, why or "")
                return self.rows[reader]
            case _:
                same = node not in self._apart
                require(same, NoMatch, f"{reader} reads {node}, which may differ between ranks")
                return None


def _reached_by_element(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """``roots``, and what is computed of them element by element."""
    return {*reached(roots, lambda node: (r for r in readers(node) if _is_by_element(r, node)))}


def _is_by_element(reader: fx.Node, node: fx.Node) -> bool:
    return isinstance(attempt(use_of, reader, node), ByElement)
