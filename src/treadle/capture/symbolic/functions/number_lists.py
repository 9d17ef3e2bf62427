"""Numbers that are in a list of the user's when a call begins, however many there are.

::

    losses.append(loss.item())
    sum(losses)                 what was there is one number of the call: its sum
    statistics.median(losses)   the function needs all of them: an operand that is a tuple
"""

import math
import operator
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, final

import numpy as np

from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.computations import Key
from treadle.capture.symbolic.numbers import STAND_INS, Number, Uses, is_number

_OF_STATISTICS = (
    "fmean", "geometric_mean", "harmonic_mean", "mean", "median", "median_high", "median_low",
    "pstdev", "pvariance", "stdev", "variance",
)  # fmt: skip
_OF_NUMPY = (
    "average", "max", "mean", "median", "min", "nanmax", "nanmean", "nanmin", "nansum",
    "percentile", "prod", "ptp", "quantile", "std", "sum", "var",
)  # fmt: skip
_MODULES: Mapping[ModuleType, Sequence[str]] = {
    math: ("fsum", "prod"),
    statistics: _OF_STATISTICS,
    np: _OF_NUMPY,
}
NEEDS_ALL: Mapping[Callable[..., object], tuple[str, str]] = {
    getattr(module, name): (module.__name__, name)
    for module, names in _MODULES.items()
    for name in names
}
"""What gives one number of a list of them and needs them all; its module and its name there."""
_REAL = frozenset({int, float})
_MOST = 1 << 8
"""Entries of which each may be a number of its own: each is looked up at every call."""


@final
class NumberList:
    """The numbers that ``compute()`` returns at a call, as an operand of functions of all of them.
    ``name``: the list that they are a part of, and which part; ``note`` is called with the
    computation of each of their numbers and its description."""

    __slots__ = ("_name", "_note", "_uses", "compute", "label", "roots", "value")

    def __init__(
        self,
        compute: Callable[[], tuple[Any, ...]],
        name: Key,
        label: str,
        uses: Uses,
        note: Callable[[Key, Callable[[], object], str], None],
    ) -> None:
        self.value, self.compute, self.label = compute(), compute, label
        self._name, self._uses, self._note = name, uses, note
        root: Key = "all", name
        self.roots = frozenset({root})
        note(root, compute, label)

    @property
    def uses(self) -> Uses:
        """The record of the uses of its numbers."""
        return self._uses

    @property
    def key(self) -> int:
        """Equal for the same part of the same list."""
        return self._uses.decisions.key_of("all", self._name)

    def plain(self) -> tuple[Any, ...]:
        """The numbers, on which the graph depends from now on."""
        if not self._uses.ours:
            self._uses.needed |= self.roots
        return self.value

    def are_of(self, kinds: frozenset[type], least: int) -> bool:
        """Whether all numbers have these types, and there are at least so many; a decision."""
        asked = _AreOf(kinds, least)
        key = self._uses.decisions.key_of(asked, self.key)
        outcome = asked(self.value)
        if not self._uses.ours:
            compute = _Decided(asked, self.compute)
            self._uses.decisions.add(key, compute, outcome, self.roots)
        return outcome

    def are_numbers(self, put: Sequence[object]) -> bool:
        """Whether all are, and those behind them."""
        return all(is_real(e) for e in self.value) and all(is_number(e) or is_real(e) for e in put)

    def each(self) -> list[Number] | None:
        """One stand-in for each number; their count is then a decision. ``None`` if there are too
        many."""
        if len(self.value) > _MOST:
            return None
        count: Any = self.count()
        count.decided(operator.eq, (count, len(self.value)))
        return [self._entry(at) for at in range(len(self.value))]

    def _entry(self, at: int) -> Number:
        number = self._number(_Entry(self.compute, at), "entry", at, label=f"{self.label}[{at}]")
        number.decided(IsOf(type(number.value)), (number,))
        return number

    def are_none(self) -> bool:
        """Whether there are no numbers; a decision."""
        count = self.count()
        return bool(count.decided(operator.not_, (count,)))

    def count(self) -> Number:
        """The count of the numbers."""
        return self._number(_Count(self.compute), "len")

    def reduced(self, function: Callable[..., Any], put: frozenset[type]) -> Number | None:
        """``sum``, ``min`` or ``max`` of them; ``None`` where that is no number. ``put``: the types
        of those that come behind them."""
        reduction = _Reduction(self.compute, function, put)
        if reduction() is None:
            return None
        number = self._number(reduction, function.__name__, put)
        number.decided(IsOf(type(number.value)), (number,))
        return number

    def _number(
        self, compute: Callable[[], Any], name: str, *rest: Key, label: str | None = None
    ) -> Number:
        root: Key = name, self._name, *rest
        self._note(root, compute, f"{name}({self.label})" if label is None else label)
        return Number(compute(), compute, frozenset({root}), self._uses, scales=True)


STAND_INS.add(NumberList)


@final
@dataclass(frozen=True, slots=True)
class _AreOf:
    """Whether numbers are of some types, at least so many."""

    kinds: frozenset[type]
    least: int

    def __call__(self, values: tuple[object, ...]) -> bool:
        return len(values) >= self.least and {*map(type, values)} <= self.kinds


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    """What is asked of them at a call."""

    asked: Callable[[tuple[object, ...]], bool]
    compute: Callable[[], tuple[object, ...]]

    def __call__(self) -> bool:
        return self.asked(self.compute())


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One of them at a call; ``None`` where there are fewer."""

    compute: Callable[[], tuple[object, ...]]
    at: int

    def __call__(self) -> object:
        entries = self.compute()
        return entries[self.at] if self.at < len(entries) else None


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Count:
    """How many there are at a call."""

    compute: Callable[[], tuple[object, ...]]

    def __call__(self) -> int:
        return len(self.compute())


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Reduction:
    """What a function gives of them at a call; ``None`` where they are no numbers, or of several
    types of which the result has one. ``put``: the types of what comes behind them. A sum is a
    float if one of these is, also the sum of no entries."""

    compute: Callable[[], tuple[Any, ...]]
    function: Callable[..., Any]
    put: frozenset[type]

    def __call__(self) -> int | float | None:
        entries = self.compute()
        kinds = {*map(type, entries), *self.put}
        if not kinds <= _REAL or (self.function is not sum and len(kinds) != 1):
            return None
        if self.function is sum:
            return float(sum(entries)) if float in self.put else sum(entries)
        return self.function(entries) if entries else None


@final
@dataclass(frozen=True, slots=True)
class IsOf:
    """Whether a value is of a type."""

    kind: type

    def __call__(self, value: object) -> bool:
        return type(value) is self.kind


_LIBRARY = (statistics.__file__, f"{Path(np.__file__).parent}{os.sep}")


def caller_of_library(frame: FrameType) -> FrameType:
    """The frame whose code calls a function of ``statistics`` or NumPy, in which ``frame`` runs;
    itself where it runs in none."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_LIBRARY):
        outer = outer.f_back
    return outer or frame
