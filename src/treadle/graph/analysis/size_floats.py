"""Floats that PyTorch's own functions compute from sizes, in a graph.

::

    before:  n = sym_size(x, 0); f = 2.0 / (sym_float(n) - 1.0); y = mul.Scalar(g, f)
    after:   n = full([], S, float64); f = div(full([], 2.0), sub(n, 1.0)); y = mul.Tensor(g, f)

They are computed in float64 like in Python, by 0-dim values. An integer that is computed from one
is a dim that each call computes.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import SymFloat, SymInt, fx

from treadle.algebra.dims import Operand, SizeExpression, name_of
from treadle.algebra.extents import formula_of
from treadle.algebra.polynomial import computed
from treadle.graph.core.node_info import copy_notes, known_value
from treadle.util.errors import LoweringError, VerifyError

aten = torch.ops.aten

_ARITHMETIC: Mapping[object, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
}
_SCALED: Mapping[object, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    **{op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
}
"""Operations of a tensor and a number, and of two tensors."""
_AS_PYTHON: Mapping[object, Callable[..., object]] = {
    torch.sym_float: float,
    torch.sym_int: int,
}


@final
class SizeFloats:
    """Those of one graph. ``size``: of a node that is an integer, or of a symbol, the size;
    ``evaluate``: gives a node of tensors its value."""

    def __init__(
        self, size: Callable[[fx.Node | SymInt], int], evaluate: Callable[[fx.Node], None]
    ) -> None:
        self._size, self._evaluate = size, evaluate
        self._tensors: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node) -> bool:
        """Where a tensor of floats meets a float of sizes in ``node``, it meets a tensor; whether
        that is all there was of them."""
        op = _SCALED.get(node.target)
        if op is None or len(node.args) != 2 or node.kwargs:
            return False
        tensor, number = node.args
        if not isinstance(tensor, fx.Node) or not isinstance(number, fx.Node):
            return False
        value, amount = known_value(tensor), known_value(number)
        if not isinstance(value, torch.Tensor) or not isinstance(amount, SymFloat):
            return False
        if not value.is_floating_point() or not _takes_number(value):
            return False
        scale = self._tensor(number, node)
        if scale is None:
            return False
        if not value.ndim:  # two without dims have the wider dtype
            scale = self._made(node, aten._to_copy.default, (scale,), {"dtype": value.dtype})
        node.target, node.args = op, (tensor, scale)
        return True

    def _tensor(self, number: fx.Node, before: fx.Node) -> fx.Node | None:
        """A float of sizes as a float64 without dims, which is there before ``before``."""
        if number in self._tensors:
            return self._tensors[number]
        if number.target is torch.sym_float:
            made = self._operand(number.args[0], before)
        else:
            op = _ARITHMETIC.get(number.target)
            operands = [self._operand(operand, before) for operand in number.args]
            known = [operand for operand in operands if operand is not None]
            whole = op is not None and len(known) == len(operands)
            made = self._made(before, op, tuple(known), {}) if whole else None
        if made is not None:
            self._tensors[number] = made
        return made

    def _operand(self, operand: object, before: fx.Node) -> fx.Node | None:
        amount = operand
        if isinstance(operand, fx.Node):
            value = known_value(operand)
            if isinstance(value, SymFloat):
                return self._tensor(operand, before)
            amount = self._size(operand) if isinstance(value, SymInt | int) else None
        elif isinstance(operand, SymInt):
            amount = self._size(operand)
        if not isinstance(amount, int | float):
            return None
        return self._made(before, aten.full.default, ([], amount), {"dtype": torch.float64})

    def _made(self, before: fx.Node, op: Any, args: tuple[Any, ...], named: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            node = before.graph.call_function(op, args, named)
        copy_notes(node, before)
        self._evaluate(node)
        return node

    def computed(self, number: fx.Node) -> SizeExpression | None:
        """An integer that is made of floats of sizes, as Python computes it."""
        made = self._computed(number)
        return made if isinstance(made, SizeExpression) else None

    def _computed(self, operand: object) -> Operand | None:
        if isinstance(operand, fx.Node):
            value = known_value(operand)
            if isinstance(value, int):
                return value
            if isinstance(value, SymInt):
                try:
                    return computed(formula_of(self._size(operand)))
                except (LoweringError, VerifyError, KeyError):
                    pass
            function = _AS_PYTHON.get(operand.target, operand.target)
            name = name_of(function) if callable(function) else None
            parts = [self._computed(each) for each in operand.args]
            known = [part for part in parts if part is not None]
            if name is None or operand.kwargs or len(known) < len(parts):
                return None
            return SizeExpression(name, tuple(known))
        return operand if type(operand) in (int, float) else None  # type: ignore[return-value]


def _takes_number(value: torch.Tensor) -> bool:
    """Whether a float64 without dims counts as a number beside it."""
    return bool(value.ndim) or value.dtype in (torch.float32, torch.float64)
