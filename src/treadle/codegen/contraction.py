"""Which products a sum takes in before it rounds: both printers write that out, and compilers are
told to contract nothing.

::

    y = w * x;  out = y + z                    out = fma(w, x, z)
    y = w * x;  out = y - detached(y)          y is rounded for both: else out were its rounding
"""

import torch

from treadle.loop.expr import Apply, Expr, Local
from treadle.loop.kernel import Kernel, Store
from treadle.loop.traverse import operands_of, walk

CONTRACTED = (torch.float32, torch.float64)
"""Of these a sum may take in a product; products of halves are rounded."""


def only_summed(kernel: Kernel) -> frozenset[Expr]:
    """Values that all of their users add to another one, or take it away, and that nobody stores:
    such a product need not be rounded for any of them. A formula that has a name, and is written
    out elsewhere too, is one value."""
    summed, others = set[Expr](), set[Expr]()
    named: list[tuple[Expr, Expr]] = []
    for item in kernel.body:
        if isinstance(item, Store):
            others.add(item.value)
            continue
        named.append((Local(item.name, item.expr.dtype), item.expr))
        for node in walk(item.expr):
            (summed if _is_sum(node) else others).update(operands_of(node))
    others |= {expr for local, expr in named if local in others}
    others |= {local for local, expr in named if expr in others}
    return frozenset(summed - others)


def _is_sum(expr: Expr) -> bool:
    """Of two: what a value less itself is must be zero."""
    if not isinstance(expr, Apply) or expr.fn not in ("add", "sub"):
        return False
    return expr.operands[0] != expr.operands[1]
