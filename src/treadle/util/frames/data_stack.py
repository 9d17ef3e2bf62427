"""Contiguous memory for the frames of Python functions.

CPython keeps the frames of a thread in chunks of 16 KiB, asks the system for a chunk when a call
needs one more, and returns it as soon as that call is over. A loop just below such a border maps
and unmaps memory at each call: 600,000 times in ``tests/contract/test_checkpointing.py``, as
``strace -c`` counts. A chunk is never smaller than the frame that begins it, so a function with a
large frame has room after it for the frames of all functions that it calls (``Python/pystate.c``,
``push_chunk``; CPython 3.11 and later). Untouched parts of that room cost nothing.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_CLAIMED = 2**18 + 1
"""Words: the next power of two is allocated, 4 MiB, of which 2 MiB are left: 1,000 calls of 250
words each."""


def _call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    return function(*args, **kwargs)


call_with_room = FunctionType(
    _call.__code__.replace(co_stacksize=_CLAIMED), globals(), "call_with_room"
)
"""``call_with_room(function, args, kwargs)`` is ``function(*args, **kwargs)``, with room for the
frames of what it calls."""


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, with room for the frames of what it calls."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call_with_room(function, args, kwargs)
        return result

    return call
