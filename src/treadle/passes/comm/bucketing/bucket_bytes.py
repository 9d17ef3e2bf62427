"""How many bytes a bucket of collectives should hold, by the timeline of the step."""

from collections.abc import Callable, Sequence

from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes.comm.cost import CommunicationModel
from treadle.passes.comm.simulate import simulate_communication
from treadle.targets.model import DeviceModel

SMALLEST = 1 << 20
_GAIN = 1e-3


def choose_bucket_bytes(
    step: StepGraph,
    costs: CommunicationModel,
    device: DeviceModel,
    passes_for: Callable[[int], Sequence[GraphPass]],
) -> int:
    """The smallest power of two, from 1 MiB to all bytes of the step's collectives, whose buckets
    make the step no more than a thousandth longer than the best. ``passes_for(cap)``: the passes
    that make buckets of at most ``cap`` bytes, which are run on copies; the step stays as it is.
    """
    predicted: dict[int, float] = {}
    for cap in _caps(sum(collective.nbytes for collective in collectives_in(step.graph))):
        bucketed = step.copy()
        run_passes(bucketed, passes_for(cap))
        predicted[cap] = simulate_communication(bucketed, costs, device).seconds
    most = min(predicted.values()) * (1.0 + _GAIN)
    return next(cap for cap, seconds in predicted.items() if seconds <= most)


def _caps(total: int) -> list[int]:
    caps = [SMALLEST]
    while caps[-1] < total:
        caps.append(2 * caps[-1])
    return caps
