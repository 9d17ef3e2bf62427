"""Formulas from their text: ``parse_array(exact_array(array))`` is ``array`` up to its axes.

::

    array    =  ["dim" name low ".." high "sample" number]*  ["axes" name "<" size, ...]
                "[" name, ... "]" "->" dtype   ("$" number "=" bare)*   bare
    bare     =  kind "{" name, ... "}" operand  |  operand [infix operand]
    operand  =  "(" bare ")"  |  number ":" dtype  |  "<" index ">"  |  "$" number
             |  buffer "[" index ["if" bare] "]" ":" dtype  |  "%" name ":" dtype
             |  function "(" bare, ... ")"                     a dtype is a function: a cast
    index    =  ["-"] term  (("+" | "-") term)*
    term     =  size ["*" atom]  |  atom
    atom     =  axis  |  "(" index ")"  |  "(" index ("//" | "%") size ")"
             |  "value" "(" bare "," size "," size ")"
    size     =  number  |  "{" formula of dims "}"

Axes are made in the order in which they are named, so that they sort as they did. Indices are
simplified as they are made, as all are.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from loop.exact_text import exact_array
from treadle.algebra.dims import Dim
from treadle.algebra.extents import Size
from treadle.algebra.index import Axis, Index
from treadle.algebra.polynomial import Polynomial
from treadle.loop.expr import (
    BOOLEAN,
    COMPARE,
    Apply,
    Array,
    Const,
    Expr,
    Load,
    Local,
    Position,
    Reduce,
    ReduceKind,
)
from treadle.loop.printing import INFIX, dtype_name
from treadle.loop.traverse import HashConsing, map_expr, value_index
from treadle.util.errors import VerifyError
from treadle.util.scanner import Scanner

T = TypeVar("T")
_REMEDY = "give the text of exact_array(array)"
NAME = re.compile(r"[^\W\d]\w*(?:\.\w+)*")
_CONST = re.compile(r"-?(?:inf|nan|True|False|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?):(?=\w)")
_SHARED = re.compile(r"\$\d+")
_LOCAL = re.compile(r"[^\s:]+")
_DTYPES = {dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_FUNCTIONS = {symbol: fn for fn, symbol in INFIX.items()}
_SYMBOLS = sorted(_FUNCTIONS, key=len, reverse=True)  # "<=" before "<"
_KINDS = {str(each): each for each in ReduceKind}


def parse_array(text: str) -> Array:
    """The array that ``text`` shows; ``ParseError`` TR-007 names the line and the column."""
    scanner = Scanner(text.strip("\n"), _REMEDY)
    found = FormulaReader(scanner).array()
    scanner.next_line()
    if not scanner.at_end():
        raise scanner.error("the text should end here")
    return found


def same_array(left: Array, right: Array) -> bool:
    """Whether two arrays are one formula, up to which axes they have and how they share nodes.

    Axes correspond by age.
    """
    return _canonical(left) == _canonical(right)


def _canonical(array: Array) -> str:
    return exact_array(Array(array.axes, map_expr(array.body, HashConsing().node)))


class FormulaReader:
    """Reads arrays and formulas where ``scanner`` stands."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.sizes = SizeReader(scanner)
        self._axes: dict[str, Axis] = {}
        self._shared: dict[str, Expr] = {}

    def array(self) -> Array:
        """The lines of an array; the scanner then stands at the end of the last."""
        self.dims_and_axes()
        self.scanner.need("[")
        axes = tuple(self.scanner.several("]", self.axis))
        self.scanner.need("->")
        dtype = self.dtype()
        self.scanner.next_line()
        at = self.scanner.place()
        body = self.lines()
        if body.dtype is not dtype:
            raise self.scanner.error(f"the formula is {dtype_name(body.dtype)}", at)
        return Array(axes, body)

    def dims_and_axes(self) -> None:
        """The lines before an array or a kernel, if any."""
        self._axes = {}
        while self.scanner.take("dim"):
            self.sizes.define()
            self.scanner.next_line()
        if self.scanner.take("axes"):
            self._define_axes()
            self.scanner.next_line()

    def lines(self) -> Expr:
        """Shared nodes, a line each, and the formula; the scanner stands at the end of its line."""
        self._shared = {}
        while True:
            at = self.scanner.place()
            name = self.scanner.match(_SHARED)
            if name is None or not self.scanner.take("="):
                self.scanner.at = at
                return self.bare()
            if self.scanner.sees("="):  # ``$0 == x``
                self.scanner.at = at
                return self.bare()
            self._shared[name] = self.bare()
            self.scanner.next_line()

    def _define_axes(self) -> None:
        while True:
            at = self.scanner.place()
            name = self.scanner.word()
            if name in self._axes:
                raise self.scanner.error(f"the axis {name!r} is defined twice", at)
            self.scanner.need("<")
            extent = self.sizes.size()
            self._axes[name] = self._checked(at, lambda extent=extent: Axis(extent))
            if not self.scanner.take(","):
                return

    # formulas

    def bare(self) -> Expr:
        """A formula without parentheses around it."""
        at = self.scanner.place()
        kind = self.scanner.match(NAME)
        if kind in _KINDS and self.scanner.take("{"):
            axes = tuple(self.scanner.several("}", self.axis))
            body = self._operand()
            return self._checked(at, lambda: Reduce(_KINDS[kind], axes, body))
        self.scanner.at = at
        left = self._operand()
        symbol = next((each for each in _SYMBOLS if self.scanner.take(each)), None)
        if symbol is None:
            return left
        return self._apply(_FUNCTIONS[symbol], (left, self._operand()), at)

    def _operand(self) -> Expr:
        at = self.scanner.place()
        if self.scanner.take("("):
            inside = self.bare()
            self.scanner.need(")")
            return inside
        if self.scanner.take("<"):
            index = self.index()
            self.scanner.need(">")
            return Position(index)
        if self.scanner.take("%"):
            return self.local()
        shared = self.scanner.match(_SHARED)
        if shared is not None:
            if shared not in self._shared:
                raise self.scanner.error(f"there is no {shared} here", at)
            return self._shared[shared]
        const = self.scanner.match(_CONST)
        if const is not None:
            return Const(_number(const[:-1]), self.dtype())
        return self._named(at)

    def local(self) -> Local:
        """``name:f32``, after its ``%``."""
        name = self.scanner.word(_LOCAL, "a name")
        self.scanner.need(":")
        return Local(name, self.dtype())

    def _named(self, at: int) -> Expr:
        """A load or a function."""
        quoted = self.scanner.quoted()
        name = self.scanner.word(NAME, "a formula") if quoted is None else quoted
        if self.scanner.take("["):
            return self._load(name)
        if quoted is not None or not self.scanner.take("("):
            raise self.scanner.error(f"{name!r} is no formula", at)
        operands = tuple(self.scanner.several(")", self.bare))
        if name in _DTYPES:
            return self._checked(at, lambda: Apply("cast", operands, _DTYPES[name]))
        return self._apply(name, operands, at)

    def _load(self, buffer: str) -> Load:
        index = self.index()
        mask = self.bare() if self.scanner.take("if") else None
        self.scanner.need("]")
        self.scanner.need(":")
        return Load(buffer, index, self.dtype(), mask)

    def _apply(self, fn: str, operands: tuple[Expr, ...], at: int) -> Expr:
        if not operands:
            raise self.scanner.error(f"{fn} has no operands", at)
        dtype = torch.bool if fn in COMPARE or fn in BOOLEAN else operands[-1].dtype
        return self._checked(at, lambda: Apply(fn, operands, dtype))

    def _checked(self, at: int, make: Callable[[], T]) -> T:
        """What ``make`` gives; what it refuses stands at ``at``."""
        try:
            return make()
        except VerifyError as error:
            raise self.scanner.error(error.message, at) from error

    def dtype(self) -> torch.dtype:
        """``f32``."""
        at = self.scanner.place()
        word = self.scanner.word(NAME, "a dtype")
        if word not in _DTYPES:
            raise self.scanner.error(f"there is no dtype {word!r}", at)
        return _DTYPES[word]

    # indices

    def axis(self) -> Axis:
        """An axis by its name."""
        at = self.scanner.place()
        name = self.scanner.word()
        if name not in self._axes:
            raise self.scanner.error(f"there is no axis {name!r}", at)
        return self._axes[name]

    def index(self) -> Index:
        """``8*i + (j//4) - 2``."""
        total = Index.of(0)
        sign = -1 if self.scanner.take("-") else 1
        while True:
            total = total + self._term() * sign
            if self.scanner.take("+"):
                sign = 1
            elif self.scanner.take("-"):
                sign = -1
            else:
                return total

    def _term(self) -> Index:
        if not self.sizes.begins():
            return self._atom()
        size = self.sizes.size()
        return self._atom() * size if self.scanner.take("*") else Index.of(size)

    def _atom(self) -> Index:
        at = self.scanner.place()
        if self.scanner.take("("):
            return self._divided(at)
        word = self.scanner.word(what="an axis")
        if word == "value" and self.scanner.take("("):
            return self._value(at)
        self.scanner.at = at
        return Index.of(self.axis())

    def _divided(self, at: int) -> Index:
        index = self.index()
        if self.scanner.take("//"):
            n = self.sizes.size()
            index = self._checked(at, lambda inner=index: inner // n)
        elif self.scanner.take("%"):
            n = self.sizes.size()
            index = self._checked(at, lambda inner=index: inner % n)
        self.scanner.need(")")
        return index

    def _value(self, at: int) -> Index:
        formula = self.bare()
        self.scanner.need(",")
        low = self.sizes.size()
        self.scanner.need(",")
        high = self.sizes.size()
        self.scanner.need(")")
        return self._checked(at, lambda: value_index(formula, low, high))


class SizeReader:
    """Reads sizes where ``scanner`` stands: numbers, and formulas of the dims that were defined."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self._dims: dict[str, Size] = {}

    def define(self) -> None:
        """``B 2..64 sample 6``."""
        name = self.scanner.word()
        low = self.scanner.integer()
        self.scanner.need("..")
        high = self.scanner.integer()
        self.scanner.need("sample")
        dim = Dim(name, low, high, self.scanner.integer())
        self._dims[dim.text] = Size(Polynomial((((dim,), 1),)))

    def begins(self) -> bool:
        """Whether a size stands here."""
        at = self.scanner.place()
        return self.scanner.text[at : at + 1].isdecimal() or self.scanner.sees("{")

    def size(self) -> int:
        """``4``, or ``{2 * S_B}``."""
        if not self.scanner.take("{"):
            return self.scanner.integer()
        found = self._sum()
        self.scanner.need("}")
        return found

    def _sum(self) -> int:
        total = self._product()
        while True:
            if self.scanner.take("+"):
                total = total + self._product()
            elif self.scanner.take("-"):
                total = total - self._product()
            else:
                return total

    def _product(self) -> int:
        total = self._factor()
        while True:
            if self.scanner.take("*"):
                total = total * self._factor()
            elif self.scanner.take("/"):
                total = total // self._factor()
            elif self.scanner.take("%"):
                total = total % self._factor()
            else:
                return total

    def _factor(self) -> int:
        at = self.scanner.place()
        if self.scanner.take("("):
            found = self._sum()
            self.scanner.need(")")
            return found
        number = self.scanner.number()
        if isinstance(number, int):
            return number
        name = self.scanner.word(what="a dim")
        if name not in self._dims:
            raise self.scanner.error(f"there is no dim {name!r}", at)
        return self._dims[name]


def _number(text: str) -> float | int | bool:
    words: Mapping[str, bool] = {"True": True, "False": False}
    if text in words:
        return words[text]
    return int(text) if text.lstrip("-").isdecimal() else float(text)


__all__ = ["NAME", "FormulaReader", "SizeReader", "parse_array", "same_array"]
