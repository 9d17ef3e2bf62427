"""Inputs that are the same tensors at every call: parameters, buffers, state.

Their layouts and addresses are compared all at once; what is bound to them stays bound.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, final

from torch import Tensor


class WatchedInputs(Protocol):
    """Some tensors among the inputs, with their layouts and addresses."""

    def are_in(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the inputs have the very same tensors at their places."""
        ...

    def is_same(self) -> bool:
        """Whether class, dtype, device, sizes, strides and address of each are what they were."""
        ...


def are_at(places: Sequence[int], tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether the inputs have the very same ``tensors`` at these places."""
    return all(map(operator.is_, map(inputs.__getitem__, places), tensors))


@final
class UntouchedTensors:
    """Tensors that nobody can change for now: those of a running loop."""

    def __init__(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Layouts and addresses do not matter."""
        self._places, self._tensors = places, tensors

    def are_in(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the inputs have them at their places."""
        return are_at(self._places, self._tensors, inputs)

    def is_same(self) -> bool:
        """Always true."""
        return True


Vouched = Collection[object]
"""Watchers that were checked for this call already: nothing that they watch has changed."""
WatchInputs = Callable[[Sequence[int], Sequence[Tensor]], WatchedInputs | None]
"""Makes a watcher of places and the tensors there."""


@final
class SteadyInputs:
    """The inputs of the last call that need no check in this one. ``moving``: those that are never
    expected to be the same; ``watch``: watches the others."""

    def __init__(self, count: int, moving: frozenset[int], watch: WatchInputs) -> None:
        self._count = count
        self._moving = set(moving)
        self._watch = watch
        self.drop()

    def drop(self) -> None:
        """Forget everything, and hold no tensor."""
        self._at: list[int] = []
        self._tensors: list[Tensor] = []
        self._watched: WatchedInputs | None = None
        self._others: Sequence[int] = range(self._count)

    @property
    def is_known(self) -> bool:
        """Whether some inputs need no check."""
        return self._watched is not None

    @property
    def watched(self) -> WatchedInputs | None:
        """The watcher of the inputs that need no check."""
        return self._watched

    def others(self, inputs: Sequence[Tensor], vouched: Vouched = ()) -> Sequence[int]:
        """The positions of inputs that must be checked."""
        if self._watched is None or len(inputs) != self._count:
            return range(len(inputs))
        if not self._watched.are_in(inputs):
            known = zip(self._at, self._tensors, strict=True)
            self._moving |= {at for at, before in known if inputs[at] is not before}
        elif self._watched in vouched or self._watched.is_same():
            return self._others
        self.drop()
        return range(len(inputs))

    def learn(self, inputs: Sequence[Tensor], bound: Sequence[bool]) -> None:
        """After a call that checked all inputs: those that stay ``bound`` need no check from now
        on."""
        if self._watched is not None:
            return
        at = [n for n, address in enumerate(bound) if address and n not in self._moving]
        tensors = [inputs[n] for n in at]
        watched = self._watch(at, tensors) if tensors else None
        if watched is None:
            return
        self._at, self._tensors, self._watched = at, tensors, watched
        known = set(at)
        self._others = [n for n in range(self._count) if n not in known]
