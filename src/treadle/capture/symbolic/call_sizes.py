"""Numbers that Python computes from sizes of arguments, determined by the arguments of each call.

Integers are formulas of the dims. PyTorch rearranges float expressions, so Python's computation of
a float is recorded and repeated exactly.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import SymBool, SymInt

from treadle.algebra.dims import Operand, SizeExpression, name_of
from treadle.algebra.extents import Size, formula_of
from treadle.algebra.polynomial import computed as computed_of
from treadle.capture.argument_containers import ServedCall
from treadle.capture.input_sources import Dims
from treadle.capture.python_state.plain_values import is_whole
from treadle.capture.stored.names import NOT_STORED
from treadle.capture.symbolic.computations import Computation, Key
from treadle.capture.symbolic.numbers import Number, Uses, constant_of
from treadle.capture.symbolic.size_numbers import OF_TRACES, alone, computed
from treadle.compat.tracing import track_size
from treadle.compat.unsized import Symbol
from treadle.graph.analysis.dynamic import Symbols
from treadle.util.errors import LoweringError, VerifyError

_MOST_PARTS = 1 << 8
"""The most parts in the computation of a size: a number accumulated over many calls is not a
size."""
_WHOLE: Mapping[Callable[..., object], Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.neg: operator.neg,
    int: lambda whole: whole,
}
"""Functions of integers that formulas can express."""
Operation = tuple[Callable[..., Any], tuple[object, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class SizeOfCall:
    """The value of ``formula`` for the arguments of a call. ``places``: for each symbolic dim the
    leaf of the arguments and its dim."""

    formula: Size
    places: Mapping[str, tuple[int, int]]
    call: ServedCall
    symbol: SymInt | None = field(default=None, metadata=NOT_STORED)  # while a trace runs

    def __call__(self) -> int:
        leaves: list[Any] = self.call.leaves
        sizes = {name: int(leaves[at].shape[dim]) for name, (at, dim) in self.places.items()}
        return self.formula.formula.at(sizes)


@final
class CallSizes:
    """The sizes of one run. ``dims``: those of the leaves of its arguments; ``stand_in``: whether
    numbers may have stand-ins; otherwise each is used as it is, for this size only."""

    def __init__(
        self, dims: Dims, symbols: Symbols, call: ServedCall, uses: Uses, *, stand_in: bool
    ) -> None:
        self._symbols, self._call, self._uses, self._stand_in = symbols, call, uses, stand_in
        self._places = {
            dim.name: (at, place)
            for at, leaf in dims.items()
            for place, size in enumerate(leaf.shape)
            if isinstance(size, Size)
            for dim in size.formula.dims
        }
        self.lines: list[str] = []  # the user's, that needed a number
        self._known: set[Key] = set()
        self._made: dict[int, tuple[object, Operation]] = {}  # by the id of what it gave
        self._symbols_of: dict[int, SymInt | None] = {}  # by the keys of numbers
        OF_TRACES[id(symbols.mode.shape_env)] = self

    def note(
        self, result: object, function: Callable[..., Any], operands: tuple[object, ...]
    ) -> None:
        """Note that ``function`` of sizes gave ``result``, for which PyTorch's own form may not be
        exact."""
        self._made[id(result)] = result, (function, operands)

    def number(self, value: Symbol) -> object:
        """The stand-in for a number; without one the number itself, for this size only."""
        if not self._stand_in:
            return alone(value)
        made = None if isinstance(value, SymBool) else self._made.get(id(value))
        known = self._of_formula(value) if isinstance(value, SymInt) else None
        if known is not None:
            return known
        return alone(value) if made is None else computed(*made[1])

    def _of_formula(self, value: SymInt) -> Number | int | None:
        try:
            formula = self._symbols.size(value)
        except (LoweringError, VerifyError):
            return None
        if not isinstance(formula, Size):
            return formula
        key: Key = ("size", formula.formula)
        self._known.add(key)
        self._uses.decisions.labels[key] = f"size {formula.formula.text}"
        places = {dim.name: self._places[dim.name] for dim in formula.formula.roots}
        compute = SizeOfCall(formula, places, self._call, value)
        # the call's, by which decisions are made; the sizes of the trace are other ones
        return Number(compute(), compute, frozenset({key}), self._uses, scales=True)

    def symbol(self, number: Number) -> SymInt | None:
        """An integer that is computed from sizes only, as a size; ``None`` for any other."""
        if not self._stand_in or not is_whole(number.value) or not number.roots <= self._known:
            return None
        if number.key not in self._symbols_of:
            self._symbols_of[number.key] = self._symbol(number.compute)
        return self._symbols_of[number.key]

    def _symbol(self, compute: Callable[[], object]) -> SymInt | None:
        known: dict[int, Operand | SymInt | None] = {}
        made = [compute]
        for part in made:  # what others are computed of comes behind them
            made += part.parts if isinstance(part, Computation) else ()
            if len(made) > _MOST_PARTS:
                return None
        for part in reversed(made):
            known[id(part)] = self._operand(part, known)
        result = known[id(compute)]
        return result if isinstance(result, SymInt) else None

    def _operand(
        self, part: Callable[[], object], known: Mapping[int, "Operand | SymInt | None"]
    ) -> "Operand | SymInt | None":
        """A part of a computation: a symbol, or something from which a symbol can be made."""
        if isinstance(part, SizeOfCall):
            return part.symbol
        if isinstance(part, Computation):
            return self._applied(part.function, [known[id(each)] for each in part.parts])
        value: Any = constant_of(part)
        return value if type(value) in (int, float) else None

    def _applied(
        self, function: Callable[..., object], operands: Sequence["Operand | SymInt | None"]
    ) -> "Operand | SymInt | None":
        whole = all(isinstance(operand, int | SymInt) for operand in operands)
        if whole and function in _WHOLE:
            return _WHOLE[function](*operands)
        parts = [self._plain(operand) for operand in operands]
        name = name_of(function)
        known = [part for part in parts if part is not None]
        if name is None or len(known) < len(parts):
            return None
        result = SizeExpression(name, tuple(known))
        size = self._tracked(result) if isinstance(result.sample, int) else None
        return result if size is None else size

    def _plain(self, operand: "Operand | SymInt | None") -> Operand | None:
        if not isinstance(operand, SymInt):
            return operand
        try:
            return computed_of(formula_of(self._symbols.size(operand)))
        except (LoweringError, VerifyError):
            return None

    def _tracked(self, function: SizeExpression) -> SymInt | None:
        number = self._symbols.computed(function)
        return None if number is None else track_size(number)

    def check(self) -> None:
        """``LoweringError`` TR-305 if a number that stands in for a size is in the graph."""
        needed = self._known & self._uses.needed
        if needed:
            names = ", ".join(sorted(self._uses.decisions.labels[key] for key in needed))
            raise LoweringError(f"what runs depends on the number of {names}", code="TR-305")
