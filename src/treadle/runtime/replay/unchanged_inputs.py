"""Inputs that are the same tensors at every call: parameters, buffers, state.

Their layouts and addresses are compared all at once; what is bound to them stays bound.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Protocol, final

from torch import Tensor


class SameTensors(Protocol):
    """Some tensors and what they were like."""

    def is_same(self) -> bool:
        """Whether class, dtype, device, sizes, strides and address of each are what they were."""
        ...


@final
class UntouchedTensors:
    """Tensors that nobody can change meanwhile: those of a loop that runs."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """What they are like has no say."""

    def is_same(self) -> bool:
        """It is."""
        return True


LayoutsOf = Callable[[Sequence[Tensor]], SameTensors | None]


@final
class SteadyInputs:
    """Which inputs of the last call need no look at this one. ``moving``: those that are never
    expected to be the same; ``layouts``: watches what tensors are like."""

    def __init__(self, count: int, moving: frozenset[int], layouts: LayoutsOf) -> None:
        self._count = count
        self._moving = set(moving)
        self._watch = layouts
        self.drop()

    def drop(self) -> None:
        """Nothing is known, and no tensor is held."""
        self._at: list[int] = []
        self._tensors: list[Tensor] = []
        self._layouts: SameTensors | None = None
        self._others: Sequence[int] = range(self._count)

    def others(self, inputs: Sequence[Tensor]) -> Sequence[int]:
        """The positions of inputs that are to be looked at."""
        if self._layouts is None or len(inputs) != self._count:
            return range(len(inputs))
        tensors = [inputs[at] for at in self._at]
        if not all(map(operator.is_, tensors, self._tensors)):
            pairs = zip(self._at, tensors, self._tensors, strict=True)
            self._moving |= {at for at, now, before in pairs if now is not before}
        elif self._layouts.is_same():
            return self._others
        self.drop()
        return range(len(inputs))

    def learn(self, inputs: Sequence[Tensor], bound: Sequence[bool]) -> None:
        """After a call that looked at all of them: those that stay ``bound`` are known."""
        if self._layouts is not None:
            return
        at = [n for n, address in enumerate(bound) if address and n not in self._moving]
        tensors = [inputs[n] for n in at]
        layouts: object = self._watch(tensors) if tensors else None
        if layouts is None:
            return
        self._at, self._tensors, self._layouts = at, tensors, layouts
        known = set(at)
        self._others = [n for n in range(self._count) if n not in known]
