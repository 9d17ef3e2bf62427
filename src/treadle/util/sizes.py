"""Bytes with units, as users write and read them, and budgets of bytes."""

import re
from dataclasses import dataclass
from typing import final

from treadle.util.errors import PlanError

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str | int) -> int:
    """``"12GiB"`` -> 12884901888. A whole number is bytes already; ``PlanError`` otherwise."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise PlanError(
            f"{text!r} is not a size in bytes",
            code="TR-201",
            remedy='write a number and a unit, such as "12GiB", "800 MB", or bytes as an int',
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


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
        if not isinstance(memory, float):
            return Budget(parse_bytes(memory))
        if not 0.0 <= memory <= 1.0:
            raise PlanError(
                f"memory={memory!r} is a ratio outside 0.0 .. 1.0",
                code="TR-201",
                remedy='bytes are an int, or a text with a unit such as "12GiB"',
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
