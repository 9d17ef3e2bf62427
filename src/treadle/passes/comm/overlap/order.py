"""Hide communication behind compute by the order of a step's nodes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.order import arrange
from treadle.graph.rewrite.passes import Contract, GraphPass, until_settled
from treadle.passes.comm.cost import CommunicationModel
from treadle.passes.comm.overlap.list_schedule import Preference, list_schedule, moved
from treadle.passes.comm.overlap.precedence import precedence_of
from treadle.passes.comm.simulate import Work, peak_of, run_order, work_of
from treadle.targets.model import DeviceModel

_GAIN = 1e-3
"""Share of the step's time that an order must save to be worth having, and that orders may differ
in to be told apart by their bytes."""
_REACH = (32,)


@dataclass(frozen=True)
class OverlapCommunication(GraphPass):
    """Orders compute and collectives so that as much communication as possible is hidden.

    before:  s = all_reduce(g); w = wait_tensor(s); n = sub(p, w); h = mm(x, y)
    after:   s = all_reduce(g); h = mm(x, y); w = wait_tensor(s); n = sub(p, w)

    Several orders are made by list scheduling on the timeline of ``passes/comm/simulate.py``, and
    the shortest is taken, if it is shorter than the one there is.

    Memory: ``peak_bytes`` is what the step's predicted peak may grow to, ``in_flight_bytes`` how
    much may be started and not waited for; neither grows beyond that, nor beyond what it is
    already. ``None``: not at all, and any number.

    Only positions change, and neither draws, checks, users' operators nor writes change places with
    their like. The order is a function of the graph, of ``costs`` and of ``device``: ranks that
    agree on the three start their collectives in the same order.
    """

    contract = Contract()

    costs: CommunicationModel = field(repr=False)
    device: DeviceModel = field(repr=False)
    peak_bytes: int | None = None
    in_flight_bytes: int | None = None

    def run(self, step: StepGraph) -> int:
        return until_settled(self._once, step)

    def _once(self, step: StepGraph) -> int:
        work = work_of(step, self.costs, self.device)
        if not work.starts:
            return 0
        order = better_order(work, self.peak_bytes, self.in_flight_bytes)
        if order is None:
            return 0
        nodes = work.facts.nodes
        arrange(nodes, [nodes[i] for i in order])
        return moved(order)


@final
@dataclass(frozen=True, slots=True)
class _Evaluation:
    """An order by its time and bytes; ``rank`` tells those that are alike apart."""

    order: Sequence[int]
    seconds: float
    in_flight_bytes: int
    peak_bytes: int
    rank: int


def better_order(
    work: Work, peak_bytes: int | None = None, in_flight_bytes: int | None = None
) -> Sequence[int] | None:
    """A shorter order of a step within both bounds, as ``OverlapCommunication`` has them; ``None``
    if none was found. Less may be in flight than allowed, where the peak does not allow more."""
    present = _evaluate(work, range(len(work.seconds)), 0)
    most = max(present.peak_bytes, peak_bytes or 0)
    total = sum(start.nbytes for start in work.starts.values())
    flying = total if in_flight_bytes is None else max(in_flight_bytes, present.in_flight_bytes)
    limit = present.seconds * (1.0 - _GAIN)
    if limit < sum(work.seconds):  # no order takes less than the compute alone
        return None
    precedence = precedence_of(work)
    for bound in _bounds(work, flying):
        trials: list[_Evaluation] = []
        for rank, preference in enumerate(_preferences(work, bound)):
            order = list_schedule(work, precedence, preference)
            trial = _evaluate(work, order, rank, below=limit)
            within = trial.peak_bytes <= most and trial.in_flight_bytes <= flying
            trials += [trial] if within and trial.seconds < limit else []
        if trials:
            return _best(trials).order
    return None


def _evaluate(
    work: Work, order: Sequence[int], rank: int, *, below: float | None = None
) -> _Evaluation:
    """``below``: of an order that takes longer the bytes do not matter."""
    run = run_order(work, order)
    peak = peak_of(work, order) if below is None or run.seconds < below else 0
    return _Evaluation(order, run.seconds, run.in_flight_bytes, peak, rank)


def _best(trials: Sequence[_Evaluation]) -> _Evaluation:
    """Of the shortest, and those that take hardly longer, the one with the lowest peak."""
    longest = min(trial.seconds for trial in trials) * (1.0 + _GAIN)
    near = [trial for trial in trials if trial.seconds <= longest]
    return min(near, key=lambda trial: (trial.peak_bytes, trial.seconds, trial.rank))


def _bounds(work: Work, most: int) -> Iterator[int]:
    """From the most that may be in flight, by halves, to no more than the largest collective."""
    largest = max(start.nbytes for start in work.starts.values())
    bound = most
    while bound > largest:
        yield bound
        bound //= 2
    yield min(largest, most)


def _preferences(work: Work, in_flight_bytes: int) -> Iterator[Preference]:
    count = len(work.seconds)
    for reach in (*(reach_ for reach_ in _REACH if reach_ < count), count):
        for longest_first, in_sequence in itertools.product((False, True), repeat=2):
            yield Preference(reach, longest_first, in_sequence, in_flight_bytes)
