"""Numbers that Python makes of the sizes of arguments, given by the arguments of each call.

Whole numbers are formulas of the dims. PyTorch rearranges floats, so what Python made one of is
noted, and computed again as it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import SymBool, SymInt

from treadle.algebra.extents import Size
from treadle.capture.argument_containers import ServedCall
from treadle.capture.input_sources import Dims
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.numbers import Number, Uses
from treadle.capture.symbolic.size_numbers import OF_TRACES, alone, computed
from treadle.compat.unsized import Symbol
from treadle.graph.analysis.dynamic import Symbols
from treadle.util.errors import LoweringError, VerifyError

Operation = tuple[Callable[..., Any], tuple[object, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class SizeOfCall:
    """What ``formula`` is for the arguments of a call. ``places``: for each dim the leaf of the
    arguments and the dim of it."""

    formula: Size
    places: Mapping[str, tuple[int, int]]
    call: ServedCall

    def __call__(self) -> int:
        leaves: list[Any] = self.call.leaves
        sizes = {name: int(leaves[at].shape[dim]) for name, (at, dim) in self.places.items()}
        return self.formula.formula.at(sizes)


@final
class CallSizes:
    """Those of one run. ``dims``: of the leaves of its arguments; ``stand_in``: whether any number
    may be stood in for: else each is taken as it is, for this size alone."""

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
        OF_TRACES[id(symbols.mode.shape_env)] = self

    def note(
        self, result: object, function: Callable[..., Any], operands: tuple[object, ...]
    ) -> None:
        """``function`` of sizes gave ``result``, of which PyTorch's own form may not be exact."""
        self._made[id(result)] = result, (function, operands)

    def number(self, value: Symbol) -> object:
        """What stands in for it; the number itself, for this size alone, where nothing can."""
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
        places = {dim.name: self._places[dim.name] for dim in formula.formula.dims}
        compute = SizeOfCall(formula, places, self._call)
        # the call's, by which decisions are made; the sizes of the trace are other ones
        return Number(compute(), compute, frozenset({key}), self._uses, scales=True)

    def check(self) -> None:
        """``LoweringError`` TR-305 if a number that stands in for a size is in the graph."""
        needed = self._known & self._uses.needed
        if needed:
            names = ", ".join(sorted(self._uses.decisions.labels[key] for key in needed))
            raise LoweringError(f"what runs depends on the number of {names}", code="TR-305")
