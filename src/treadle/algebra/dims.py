"""Dims of dynamic shapes: those of a call's arguments, and those that Python computes from them.

::

    k = int(0.7 * len(x)); x[:k]        dim k, which is int(0.7 * n) for each size n of a call
"""

import builtins
import hashlib
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

Sizes = Mapping[str, int]
Bounds = tuple[int, int]

_MOST = 1 << 16
"""Sizes for which a dim is computed to know its bounds. A function of larger ranges is refused."""
_LARGEST = 1 << 53
"""Up to this every integer is a float64."""


@final
@dataclass(frozen=True, slots=True)
class SizeExpression:
    """``function`` of what the operands are for the sizes of a call, as Python computes it: with
    its own rounding of floats. ``function``: its name in ``FUNCTIONS``."""

    function: str
    operands: "tuple[SizeExpression | Dim | int | float, ...]"

    def at(self, sizes: Sizes) -> Any:
        """Its value for these sizes."""
        return FUNCTIONS[self.function](*(_at(operand, sizes) for operand in self.operands))

    @property
    def text(self) -> str:
        """As one would write it."""
        inside = ", ".join(_text(operand) for operand in self.operands)
        return f"{self.function.rpartition('.')[2]}({inside})"

    @property
    def roots(self) -> "frozenset[Dim]":
        """The dims of arguments that it is computed of."""
        parts = (e.roots for e in self.operands if isinstance(e, SizeExpression | Dim))
        return frozenset[Dim]().union(*parts)

    @property
    def sample(self) -> Any:
        """Of the samples."""
        return self.at({dim.name: dim.sample for dim in self.roots})

    def over(self, dims: "Mapping[str, Dim]") -> "SizeExpression":
        """The same of other dims, by name."""
        return SizeExpression(self.function, tuple(_over(each, dims) for each in self.operands))

    def dim(self) -> "Dim | None":
        """It as a dim; ``None`` if it is not a size for some sizes of its dims, or unknown."""
        every = sizes_of(self.roots, _MOST)
        if every is None:
            return None
        values: list[int] = []
        try:
            for sizes in every:
                value = self.at(sizes)
                if not isinstance(value, int) or not 0 <= value < _LARGEST:
                    return None
                values.append(value)
        except (ArithmeticError, ValueError, TypeError):
            return None
        sample, names = self.sample, sorted(dim.name for dim in self.roots)
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        words = re.findall(r"\w+", self.function.rpartition(".")[2])
        name = "_".join([*words, *names, digest])
        return Dim(name, min(values), max(values), sample, self)


@final
@dataclass(frozen=True, slots=True, order=True)
class Dim:
    """A named size with ``low <= value <= high``; ``sample`` is one value of it. ``of``: what it is
    computed of, where no argument has it."""

    name: str
    low: int
    high: int
    sample: int
    of: SizeExpression | None = field(default=None, compare=False)  # the name says it

    @property
    def text(self) -> str:
        """As generated code names it."""
        return f"S_{self.name}"

    def at(self, sizes: Sizes) -> int:
        """Its size for ``sizes``, which are at least those of its roots."""
        known = sizes.get(self.name)
        if known is None and self.of is not None:
            return int(self.of.at(sizes))
        return sizes[self.name] if known is None else known

    @property
    def dims(self) -> "frozenset[Dim]":
        """Itself alone."""
        return frozenset((self,))

    @property
    def roots(self) -> "frozenset[Dim]":
        """The dims of arguments that decide it."""
        return frozenset((self,)) if self.of is None else self.of.roots

    @property
    def bounds(self) -> Bounds:
        """Inclusive."""
        return self.low, self.high


Operand = SizeExpression | Dim | int | float


def sizes_of(dims: Iterable[Dim], most: int) -> Iterator[Sizes] | None:
    """All that dims of arguments may be together; ``None`` where these are more than ``most``."""
    named = {dim.name: range(dim.low, dim.high + 1) for dim in dims}
    if math.prod(map(len, named.values())) > most:
        return None
    return (dict(zip(named, sizes, strict=True)) for sizes in itertools.product(*named.values()))


def _at(operand: Operand, sizes: Sizes) -> int | float:
    return operand.at(sizes) if isinstance(operand, SizeExpression | Dim) else operand


def _over(operand: Operand, dims: "Mapping[str, Dim]") -> Operand:
    if isinstance(operand, SizeExpression):
        return operand.over(dims)
    if not isinstance(operand, Dim):
        return operand
    known = dims.get(operand.name, operand)
    if known is not operand or operand.of is None:
        return known
    return operand.of.over(dims).dim() or operand


def _text(operand: Operand) -> str:
    if isinstance(operand, SizeExpression | Dim):
        return operand.text
    return repr(operand)


def to_data(operand: Operand) -> object:
    """As JSON has it."""
    match operand:
        case SizeExpression(function, operands):
            return ["=", function, *map(to_data, operands)]
        case Dim(name, low, high, sample, of):
            return [name, low, high, sample] + ([] if of is None else [to_data(of)])
        case _:
            return operand


def from_data(data: Any) -> Any:
    """The inverse."""
    match data:
        case ["=", function, *operands]:
            return SizeExpression(str(function), tuple(map(from_data, operands)))
        case [name, low, high, sample, *of]:
            source = from_data(of[0]) if of else None
            return Dim(str(name), int(low), int(high), int(sample), source)
        case _:
            return data


def _functions() -> Mapping[str, Callable[..., Any]]:
    """Python's functions of numbers that a size may be computed with, by their names."""
    own: Sequence[Any] = (int, float, round, abs, pow, min, max)
    known: dict[str, Callable[..., Any]] = {f"{builtins.__name__}.{e.__name__}": e for e in own}
    for module in (math, operator):
        for name, function in vars(module).items():
            if callable(function) and not name.startswith("_"):
                known.setdefault(f"{module.__name__}.{name}", function)
    for name, function in vars(np).items():
        if isinstance(function, np.ufunc) and function.nout == 1:
            known.setdefault(f"numpy.{name}", function)
    return known


FUNCTIONS = _functions()
_NAMES = {id(function): name for name, function in reversed(list(FUNCTIONS.items()))}


def name_of(function: Callable[..., Any]) -> str | None:
    """That of a function a size may be computed with; ``None`` for any other."""
    return _NAMES.get(id(function))
