"""Scalar formulas: dtype promotion, casts, and ``ScalarExpr``: loop IR written as arithmetic."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from treadle.algebra.extents import Size
from treadle.algebra.index import Index
from treadle.compat.tensors import saturates
from treadle.loop.expr import BOOLEAN, COMPARE, Apply, Array, Const, Expr, Position
from treadle.loop.program import TensorRef
from treadle.loop.simplify import on_indices
from treadle.util.errors import VerifyError, require

Number = int | float | bool
Operand = TensorRef | Array | Number

_OVER = 464.0
"""The largest number that is rounded to 448, the largest of e4m3."""
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype eager computes in: float32 for half precisions, else the dtype itself."""
    return _WIDER.get(dtype, dtype)


def const(value: Number, dtype: torch.dtype) -> Const:
    """``value`` as a literal of ``dtype``, converted as PyTorch would."""
    if dtype is torch.bool:
        return Const(bool(value), dtype)
    if not dtype.is_floating_point:
        return Const(int(value), dtype)
    wide = float(value)
    if dtype in _WIDER and math.isfinite(wide):
        wide = torch.tensor(wide, dtype=torch.float64).to(dtype).item()
    return Const(wide, dtype)


def number(value: Number, dtype: torch.dtype) -> Expr:
    """``const``, or the formula of a size that the call decides."""
    if isinstance(value, Size):
        return cast(Position(Index.of(value)), dtype)
    return const(value, dtype)


def times_ratio(term: "ScalarExpr", numerator: float, count: int) -> "ScalarExpr":
    """``term * (numerator / count)``."""
    if isinstance(count, Size):
        return term * numerator / count
    return term * (numerator / count)


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    """``expr`` converted to ``dtype``; the same expression when it has it already."""
    if expr.dtype is dtype:
        return expr
    if isinstance(expr, Const):
        return const(expr.value, dtype)
    if dtype is torch.float8_e4m3fn and not saturates():
        wide = cast(expr, torch.float32)
        fits = Apply(
            "le", (Apply("abs", (wide,), wide.dtype), const(_OVER, wide.dtype)), torch.bool
        )
        expr = where(fits, wide, const(math.nan, wide.dtype))
    return Apply("cast", (expr,), dtype)


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """``yes`` where ``condition``, else ``no``; both of one dtype."""
    return Apply("where", (condition, yes, no), yes.dtype)


@functools.cache
def _sample(dtype: torch.dtype, scalar: bool) -> torch.Tensor:
    return torch.empty(() if scalar else (1,), dtype=dtype, device="meta")


def promoted_dtype(operands: Sequence[Operand]) -> torch.dtype:
    """PyTorch's common dtype of tensors, 0-dim tensors and Python numbers."""
    samples = [
        operand if isinstance(operand, Number) else _sample(operand.dtype, not operand.shape)
        for operand in operands
    ]
    if len(samples) == 1:
        return torch.result_type(samples[0], samples[0])
    return torch.result_type(samples[0], samples[1])


@final
@dataclass(frozen=True, slots=True)
class ScalarExpr:
    """An expression with arithmetic: ``(x * 0.5 + y).expr``. Numbers take the term's dtype."""

    expr: Expr

    def _operand(self, other: "ScalarExpr | Number") -> Expr:
        return other.expr if isinstance(other, ScalarExpr) else number(other, self.expr.dtype)

    def fn(self, name: str, *others: "ScalarExpr | Number") -> "ScalarExpr":
        """``name(self, *others)`` as a loop IR function."""
        operands = (self.expr, *(self._operand(other) for other in others))
        folded = on_indices(name, operands)
        if folded is not None:
            return ScalarExpr(folded)
        is_bool = name in COMPARE or name in BOOLEAN
        return ScalarExpr(Apply(name, operands, torch.bool if is_bool else self.expr.dtype))

    def __add__(self, other: "ScalarExpr | Number") -> "ScalarExpr":
        return self.fn("add", other)

    def __sub__(self, other: "ScalarExpr | Number") -> "ScalarExpr":
        return self.fn("sub", other)

    def __mul__(self, other: "ScalarExpr | Number") -> "ScalarExpr":
        return self.fn("mul", other)

    def __truediv__(self, other: "ScalarExpr | Number") -> "ScalarExpr":
        return self.fn("div", other)

    def __rmul__(self, other: Number) -> "ScalarExpr":
        return ScalarExpr(self._operand(other)).fn("mul", self)

    def __radd__(self, other: Number) -> "ScalarExpr":
        return ScalarExpr(self._operand(other)).fn("add", self)

    def __rsub__(self, other: Number) -> "ScalarExpr":
        return ScalarExpr(self._operand(other)).fn("sub", self)

    def __rtruediv__(self, other: Number) -> "ScalarExpr":
        return ScalarExpr(self._operand(other)).fn("div", self)

    def __neg__(self) -> "ScalarExpr":
        return self.fn("neg")

    def choose(self, yes: "ScalarExpr | Number", no: "ScalarExpr | Number") -> "ScalarExpr":
        """``yes`` where this boolean term holds, else ``no``; at least one of them is a term."""
        known = yes if isinstance(yes, ScalarExpr) else no
        require(
            isinstance(known, ScalarExpr), VerifyError, "a choice between two numbers has no dtype"
        )
        assert isinstance(known, ScalarExpr)
        return ScalarExpr(where(self.expr, known._operand(yes), known._operand(no)))

    def to(self, dtype: torch.dtype) -> "ScalarExpr":
        """Converted to ``dtype``."""
        return ScalarExpr(cast(self.expr, dtype))
