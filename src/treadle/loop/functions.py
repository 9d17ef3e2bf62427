"""The cost of functions in formulas: one table, which every decision about recomputation uses."""

import torch

from treadle.algebra.extents import Size
from treadle.loop.expr import Apply, Const

EXPENSIVE = frozenset({
    "exp", "expm1", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "erfc", "sigmoid", "pow",
    "fmod", "mod",
})  # fmt: skip
"""Functions of some tens of instructions: a formula with one of them is not computed again for
each of its readers."""

DIVIDES = frozenset(["div", "floordiv", "sqrt", "rsqrt"])
"""Functions of one instruction that takes as long as ten others."""

WORTH_KEEPING = EXPENSIVE | DIVIDES
"""Functions whose result a loop keeps for a second pass over a row, instead of computing it
again."""


def shift_of(expr: Apply) -> int | None:
    """``k`` where integers are divided by ``2^k``: an arithmetic shift rounds down as well."""
    if expr.fn != "floordiv" or expr.dtype not in (torch.int32, torch.int64):
        return None
    divisor = expr.operands[1]
    if not isinstance(divisor, Const) or isinstance(divisor.value, Size):
        return None
    value = int(divisor.value)
    return value.bit_length() - 1 if value > 0 and value & (value - 1) == 0 else None
