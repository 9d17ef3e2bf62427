"""Slots for the tensors of a call in the values that a step returns and stores.

::

    {"loss": loss, "grad": p.grad, "n": 3}      of a step
    (ResultSlot, SparseLayout([V, D]), 3)       its leaves: one tensor, two tensors, none
    (a, b, c)                                   what the graph gives for them
    {"loss": a, "grad": sparse(b, c), "n": 3}   what a call returns
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from treadle.capture.python_state.external_state.left_objects import DeferredValue
from treadle.capture.tensors.sparse_gradients import SparseLayout, sparse_layout_of
from treadle.compat.distributed.sharded_tensors import ShardedLayout, layout_of
from treadle.compat.fake import class_of, of_class
from treadle.util.errors import RuntimeFailure, joined_with


class ResultSlot:
    """Marks the place of a tensor among the leaves of the user's result; that of a DTensor is
    marked by its layout, and so is that of a sparse one, which is two tensors of the graph."""


@final
@dataclass(frozen=True, slots=True)
class ClassSlot:
    """Marks the place of a tensor that is a leaf with ``requires_grad``, or of a class of the
    user's own. ``kind``: its class."""

    kind: type
    needs_gradient: bool = True

    def around(self, tensor: Tensor) -> Tensor:
        """Such a tensor, of the same memory."""
        if self.kind is Tensor:
            return tensor.detach().requires_grad_()
        return of_class(self.kind, tensor, self.needs_gradient)


@final
class _LeftTheStep(torch.autograd.Function):
    """The autograd function behind a loss that a compiled step returns, whose gradients do not
    exist."""

    @staticmethod
    def forward(ctx: object, loss: Tensor) -> Tensor:
        """The same number."""
        return loss.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        """TR-409."""
        raise joined_with(RuntimeError, RuntimeFailure)(
            "backward() was called outside the compiled step on a value that the step returned: "
            "after the call, the activations that a backward needs no longer exist",
            code="TR-409",
            remedy=(
                "call loss.backward() inside the function that you pass to treadle.compile; "
                "return loss.detach() if you only read the loss"
            ),
        )


@final
@dataclass(frozen=True, slots=True)
class LossSlot:
    """Marks the place of a scalar that needs a gradient and is the result of operations."""

    @staticmethod
    def fits(tensor: Tensor) -> bool:
        """Whether ``tensor`` is one."""
        return tensor.requires_grad and not tensor.is_leaf and tensor.dim() == 0

    def around(self, tensor: Tensor) -> Tensor:
        """Such a number, whose ``backward()`` says why it cannot run."""
        with torch.enable_grad():
            loss = _LeftTheStep.apply(tensor.detach().requires_grad_())
        assert isinstance(loss, Tensor)
        return loss


@final
@dataclass(frozen=True, slots=True)
class RunAgain:
    """Among the leaves of the user's result and of what is left outside, in this order: the very
    object that leaf ``at`` of all of them is."""

    at: int


def slot_of(tensor: Tensor) -> object:
    """The slot that marks the place of ``tensor``."""
    layout = layout_of(tensor) or sparse_layout_of(tensor)
    kind = class_of(tensor)
    begins = tensor.is_leaf and tensor.requires_grad
    if layout is None and (begins or kind is not Tensor):
        return ClassSlot(kind, begins)
    return layout or ResultSlot


def slots_in(leaves: Iterable[object]) -> int:
    """How many tensors of the graph belong among the leaves."""
    count = 0
    for leaf in leaves:
        count += leaf is ResultSlot or isinstance(leaf, ShardedLayout | ClassSlot | LossSlot)
        count += 2 * isinstance(leaf, SparseLayout)
    return count


def fill(
    leaves: Iterable[object], tensors: Iterator[Any], known: list[object] | None = None
) -> list[Any]:
    """Leaves with values: tensors of this call, numbers as they are computed now, and new copies
    of what a run made. ``known``: those of all leaves before them, to which these are added."""
    values: list[object] = [] if known is None else known
    start = len(values)
    for leaf in leaves:
        if leaf is ResultSlot:
            values.append(next(tensors))
        elif isinstance(leaf, ShardedLayout | ClassSlot | LossSlot):
            values.append(leaf.around(next(tensors)))
        elif isinstance(leaf, SparseLayout):
            values.append(leaf.around(next(tensors), next(tensors)))
        elif isinstance(leaf, RunAgain):
            values.append(values[leaf.at])
        else:
            values.append(leaf.compute() if isinstance(leaf, DeferredValue) else leaf)
    return values[start:]


@final
class NamedOnce:
    """Tensors and views among leaves, each of which is a value once; the leaves are counted."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, Tensor | DeferredValue]] = {}
        self._count = 0

    def of(self, leaves: Iterable[object]) -> list[object]:
        """The leaves, with ``RunAgain`` for a tensor that was there before."""
        values: list[object] = []
        for leaf in leaves:
            at = self._count
            if isinstance(leaf, Tensor | DeferredValue):
                at, _ = self._first.setdefault(id(leaf), (self._count, leaf))
            values.append(leaf if at == self._count else RunAgain(at))
            self._count += 1
        return values
