"""Which collectives can be bucketed at all, and which of them with each other."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import final

from torch import fx

from treadle.algebra.extents import dims_in
from treadle.graph.analysis.dataflow import readers_of
from treadle.graph.core.collectives import Collective, CollectiveKind, collectives_in
from treadle.graph.core.node_info import info
from treadle.graph.core.types import type_of
from treadle.graph.core.verify import PHASES
from treadle.passes.comm.blocks import rearranges
from treadle.util.errors import require
from treadle.util.refusals import NoMatch, attempt


@final
@dataclass(frozen=True, slots=True)
class JoinCandidate:
    """A collective that others may be joined with, and the one node that waits for it."""

    collective: Collective
    wait: fx.Node

    @property
    def start(self) -> fx.Node:
        """The node that starts it."""
        return self.collective.node

    @property
    def kind(self) -> Mapping[str, Hashable]:
        """What has to be equal for two that one collective can do, by what it is called."""
        first, (source,) = self.collective, self.collective.inputs
        known, type_ = info(self.start), type_of(source)
        return {
            "kind": first.kind,
            "group": first.group,
            "reduction": first.reduce,
            "root": first.root,
            "number of ranks": first.ranks,
            "dtype": type_.dtype,
            "device": type_.device,
            "phase": known.phase,
            "region": (known.region, known.checkpoint, known.asked, known.chunk, known.gathered),
            "phase of the first reader": _first_phase(self.wait),
        }


def candidates_in(graph: fx.Graph) -> tuple[list[JoinCandidate], dict[fx.Node, str]]:
    """The collectives that can be joined, in the graph's order; why the others cannot."""
    candidates: list[JoinCandidate] = []
    reasons: dict[fx.Node, str] = {}
    for collective in collectives_in(graph):
        candidate = attempt(_candidate, collective)
        if isinstance(candidate, NoMatch):
            reasons[collective.node] = candidate.message
        else:
            candidates.append(candidate)
    return candidates, reasons


def _candidate(collective: Collective) -> JoinCandidate:
    node, waits = collective.node, collective.waits
    alike = collective.kind is not CollectiveKind.ALL_TO_ALL
    require(alike, NoMatch, f"{node} sends each rank a different part")
    require(not collective.coalesced, NoMatch, f"{node} is a bucket already")
    whole = info(node).piece is None
    require(whole, NoMatch, f"{node} is a chunk of a collective that overlaps with products")
    require(len(waits) == 1, NoMatch, f"{len(waits)} nodes wait for {node}")
    require(len(node.users) == 1, NoMatch, f"{node} is read before it is waited for")
    (source,), (wait,) = collective.inputs, waits
    sizes = [*type_of(source).shape, *type_of(wait).shape]
    require(not dims_in(sizes), NoMatch, f"{node} has dynamic sizes")
    require(type_of(wait).is_contiguous, NoMatch, f"{wait} is not in row-major order")
    return JoinCandidate(collective, wait)


def _first_phase(wait: fx.Node) -> int:
    """In which phase the result is needed; what is only returned is needed in the last. A result
    that the backward pass goes on with does not wait for gradients that the optimizer reads."""
    phases = [info(reader).phase or PHASES[-1] for reader in readers_of(wait, rearranges)]
    return min(map(PHASES.index, phases), default=len(PHASES))
