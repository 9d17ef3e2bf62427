"""What autograd keeps of a call of an operation with a gradient of its own."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from treadle.compat.operators import OpOverload


class CallContext(Protocol):
    """PyTorch's context of one call: tensors are saved for its backward, and the arguments that are
    no tensors stand in ``rest``."""

    rest: Sequence[object]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What ``save_for_backward`` was given."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of the call, whether its gradient is wanted."""
        ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""
        ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """These results never need a gradient."""
        ...

    def set_materialize_grads(self, value: bool) -> None:
        """Whether gradients that are not there are given as zeros."""
        ...


Gradients = tuple[Tensor | Sequence[Tensor | None] | None, ...]
"""One for each argument of the call; a list for a list of tensors."""

Registered = tuple[
    OpOverload, Callable[..., Tensor | list[Tensor]], Callable[..., None], Callable[..., Gradients]
]
"""An operation, the types of its results, what its backward keeps, and its gradients."""

Formula = Callable[..., int]
"""The floating-point operations of a call, from shapes in the place of its tensors."""


def count_flops(op: OpOverload, formula: Formula) -> None:
    """PyTorch's counter of operations counts calls of ``op`` by ``formula``."""
    register_flop_formula(op.overloadpacket)(formula)


__all__ = ["CallContext", "Formula", "Gradients", "Registered", "count_flops"]
