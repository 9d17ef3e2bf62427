"""``torch.bincount`` with a least length, whose result has that length wherever no label is larger.

::

    n = bincount(y, minlength=9)  ->  [decision: 0 <= y < 9]  n = zeros(9).index_add(0, y, ones)

Otherwise its length depends on values: the other path of the branch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_COUNTS = (torch.bincount, Tensor.bincount)


def counts_instead_of(
    func: Callable[..., object], decide: Callable[[Tensor], bool | None]
) -> Callable[..., object] | None:
    """What to call in place of ``func``; ``None``: ``func`` itself. ``decide``: the answer to a
    question about the values of a tensor."""
    if func not in _COUNTS:
        return None

    def call(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> object:
        is_short = minlength > 0 and input.numel() > 0 and not input.is_floating_point()
        if not is_short or not decide(((input >= 0) & (input < minlength)).all()):
            return func(input, weights, minlength)
        one = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
        if weights is not None and weights.dtype is not torch.float32:
            one = weights.double()
        counts = torch.zeros(minlength, dtype=one.dtype, device=input.device)
        return counts.index_add(0, input.long(), one.detach())

    return call
