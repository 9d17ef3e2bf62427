"""The uses by a step of tensor objects and of their ``.grad``."""

from collections.abc import Callable
from typing import TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.explain_errors import here

Owner = TypeVar("Owner", nn.Module, Optimizer)


@final
class TensorUses:
    """Those of one run; tensors are known by their ids.

    ``fresh``: leaves whose ``.grad`` from before is dropped unread. One that is replaced, by
    nothing or by another tensor, before anybody looks at it may as well not have been there,
    whatever was added to it.
    """

    def __init__(self, sync: GradientSync, line: Callable[[], str]) -> None:
        """``line``: the user's, that made the last node."""
        self.fresh: set[int] = set()
        self._sync, self._line = sync, line
        self._looked_at: set[int] = set()
        self._changed_at: dict[int, str] = {}
        self._clearing = False

    def note_gradient(self, leaf: Tensor, *, replaced: bool, is_set: bool = False) -> None:
        """``leaf.grad`` is read or set."""
        if self._clearing:
            return
        if is_set:
            self._sync.was_set(leaf)
        else:
            self._sync.looked_at(leaf)
        if id(leaf) in self.fresh:
            return
        if replaced and id(leaf) not in self._looked_at:
            self.fresh.add(id(leaf))
        else:
            self._looked_at.add(id(leaf))

    def note_cleared(
        self, original: Callable[[Owner, bool], None]
    ) -> Callable[[Owner, bool], None]:
        """``zero_grad``, which looks at gradients only to clear them."""

        def call(owner: Owner, set_to_none: bool = True) -> None:
            if isinstance(owner, nn.Module):
                leaves = list(owner.parameters())
            else:
                leaves = [leaf for group in owner.param_groups for leaf in group["params"]]
            for leaf in leaves:
                self.note_gradient(leaf, replaced=set_to_none, is_set=True)
            self._clearing = True
            try:
                original(owner, set_to_none)
            finally:
                self._clearing = False

        return call

    def note_changed(self, tensor: Tensor) -> None:
        """Note that the line that runs now changes a tensor object."""
        self._changed_at[id(tensor)] = here()

    def line_of(self, tensor: Tensor) -> str:
        """The last line that changed a tensor itself; that which runs where there was none."""
        return self._changed_at.get(id(tensor)) or self._line()

    def uses_gradient(self, leaf: Tensor) -> bool:
        """Whether the step looked at ``leaf.grad``, set it, or added to it."""
        known = self.is_looked_at(leaf) or self.is_replaced_first(leaf)
        return known or self._sync.has_accumulated(leaf)

    def is_looked_at(self, leaf: Tensor) -> bool:
        """Whether the step looked at ``leaf.grad``."""
        return id(leaf) in self._looked_at

    def is_replaced_first(self, leaf: Tensor) -> bool:
        """Whether the first that the step did with ``leaf.grad`` was to replace it."""
        return id(leaf) in self.fresh
