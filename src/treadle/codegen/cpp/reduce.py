"""How a reduction is accumulated in C++: one variable, folded lane by lane, then finished.

Maxima and minima are computed on integers in the same order as the floats: integer maxima
vectorise, and NaN has the position that PyTorch gives it.
"""

from dataclasses import dataclass

import torch

from treadle.codegen.cpp.expr import VALUE_TYPES, literal
from treadle.loop.expr import Reduce, ReduceKind


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The accumulator of one reduction, as text.

    ``clause`` is the OpenMP operator that may split the loop into lanes, or empty.
    """

    kind: ReduceKind
    source: torch.dtype
    dtype: torch.dtype
    type: str
    start: str
    clause: str

    @property
    def long(self) -> bool:
        """Whether rounding errors of many terms add up: then sums of a few are added in float64,
        which is as good as PyTorch's cascades."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        return self.kind is ReduceKind.SUM and self.type == "float" and not half

    @property
    def total(self) -> str:
        """The type of what pieces are joined in."""
        return "double" if self.long else self.type

    @property
    def is_position(self) -> bool:
        """Whether what is found is a place along the axis and not a value."""
        return self.kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN)

    @property
    def keyed(self) -> bool:
        """Whether floats are compared as integers of the same order."""
        return self.type == "int32_t" and self.source in _FLOATS and self.kind in _EXTREME

    def step(self, into: str, value: str) -> str:
        """The statement that adds one element."""
        match self.kind:
            case ReduceKind.SUM:
                return f"{into} += {value};"
            case ReduceKind.PROD:
                return f"{into} *= {value};"
            case ReduceKind.ANY:
                return f"{into} |= (int)({value} != 0);"
            case ReduceKind.MAX | ReduceKind.MIN:
                return self.join(into, self._keyed_value(value))
            case _:
                raise AssertionError(self.kind)

    def _keyed_value(self, value: str) -> str:
        return f"key_{self.kind}({value})" if self.keyed else value

    def join(self, into: str, part: str) -> str:
        """The statement that adds another accumulator."""
        match self.kind:
            case ReduceKind.SUM:
                return f"{into} += {part};"
            case ReduceKind.PROD:
                return f"{into} *= {part};"
            case ReduceKind.ANY:
                return f"{into} |= {part};"
            case _ if self.keyed or not self.source.is_floating_point:
                sign = ">" if self.kind is ReduceKind.MAX else "<"
                return f"{into} = {part} {sign} {into} ? {part} : {into};"
            case _:
                return f"{into} = t_{self.kind}({into}, ({self.type}){part});"

    def finish(self, name: str) -> str:
        """The reduced value, of the register type of ``dtype``."""
        if self.keyed:
            return f"key_back({name})"
        if self.kind is ReduceKind.ANY:
            return f"({VALUE_TYPES[self.dtype]})({name} != 0)"
        if self.dtype in (torch.bfloat16, torch.float16) and self.kind is not ReduceKind.MAX:
            return f"{'to_bf16' if self.dtype is torch.bfloat16 else 'to_f16'}((float){name})"
        return f"({VALUE_TYPES[self.dtype]}){name}"


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXTREME = (ReduceKind.MAX, ReduceKind.MIN)


def fold_of(reduce: Reduce) -> Accumulator:
    """The accumulator that suits a reduction."""
    source = reduce.body.dtype
    kind = VALUE_TYPES[source]
    match reduce.kind:
        case ReduceKind.SUM:
            type_, start, clause = ("int64_t" if kind == "bool" else kind), "0", "+"
        case ReduceKind.PROD:
            type_, start, clause = ("int64_t" if kind == "bool" else kind), "1", "*"
        case ReduceKind.ANY:
            type_, start, clause = "int", "0", "|"
        case ReduceKind.MAX:
            type_, start, clause = kind, _lowest(source), "max"
        case ReduceKind.MIN:
            type_, start, clause = kind, _highest(source), "min"
        case _:
            type_, start, clause = kind, literal(0, source), ""
    if reduce.kind in _EXTREME and source in _FLOATS:
        word = "min" if reduce.kind is ReduceKind.MAX else "max"
        type_, start = "int32_t", f"std::numeric_limits<int32_t>::{word}()"
    elif reduce.kind in _EXTREME and source is torch.float64:
        clause = ""
    return Accumulator(reduce.kind, source, reduce.dtype, type_, start, clause)


def _lowest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return f"-({VALUE_TYPES[dtype]})INFINITY"
    return f"std::numeric_limits<{VALUE_TYPES[dtype]}>::min()"


def _highest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return f"({VALUE_TYPES[dtype]})INFINITY"
    return f"std::numeric_limits<{VALUE_TYPES[dtype]}>::max()"
