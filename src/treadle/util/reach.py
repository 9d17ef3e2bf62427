"""Reachability, step by step."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """``start``, and all that ``following`` leads to from there: each once, in the order in which
    it was found, depth first."""
    seen = dict.fromkeys(start)
    pending = list(seen)
    while pending:
        for successor in following(pending.pop()):
            if successor not in seen:
                seen[successor] = None
                pending.append(successor)
    return seen
