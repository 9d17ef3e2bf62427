"""Bytes with units, as users write and read them, and budgets of bytes."""

import math
import re
from dataclasses import dataclass
from typing import final

from treadle.util.errors import PlanError

FRONTIER_POINTS = 6
"""Budgets that a frontier tries unless told otherwise: enough to see its shape; each may take
several schedules."""

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MEMORY = "memory"
_NAMES = "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
_NUMBER = re.compile(r"\s*(\d*\.?\d+(?:[eE]\d+)?)\s*(%?)\s*")
_RATIO = "from 0.0, the smallest plan, to 1.0, the fastest"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str | int, option: str = _MEMORY) -> int:
    """``"12GiB"`` -> 12884901888. An integer is bytes already; ``PlanError`` TR-201 otherwise, with
    the name of the ``option``."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        unit = f'write a number and a unit ({_NAMES}), such as "12GiB"; or bytes as an int'
        raise PlanError(
            f"{option}={text!r} is not a size in bytes",
            code="TR-201",
            remedy=(_meant(text) if option == _MEMORY else "") or unit,
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _meant(text: object) -> str:
    """What to write in the place of a budget that is not a size; empty if nobody can tell."""
    number = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if number is not None and number[2] == "%" and 0 <= float(number[1]) <= 100:
        ratio = float(number[1]) / 100
        return f"write a ratio as a float, memory={ratio:g}; {_RATIO}"
    if number is not None and not number[2] and "." in number[1] and float(number[1]) <= 1:
        return f"write a ratio as a float, memory={float(number[1])}; {_RATIO}"
    if number is not None and not number[2] and float(number[1]) >= 1:
        return f"write bytes as an int, memory={int(float(number[1]))}, or give the text a unit"
    return ""


def at_least(count: int) -> str:
    """A text of a size that ``parse_bytes`` reads as ``count`` bytes or little more."""
    for unit in ("GiB", "MiB", "KiB"):
        size = _UNITS[unit.upper()]
        if count >= size:
            return f"{math.ceil(count * 100 / size) / 100:g}{unit}"
    return f"{count}B"


def milliseconds(seconds: float) -> str:
    """``0.00153`` -> ``"1.530 ms"``; ``"< 0.001 ms"`` below a microsecond."""
    return f"{1e3 * seconds:.3f} ms" if seconds >= 1e-6 or not seconds else "< 0.001 ms"


def format_bytes(count: float) -> str:
    """1610612736 -> ``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may take at its peak: so many bytes, or a ratio from 0.0, the peak of the
    smallest plan, to 1.0, that of the fastest."""

    limit: int | float

    @staticmethod
    def of(memory: str | int | float) -> "Budget":
        """As users write it; ``PlanError`` TR-201 for what is neither a size nor a ratio."""
        if type(memory) is int and memory in (0, 1):
            raise PlanError(
                f"memory={memory} is a number of bytes, and no step needs so few",
                code="TR-201",
                remedy=f"write a ratio as a float, memory={float(memory)}; {_RATIO}",
            )
        if not isinstance(memory, float):
            return Budget(parse_bytes(memory))
        if not 0.0 <= memory <= 1.0:
            raise PlanError(
                f"memory={memory!r} is a ratio outside 0.0 .. 1.0",
                code="TR-201",
                remedy=f"a ratio goes {_RATIO}; bytes are an int, or a text with a unit such as "
                '"12GiB"',
            )
        return Budget(memory)

    @property
    def nbytes(self) -> int | None:
        """The bytes; ``None`` for a ratio, which says nothing of them without plans."""
        return None if isinstance(self.limit, float) else self.limit

    def between(self, smallest: int, fastest: int) -> int:
        """In bytes, where plans reach from a peak of ``smallest`` to one of ``fastest``."""
        if isinstance(self.limit, float):
            return round(smallest + self.limit * (fastest - smallest))
        return self.limit
