"""Which values are cheap enough to be computed again rather than stored."""

from treadle.loop.expr import Apply, Expr, Reduce
from treadle.loop.functions import EXPENSIVE
from treadle.loop.traverse import walk


def is_simple(formula: Expr, most: int) -> bool:
    """Whether a formula has no reduction, and at most that many functions, none expensive."""
    count = 0
    for part in walk(formula):
        if isinstance(part, Reduce) or (isinstance(part, Apply) and part.fn in EXPENSIVE):
            return False
        count += isinstance(part, Apply)
    return count <= most


__all__ = ["is_simple"]
