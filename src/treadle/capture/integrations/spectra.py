"""``torch.istft``, which reads values: it raises if the windows add up to zero anywhere.

::

    equal(lowest < 1e-11, 1)  ->  expect(lowest >= 1e-11)
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from treadle.compat.tracing import Args, DispatchMode, Kwargs

_INVERSES = (torch.istft, Tensor.istft)
_ASKS = (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
"""The functions by which versions of PyTorch ask whether a tensor is true before they raise."""


def inverse_instead_of(
    func: Callable[..., object], require: Callable[[Tensor], None]
) -> Callable[..., object] | None:
    """What to call in place of ``func``; ``None``: ``func`` itself. ``require`` assumes that a
    tensor is true, and checks it at each call."""
    if func not in _INVERSES:
        return None

    def call(*args: object, **kwargs: object) -> object:
        with _NothingWrong(require):
            return func(*args, **kwargs)

    return call


@final
class _NothingWrong(DispatchMode):
    """Answers "no" to the question whether something is wrong, and requires that."""

    def __init__(self, require: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._require = require

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        if func in _ASKS:
            self._require(args[0].logical_not())
            return False
        return func(*args, **(kwargs or {}))
