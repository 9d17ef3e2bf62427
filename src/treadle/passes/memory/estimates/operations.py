"""Operations as a user's function sees them, and its answers, checked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import operation_name
from treadle.graph.core.types import tensors_in
from treadle.passes.memory.cost import Kind, work_of
from treadle.passes.memory.order import Facts
from treadle.util.errors import PlanError

Layout = tuple[tuple[int, ...], str]
"""A shape and a dtype."""


@final
@dataclass(frozen=True, slots=True)
class PlannedOperation:
    """One operation of a step, for a function that estimates how long it takes.

    - ``name``: of its result in the graph.
    - ``operator``: of PyTorch's or a user's: ``"mm"``, ``"mylib.scale"``.
    - ``kind``: ``"product"`` (of matrices, a convolution, attention), ``"library"``, ``"random"``:
      calls of a library; ``"pointwise"`` or ``"reduction"``: part of a generated kernel.
    - ``operands``, ``results``: of each tensor the shape and the dtype, ``((64, 32), "float32")``.
    - ``flops``: of a product; otherwise 0.
    - ``moved_bytes``: of all operands and results together.
    - ``module``, ``where``: the module that it belongs to, and the user's line.
    - ``seconds``: estimated by the roofline, as a kernel of its own.
    """

    name: str
    operator: str
    kind: str
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    flops: float
    moved_bytes: int
    module: str
    where: str
    seconds: float


def seconds_by(
    function: Callable[[Any], object], facts: Facts, roofline: Sequence[float]
) -> tuple[float, ...]:
    """What the user's function says of each operation that computes something."""
    return tuple(
        alone
        if kind in (Kind.INPUT, Kind.VIEW)
        else _checked(function, _operation(node, kind, alone))
        for node, kind, alone in zip(facts.nodes, facts.kinds, roofline, strict=True)
    )


def _operation(node: fx.Node, kind: Kind, alone: float) -> PlannedOperation:
    flops, moved, _ = work_of(node)
    return PlannedOperation(
        node.name,
        operation_name(node.target),
        kind.value,
        tuple(layout for operand in node.all_input_nodes for layout in _layouts(operand)),
        _layouts(node),
        flops,
        moved,
        info(node).module,
        info(node).where,
        alone,
    )


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    return tuple(
        (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors_in(value_of(node))
    )


def _checked(function: Callable[[Any], object], operation: PlannedOperation) -> float:
    try:
        seconds = function(operation)
    except Exception as error:
        raise _refused(operation, f"raised {type(error).__name__}: {error}") from error
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise _refused(operation, f"returned {seconds!r}, which is not a number")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _refused(operation, f"returned {seconds!r}, which is not a number of seconds")
    return float(seconds)


def _refused(operation: PlannedOperation, words: str) -> PlanError:
    return PlanError(
        f"the estimator of the planner {words}, for {operation.operator} ({operation.name})",
        code="TR-209",
        where=operation.where,
        remedy="return the seconds that the operation takes: a finite number, 0 or more",
    )
