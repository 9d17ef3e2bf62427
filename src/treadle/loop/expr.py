"""The loop IR: a tensor is a formula for one of its elements.

::

    array    =  [axis, ...] -> expr            the element at those axes
    expr     =  const | position | load | local | apply | reduce
    const    =  3.0:f32                        a literal of a dtype
    position =  index                          an index used as an int64 value
    load     =  buffer[index] if mask          one element; zero where the mask is false
    local    =  %name                          a value defined earlier in the same kernel
    apply    =  fn(expr, ...)                  a scalar function
    reduce   =  kind{axis<extent, ...} expr    combined over every value of the axes
    index    =  const + k * atom + ...         (see ``algebra/index.py``)
    atom     =  axis | index // n | index % n | value(expr)

``load`` takes one flat offset in elements into the buffer's storage. Formulas are graphs, not
trees: every traversal is memoised.
"""
# ruff: noqa: SIM905  (names read better as words than as lists)

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, final

import torch

from treadle.algebra.index import Axis, Formula, Index, Value
from treadle.util.errors import VerifyError, require

DTYPES = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
})  # fmt: skip
"""Dtypes that formulas have. Complex numbers and rare dtypes are for PyTorch's kernels."""
FLOAT8: Mapping[torch.dtype, str] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Dtypes of numbers that are moved and converted, and that nothing computes with, by the names of
their formats: PyTorch has no arithmetic of theirs. A cast to e4m3 gives its largest number for what
is larger."""

SAME = frozenset(
    "neg abs exp expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tanh erf erfc sigmoid floor "
    "ceil round trunc sign add sub mul div floordiv mod pow minimum maximum bitand bitor bitxor "
    "bitnot fmod".split()
)
"""Functions of operands of one dtype that give that dtype (``div`` is true division, on floats)."""
COMPARE = frozenset("eq ne lt le gt ge same".split())
"""Functions of two operands of one dtype that give a bool; ``same``: equal, or both NaN."""
BOOLEAN = frozenset("and or xor not isnan isinf".split())
"""Functions that give a bool; all but ``isnan`` and ``isinf`` take bools."""
# Beside these: ``where(bool, x, x)`` gives x's dtype, ``cast(x)`` gives the dtype it names.


@final
@dataclass(frozen=True, slots=True)
class Const(Formula):
    """A literal. Floats may be infinite or NaN. Equal literals have the same bits: NaN equals
    itself, and 0.0 is not -0.0."""

    value: float | int | bool
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Const):
            return NotImplemented
        return self.dtype is other.dtype and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash((self._bits(), self.dtype))

    def _bits(self) -> tuple[float | int, float]:
        value = self.value
        return (0, 0.0) if math.isnan(value) else (value, math.copysign(1.0, value))


@dataclass(frozen=True, eq=False, slots=True)
class Inner(Formula):
    """A formula that may have others inside. What walking it found is kept with it, once somebody
    has walked it: formulas never change, and each is asked many times while kernels are formed."""

    inside: "tuple[Expr, ...] | None" = field(init=False, repr=False, compare=False, default=None)
    """The distinct nodes below in the order of ``walk``; set there."""
    reads: "tuple[Load, ...] | None" = field(init=False, repr=False, compare=False, default=None)
    """The distinct loads below in that order; set by ``loads``."""


@final
@dataclass(frozen=True, slots=True)
class Position(Inner):
    """An index as an int64 value."""

    index: Index

    @property
    def dtype(self) -> torch.dtype:
        """Always int64."""
        return torch.int64


@final
@dataclass(frozen=True, slots=True)
class Load(Inner):
    """``buffer[index]``, and zero without reading where ``mask`` is false."""

    buffer: str
    index: Index
    dtype: torch.dtype
    mask: "Expr | None" = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _remember_hash(self, (self.buffer, self.index, self.dtype, self.mask))

    def __hash__(self) -> int:
        return self._hash


@final
@dataclass(frozen=True, slots=True)
class Local(Formula):
    """A value that an earlier definition of the same kernel computed at the same axes."""

    name: str
    dtype: torch.dtype


@final
@dataclass(frozen=True, slots=True)
class Apply(Inner):
    """A scalar function; operands of one dtype (``where``: after its condition)."""

    fn: str
    operands: tuple["Expr", ...]
    dtype: torch.dtype
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _remember_hash(self, (self.fn, self.operands, self.dtype))
        same = self.operands[1:] if self.fn == "where" else self.operands
        dtypes = {operand.dtype for operand in same}
        if len(dtypes) != 1:  # no text unless it is needed: kernels are made of millions of these
            raise VerifyError(f"{self.fn} mixes {dtypes}")
        if self.fn in COMPARE or self.fn in BOOLEAN:
            if self.dtype is not torch.bool:
                raise VerifyError(f"{self.fn} gives bool")
        elif self.fn != "cast":
            if self.fn not in SAME and self.fn != "where":
                raise VerifyError(f"{self.fn} is not a function of the loop IR")
            if dtypes != {self.dtype}:
                raise VerifyError(f"{self.fn} keeps the dtype")

    def __hash__(self) -> int:
        return self._hash


class ReduceKind(enum.StrEnum):
    """``argmax`` and ``argmin`` give the int64 position along their one axis, first one wins.

    NaN wins every max, min, argmax and argmin, as in PyTorch.
    """

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"
    ANY = "any"
    ARGMAX = "argmax"
    ARGMIN = "argmin"


@final
@dataclass(frozen=True, slots=True)
class Reduce(Inner):
    """``body`` combined over every value of ``axes``:  ``sum{k<8} x[8*i + k]``."""

    kind: ReduceKind
    axes: tuple[Axis, ...]
    body: "Expr"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _remember_hash(self, (self.kind, self.axes, self.body))
        require(bool(self.axes), VerifyError, "a reduction needs an axis")

    def __hash__(self) -> int:
        return self._hash

    @property
    def dtype(self) -> torch.dtype:
        """That of the body; int64 where the result is a position."""
        is_position = self.kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
        return torch.int64 if is_position else self.body.dtype


def _remember_hash(node: object, parts: tuple[object, ...]) -> None:
    """Formulas share nodes: a hash taken anew at each use would cost exponential time. Arrays are
    keys of most of what is known of steps."""
    object.__setattr__(node, "_hash", hash(parts))


Expr = Const | Position | Load | Local | Apply | Reduce
"""All kinds of ``Formula``: a seventh must be added here, and then in what matches on them."""


def identity(kind: ReduceKind, dtype: torch.dtype) -> Const:
    """What changes no result of ``kind``: 0 of a sum, the least number of a maximum."""
    if kind in (ReduceKind.SUM, ReduceKind.ANY, ReduceKind.PROD):
        number = float if dtype.is_floating_point else bool if dtype is torch.bool else int
        return Const(number(kind is ReduceKind.PROD), dtype)
    is_largest = kind in (ReduceKind.MAX, ReduceKind.ARGMAX)
    if dtype.is_floating_point:
        return Const(-math.inf if is_largest else math.inf, dtype)
    if dtype is torch.bool:
        return Const(not is_largest, dtype)
    limits = torch.iinfo(dtype)
    return Const(limits.min if is_largest else limits.max, dtype)


def formula_of(value: Value) -> Expr:
    """What computes an index's value. The index algebra stands below and knows no kinds."""
    return cast(Expr, value.formula)


def values_of(index: Index) -> tuple[Expr, ...]:
    """The formulas whose values ``index`` depends on."""
    values = index.values
    return tuple(map(formula_of, values)) if values else ()


@final
@dataclass(frozen=True, slots=True)
class Array:
    """The tensor whose element at ``axes`` is ``body``. Zero-dimensional: no axes."""

    axes: tuple[Axis, ...]
    body: Expr
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _remember_hash(self, (self.axes, self.body))

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the axes."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def dtype(self) -> torch.dtype:
        """That of an element."""
        return self.body.dtype
