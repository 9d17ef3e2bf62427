"""Tensors that a run found outside of its step: each counts by its type, not by its numbers."""

from collections.abc import Iterable, Iterator
from typing import final

from torch import Tensor

from treadle.capture.python_state.reads.object_graph import (
    Fact,
    Location,
    first_of_each,
    tensor_fact,
    words_of,
    words_of_value,
)

_OTHER_ALIASES = "tensors outside of the step that were one are several, or the other way round"


@final
class ReadTensors:
    """Where they stand, of what type each is, and which of them are the same one."""

    def __init__(self, bound: Iterable[Tensor]) -> None:
        """``bound``: parameters, which count by identity."""
        self._bound = {id(tensor): tensor for tensor in bound}
        self.facts: list[Fact] = []
        self._same: tuple[int, ...] = ()

    def is_bound(self, value: object) -> bool:
        """Whether it is a parameter, of which the type says nothing."""
        return id(value) in self._bound

    def settle(self) -> None:
        """After the last one: which are the same as others."""
        self._same = self._aliases()

    def _aliases(self) -> tuple[int, ...]:
        return first_of_each(fact.place.get() for fact in self.facts)

    def places(self) -> dict[int, Location]:
        """By its id, where a tensor was found."""
        places: dict[int, Location] = {}
        for fact in self.facts:
            places.setdefault(id(fact.place.get()), fact.place)
        return places

    def differences(self) -> Iterator[str]:
        """Those that are no longer of the same type, or not the same ones as others, in words."""
        for fact in self.facts:
            now = fact.place.get()
            if not isinstance(now, Tensor) or tensor_fact(now) != fact.fact:
                yield f"{fact.place.label}: {words_of(fact)} became {words_of_value(now)}"
            elif id(now) in self._bound:
                yield f"{fact.place.label}: a tensor became a parameter"
        if self._aliases() != self._same:
            yield _OTHER_ALIASES

    def are_alike(self) -> bool:
        """Whether there is no difference."""
        return not any(True for _ in self.differences())
