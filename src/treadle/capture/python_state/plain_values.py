"""Plain Python values: their kinds, and equality between them."""

from typing import Any, TypeGuard

import numpy as np
import torch

WholeNumber = int | np.integer[Any]
RealNumber = WholeNumber | float | np.floating[Any]

PLAIN = frozenset(
    {
        bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range,
        torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
    }
)  # fmt: skip
"""Types of plain values."""
WHOLE_NUMBERS: frozenset[type] = frozenset(
    {int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)
NUMBERS: frozenset[type] = WHOLE_NUMBERS | {float, np.float16, np.float32, np.float64}
"""Types of real numbers that a float64 is equal to, unless they are large whole ones."""
WITHOUT_PARTS: frozenset[type] = NUMBERS | {bool, np.bool_, str, type(None), np.ndarray}
"""Types of values that are leaves of every container."""
_NAMES_OF_NUMPY = {kind.__name__ for kind in NUMBERS} - {"int", "float"}
_GENERIC = np.generic  # of the module itself, reading is noted
_OTHERS = (np.generic, slice)

PlainFact = tuple[type, object]
"""The identity of a plain value: its type, and what distinguishes it within the type."""


def is_real(value: object) -> TypeGuard[RealNumber]:
    """Whether it is exactly a number of Python's or NumPy's, and no boolean."""
    return type(value) in NUMBERS


def is_whole(value: object) -> TypeGuard[WholeNumber]:
    """Whether it is exactly an integer of Python's or NumPy's."""
    return type(value) in WHOLE_NUMBERS


def is_plain(value: object) -> bool:
    """Whether it is a value that is immutable and compares by its contents."""
    kind = type(value)
    return kind in PLAIN or issubclass(kind, _OTHERS)


def plain_fact(value: object) -> PlainFact:
    """Equal for plain values that are the same: ``1`` is not ``True``, ``0.0`` is not ``-0.0``."""
    kind = type(value)
    if isinstance(value, _GENERIC):
        return kind, value.tobytes()
    if kind in (float, complex):
        return kind, repr(value)
    if kind is slice:
        return kind, repr(value)
    return kind, value


def is_same_value(one: object, other: object) -> bool:
    """Whether two plain values are the same."""
    return is_plain(one) and is_plain(other) and plain_fact(one) == plain_fact(other)


def scalar_data(value: object) -> tuple[str, bytes] | None:
    """The dtype and the bytes of a NumPy number or boolean; ``None`` for anything else."""
    if type(value) is not np.bool_ and not (is_real(value) and isinstance(value, _GENERIC)):
        return None
    scalar: Any = value
    return str(scalar.dtype), scalar.tobytes()


def scalar_of(dtype: str, data: bytes) -> object:
    """The inverse."""
    return np.frombuffer(data, np.dtype(dtype))[0]


def number_of(kind: str, data: bytes) -> object | None:
    """The real number of NumPy's type ``kind`` with these bytes, as one of Python's; ``None`` if
    ``kind`` is another type."""
    if kind not in _NAMES_OF_NUMPY:
        return None
    scalar: Any = scalar_of(kind, data)
    return scalar.item()


def ufunc_name(value: object) -> str:
    """The name of one of NumPy's own functions of elements; empty for anything else."""
    name = value.__name__ if isinstance(value, np.ufunc) else ""
    return name if name and getattr(np, name, None) is value else ""


def ufunc_of(name: str) -> object | None:
    """The inverse; ``None`` for a name that this NumPy has for none."""
    found = getattr(np, name, None)
    return found if isinstance(found, np.ufunc) else None
