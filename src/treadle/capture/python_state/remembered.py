"""The cached results of a function with a cache.

    f(1); seen = RememberedResults(f)
    f(2)                 ->  seen == RememberedResults(f)
    f.cache_clear()      ->  seen != RememberedResults(f), also after f(1)

A call that finds its result there runs nothing, so that the entries count; those that came later
do not: of what a step asked for, each was there, or the step has run the function itself.
"""

import gc
import operator
from functools import _lru_cache_wrapper as _LruCached
from typing import Any, cast, final


@final
class RememberedResults:
    """The entries of a cache, in the order in which they came. One that has them all, and may have
    more after them, is equal to it."""

    __slots__ = ("_keys", "_other", "_values")

    def __init__(self, function: "_LruCached[Any]") -> None:
        entries = _entries_of(function)
        self._keys = tuple(entries or ())
        self._values = tuple((entries or {}).values())
        counts = function.cache_info()[1:]
        self._other = counts if entries is None else None  # what is to be the same

    def entries(self) -> list[tuple[object, object]]:
        """Keys as the cache has them, with their results."""
        return list(zip(self._keys, self._values, strict=True))

    def __eq__(self, now: object) -> bool:
        if not isinstance(now, RememberedResults) or len(now._keys) < len(self._keys):
            return False
        same = all(map(operator.is_, self._values, now._values))
        return same and all(map(operator.is_, self._keys, now._keys)) and self._other == now._other

    __hash__ = None  # pyright: ignore


def _entries_of(function: "_LruCached[Any]") -> dict[object, object] | None:
    """The dict of the cache, found by its position before the function among the cache's
    references; ``None`` if it is not found."""
    held = gc.get_referents(function)
    at = max((i for i, referent in enumerate(held) if referent is function.__wrapped__), default=0)
    entries = held[at - 1]
    known = type(entries) is dict and len(entries) == function.cache_info().currsize
    return cast("dict[object, object]", entries) if known else None
