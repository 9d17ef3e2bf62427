"""PyTorch's own compiler, for one graph of operations."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def compile_module(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    """What computes ``module``, which returns a tuple of tensors, for inputs like these; they may
    be fake."""
    import torch._inductor  # late: it takes a second to import

    compiled: Any = torch._inductor.compile(module, list(inputs))
    return compiled
