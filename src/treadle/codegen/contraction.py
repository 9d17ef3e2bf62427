"""Which products are fused into a sum before rounding: both printers write this explicitly, and
compilers must not contract. Only products within one operation are fused: the result of an
operation is always rounded, whether its readers are in the same kernel or not, so that a schedule
does not affect bits (decision 0007).

::

    y = w * x + z                              y = fma(w, x, z)
    y = w * x;  out = y + z                    y is rounded
"""

import torch

from treadle.loop.expr import Apply, Expr, Local
from treadle.loop.kernel import Kernel, Store
from treadle.loop.traverse import operands_of, walk

CONTRACTED = (torch.float32, torch.float64)
"""Of these a sum may take in a product; products of halves are rounded."""


def only_summed(kernel: Kernel) -> frozenset[Expr]:
    """Values inside an operation that all of their users add to another one, or take it away:
    such a product need not be rounded for any of them. What has a name is an operation's value."""
    summed, others = set[Expr](), set[Expr]()
    for item in kernel.body:
        if isinstance(item, Store):
            others.add(item.value)
            continue
        others.update((Local(item.name, item.expr.dtype), item.expr))
        for node in walk(item.expr):
            (summed if _is_sum(node) else others).update(operands_of(node))
    return frozenset(summed - others)


def _is_sum(expr: Expr) -> bool:
    """Of two: what a value less itself is must be zero."""
    if not isinstance(expr, Apply) or expr.fn not in ("add", "sub"):
        return False
    return expr.operands[0] != expr.operands[1]
