"""D9: products are computed chunk by chunk, concurrently with the collectives that they wait for.

Asynchronous tensor parallelism, or micro-pipelining: Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

from torch import fx

from treadle.graph.core.collectives import collectives_in, has_equal_parts
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import refresh
from treadle.graph.rewrite.order import restore_order
from treadle.graph.rewrite.passes import Contract, GraphPass, run_passes, until_settled
from treadle.passes.comm.cost import CommunicationModel
from treadle.passes.comm.overlap.hoist import HoistCollectives
from treadle.passes.comm.overlap.kept_order import kept_order
from treadle.passes.comm.overlap.pieces import cut
from treadle.passes.comm.overlap.pipeline_sites import (
    PipelineSite,
    cut_factor,
    likeness,
    nodes_of,
    sites_in,
)
from treadle.passes.comm.overlap.sink import SinkWaits
from treadle.passes.comm.simulate import peak_of, run_order, work_of
from treadle.targets.model import DeviceModel
from treadle.util.refusals import NoMatch, attempt

_UNEVEN = "ranks hold parts of several sizes, and each would decide by its own"


@dataclass(frozen=True)
class PipelineProducts(GraphPass):
    """Gathers that products wait for, and products that a reduce-scatter waits for, in pieces.

    before:  g = all_gather(x, 2); w = wait(g); y = mm(w, a)              x: f32[4, 8] on each rank
    after:   g = all_gather(x[:2], 2); h = all_gather(x[2:], 2)
             v = wait(g); p = mm(v, a); w = wait(h); q = mm(w, a)         p: f32[4, 6], of 2 ranks
             y = view(cat([view(p, [2, 2, 6]), view(q, [2, 2, 6])], 1), [8, 6])

    before:  y = mm(x, a); s = reduce_scatter(y, "sum", 2); w = wait(s)   x: f32[8, 8]
    after:   z = view(x, [2, 4, 8])
             p = mm(view(z[:, :2], [4, 8]), a); s = reduce_scatter(p, "sum", 2)
             q = mm(view(z[:, 2:], [4, 8]), a); t = reduce_scatter(q, "sum", 2)
             w = cat([wait(s), wait(t)])

    A piece has the rows of every rank, so each is gathered and multiplied while the next one is on
    its way, through views, permutations, splits that are put together again and casts. Products are
    ``mm``, ``addmm``, float8's ``_scaled_mm``, and sums of those. Rows of a product do not depend
    on each other: a library may round those of a smaller product otherwise in the last bit, and
    nothing else changes. So what is summed over is not cut: a weight's gradient, which sums over
    gathered rows, reads them put together again.

    Collectives that are alike (the layers of a model) are cut alike, in the number of pieces that
    makes the step shortest by the timeline of ``passes/comm/simulate.py`` after the passes ``then``
    that put collectives in their places, and not at all if that saves less than ``gain`` of it:
    estimates are no nearer. The interference that ``costs`` have counts: where sending needs the
    cores that compute, pieces hide little. All of that follows from sizes: where parts may be
    uneven, nothing is cut. Ranks that agree on sizes, ``costs`` and ``device`` start the same
    pieces in the same order. ``most``: pieces of one collective; ``smallest_rows``: of a product.

    Memory: pieces and what is put together of them are there at once, so more is needed beside the
    largest products. ``grows``: whether the step's predicted peak may become higher by that.
    """

    contract = Contract()

    costs: CommunicationModel = field(repr=False)
    device: DeviceModel = field(repr=False)
    then: tuple[GraphPass, ...] = field(default=(HoistCollectives(), SinkWaits()), repr=False)
    most: int = 8
    smallest_rows: int = 128
    gain: float = 1e-2
    grows: bool = True

    def run(self, step: StepGraph) -> int:
        return until_settled(self._once, step)  # what was not worth it may be beside other pieces

    def _once(self, step: StepGraph) -> int:
        chosen = self.choose(step).pieces
        return sum(self._cut_alike(step, kind, pieces) for kind, pieces in chosen.items())

    def choose(self, step: StepGraph) -> "PipelineChoice":
        """What would be cut, and why not the rest; changes nothing."""
        sites, reasons = sites_in(step.graph)
        choice = PipelineChoice({}, reasons)
        alike: dict[Hashable, list[PipelineSite]] = {}
        for site in sites:
            alike.setdefault(likeness(site), []).append(site)
        if not alike:
            return choice
        if not has_equal_parts(step):
            reasons |= {site.collective.node: _UNEVEN for site in sites}
            return choice
        best = self._evaluate(step)
        for kind, members in alike.items():
            trials = list(self._trials(best, kind, members[0]))
            shortest = min(trials, key=lambda trial: trial.seconds, default=None)
            if shortest is not None and shortest.seconds < best.seconds * (1.0 - self.gain):
                best, choice.pieces[kind] = shortest, shortest.pieces
                continue
            reason = self._refusal(best, shortest, members[0])
            reasons |= {member.collective.node: reason for member in members}
        return choice

    def _trials(
        self, trial_before: "_Trial", kind: Hashable, site: PipelineSite
    ) -> Iterator["_Trial"]:
        """The step with those of one kind in 2, 4... pieces, as long as that makes it shorter."""
        shortest = trial_before.seconds
        pieces = 1
        while 2 * pieces <= self.most:
            pieces *= 2
            if isinstance(attempt(cut_factor, site, pieces, self.smallest_rows), NoMatch):
                return  # nor can be more
            step = trial_before.step.copy()
            self._cut_alike(step, kind, pieces)
            trial = self._evaluate(step, pieces)
            if not self.grows and trial.peak_bytes > trial_before.peak_bytes:
                continue
            yield trial
            if trial.seconds > shortest:
                return
            shortest = trial.seconds

    def _refusal(self, best: "_Trial", trial: "_Trial | None", site: PipelineSite) -> str:
        """Why none is better, of which ``trial`` is the shortest."""
        start = site.collective.node
        if trial is not None:
            times = f"{1e3 * trial.seconds:.3f} ms instead of {1e3 * best.seconds:.3f} ms"
            return f"{start} in {trial.pieces} chunks: a step of {times}"
        halves = attempt(cut_factor, site, 2, self.smallest_rows)
        if isinstance(halves, NoMatch):
            return halves.message
        return f"{start} in chunks: a higher peak"

    def _evaluate(self, step: StepGraph, pieces: int = 1) -> "_Trial":
        placed = step.copy()
        run_passes(placed, self.then)
        work = work_of(placed, self.costs, self.device)
        order = range(len(work.seconds))
        peak = 0 if self.grows else peak_of(work, order)
        return _Trial(step, pieces, run_order(work, order).seconds, peak)

    def _cut_alike(self, step: StepGraph, kind: Hashable, pieces: int) -> int:
        """Cut all of one kind; how many there were."""
        gone: set[fx.Node] = set()
        results: list[fx.Node] = []
        count = 0
        for other in sites_in(step.graph)[0]:
            if likeness(other) != kind or gone.intersection(nodes_of(other)):
                continue
            results += cut(other, cut_factor(other, pieces, self.smallest_rows), pieces)
            gone.update(nodes_of(other))
            count += 1
        earlier = {node: list(others) for node, others in kept_order(step.graph).items()}
        for before, node in pairwise([other.node for other in collectives_in(step.graph)]):
            earlier.setdefault(node, []).append(before)
        restore_order(step.graph, earlier)
        refresh(step.graph, results)
        return count


@final
@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """The number of pieces of collectives that are alike, by what makes them so; and for all other
    gathers and scatters the reason."""

    pieces: dict[Hashable, int]
    reasons: dict[fx.Node, str]


@final
@dataclass(frozen=True, slots=True)
class _Trial:
    """A step in which collectives are cut, and what it takes."""

    step: StepGraph
    pieces: int
    seconds: float
    peak_bytes: int
