"""How long the operations of a graph take that are calls of a library: measured, and cached."""

from typing import cast

import torch
from torch import Tensor, fx

from treadle.compat.operators.operator_facts import facts_of, may_invent
from treadle.graph.analysis.dynamic import layout_of, offset_of
from treadle.graph.core.arguments import given_of
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import OpOverload, arguments
from treadle.runtime.call_times import CallTimes
from treadle.runtime.store.artifact import CallStep, StepArgument, View
from treadle.runtime.store.cache import Cache


class OperationTimes:
    """Seconds of nodes on ``device``, as of ``CallTimes``. ``None`` for what is no operator of
    PyTorch's or of treadle's, or cannot run by itself: users' operations, draws, collectives, and
    calls whose sizes depend on values."""

    def __init__(self, cache: Cache, device: str, machine: str) -> None:
        self._times = CallTimes(cache, device, machine)

    def __call__(self, node: fx.Node, /) -> float | None:
        step = call_of(node)
        return None if step is None else self._times.of(step)


def call_of(node: fx.Node) -> CallStep | None:
    """The call of an operation that may run on invented numbers."""
    op = node.target
    if not isinstance(op, OpOverload) or facts_of(op).communicates:
        return None
    operands = {operand: value_of(operand) for operand in node.all_input_nodes}
    if not all(isinstance(value, Tensor) and _is_known(value) for value in operands.values()):
        return None
    if not may_invent(op, arguments(node), (value.dtype for value in operands.values())):
        return None
    args, kwargs = given_of(node, lambda operand: _view(operand, operands[operand]), _plain)
    named = cast("dict[str, StepArgument]", dict(kwargs))
    return CallStep(str(op), cast("tuple[StepArgument, ...]", tuple(args)), named, ())


def _is_known(value: Tensor) -> bool:
    """Whether all sizes are numbers."""
    shape, strides = layout_of(value)
    return all(type(size) is int for size in (*shape, *strides))


def _view(operand: fx.Node, value: Tensor) -> View:
    offset = offset_of(value)
    return View(operand.name, value.dtype, tuple(value.shape), tuple(value.stride()), offset)


def _plain(argument: object) -> object:
    return str(argument) if isinstance(argument, torch.device) else argument
