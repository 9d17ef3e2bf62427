"""Bytes with units, as users write and read them."""

import re

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
