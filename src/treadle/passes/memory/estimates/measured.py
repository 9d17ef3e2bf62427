"""Measured seconds of the library calls of a step.

Formulas are parts of generated kernels, which exist only when a plan has been chosen: their time is
estimated by the bytes that they move, at the measured rate of the device.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import fx

from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import Facts
from treadle.targets.model import DeviceModel


class NodeTimes(Protocol):
    """Planning's call up into the runtime, which it may not import."""

    def __call__(self, node: fx.Node, /) -> float | None:
        """Measured seconds of an operation; ``None`` if it cannot run by itself."""
        ...


def measured_seconds(
    facts: Facts, device: DeviceModel, roofline: Sequence[float], times: NodeTimes
) -> tuple[float, ...]:
    """The roofline's for formulas, and for calls that cannot run by themselves."""
    seconds = list(roofline)
    for i, (node, kind) in enumerate(zip(facts.nodes, facts.kinds, strict=True)):
        measured = times(node) if kind in (Kind.PRODUCT, Kind.LIBRARY) else None
        if measured is not None:
            seconds[i] = max(measured - device.launch, 0.0)  # which each call costs besides
    return tuple(seconds)
