"""Dynamic sizes in a step's text, and reading them back.

::

    line     =  "dim" dim "in" low ".." high "," "sample" number
    size     =  product ("+" product)*
    product  =  factor ("*" factor)*
    factor   =  number | dim | "(" size [("/" | "%") size] ")"

    dim S_time in 2..700, sample 13
    x: f32[4, S_time, 8]  # batch
    view: f32[(4 * S_time), 8] = view(x, [(4 * S_time), 8])
"""

import re
from collections.abc import Iterable
from contextlib import suppress

from treadle.algebra.extents import Size, as_int, dims_in, formula_of, largest, least
from treadle.algebra.polynomial import Polynomial, Quotient, Remainder
from treadle.util.errors import VerifyError
from treadle.util.scanner import Scanner

_LINE = re.compile(r"dim\s+S_(\w+)\s+in\s+(\d+)\s*\.\.\s*(\d+),\s+sample\s+(\d+)")
_DIM = re.compile(r"S_\w+")


def dim_lines(sizes: Iterable[int]) -> list[str]:
    """Of each dim that changes any of ``sizes``."""
    dims = [dim for size in dims_in(sizes) for dim in size.formula.dims]
    return [f"dim {dim.text} in {dim.low}..{dim.high}, sample {dim.sample}" for dim in dims]


class SizeReader:
    """Reads dims and sizes where ``scanner`` stands. ``dims``: by their texts."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.dims: dict[str, Size] = {}

    def line(self) -> bool:
        """Go past the line of a dim, if that is the next piece."""
        at = self.scanner.place()
        matched = self.scanner.match(_LINE)
        parts = None if matched is None else _LINE.fullmatch(matched)
        if parts is None:
            return False
        low, high, sample = map(int, parts.groups()[1:])
        if not low <= sample <= high:
            raise self.scanner.error(f"{sample} is not in {low}..{high}", at)
        dim = Size.dim(parts[1], low, high, sample)
        self.dims[str(dim)] = dim
        return True

    def size(self) -> int | None:
        """Go past a size of dims, if that is the next piece."""
        at = self.scanner.place()
        if self.dims and (self.scanner.sees("(") or _DIM.match(self.scanner.text, at)):
            with suppress(VerifyError, ZeroDivisionError):  # of divisions that no size has
                formula = self._factor()
                if formula is not None and least(as_int(formula)) <= largest(as_int(formula)):
                    return as_int(formula)
            self.scanner.at = at
        return None

    def _sum(self) -> Polynomial | None:
        total = self._product()
        while total is not None and self.scanner.take("+"):
            more = self._product()
            total = None if more is None else total.plus(more)
        return total

    def _product(self) -> Polynomial | None:
        result = self._factor()
        while result is not None and self.scanner.take("*"):
            factor = self._factor()
            result = None if factor is None else result.times(factor)
        return result

    def _factor(self) -> Polynomial | None:
        if self.scanner.take("("):
            return self._enclosed()
        name = self.scanner.match(_DIM)
        if name is not None:
            return formula_of(self.dims[name]) if name in self.dims else None
        number = self.scanner.number()
        return formula_of(number) if isinstance(number, int) else None

    def _enclosed(self) -> Polynomial | None:
        inside = self._sum()
        for sign, kind in (("/", Quotient), ("%", Remainder)):
            if inside is not None and self.scanner.take(sign):
                under = self._sum()
                inside = None if under is None else Polynomial((((kind(inside, under),), 1),))
        return inside if self.scanner.take(")") else None
