"""The costs of a step, by the estimator that the planner names, or the user's own."""

from treadle.passes.memory.estimates.measured import NodeTimes, measured_seconds
from treadle.passes.memory.estimates.operations import seconds_by
from treadle.passes.memory.fused import RecomputeCost, constant_costs, recompute_costs
from treadle.passes.memory.order import Facts
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError
from treadle.util.planning.planner import Planner

_DEFAULT = Planner()


def costs_of(
    facts: Facts, device: DeviceModel, method: Planner = _DEFAULT, times: NodeTimes | None = None
) -> RecomputeCost:
    """Of every value of a step. ``times``: of library calls, where they can be measured: TR-211 if
    they cannot, but are to be."""
    if callable(method.estimator):
        given = seconds_by(method.estimator, facts, facts.seconds(device))
        return recompute_costs(facts, device, given)
    match method.estimator:
        case "constant":
            return constant_costs(facts)
        case "measured":
            if times is None:
                raise _elsewhere(device)
            measured = measured_seconds(facts, device, facts.seconds(device), times)
            return recompute_costs(facts, device, measured)
        case _:
            return recompute_costs(facts, device)


def _elsewhere(device: DeviceModel) -> PlanError:
    return PlanError(
        f"estimates for {device.name} cannot be measured here: it is another device, the model has "
        "no memory, or the step communicates with other ranks, which would measure other times",
        code="TR-211",
        remedy='use the estimator "roofline", or a function of yours',
    )
