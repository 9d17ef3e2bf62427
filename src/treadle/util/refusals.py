"""Refusals: why something does not apply, raised where it is detected and passed on as a value."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from treadle.util.errors import TreadleError

P = ParamSpec("P")
Found = TypeVar("Found")


class NoMatch(TreadleError):
    """Why a rule does not apply at a node."""


def attempt(find: Callable[P, Found], *args: P.args, **kwargs: P.kwargs) -> Found | NoMatch:
    """What ``find`` returns, or its refusal as a value: nothing else catches a ``NoMatch``. Its
    traceback is dropped: it holds frames, which hold the refusal, until garbage is collected."""
    try:
        return find(*args, **kwargs)
    except NoMatch as refusal:
        return refusal.with_traceback(None)
