"""Tensors that a run found outside its step: their types are compared, not their values."""

from collections.abc import Iterable, Iterator, Mapping
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
from treadle.guards.watching import Watches

_NONE_SEEN: Mapping[int, Tensor] = {}
_OTHER_ALIASES = (
    "tensors outside the step that were one tensor are now several, or several are now one"
)


@final
class ReadTensors:
    """The places and types of such tensors, and which of them are the same object."""

    def __init__(self, bound: Iterable[Tensor]) -> None:
        """``bound``: parameters, which count by identity."""
        self._bound = {id(tensor): tensor for tensor in bound}
        self.facts: list[Fact] = []
        self.same: tuple[int, ...] = ()  # for each the number of the first that is the same one

    def is_bound(self, value: object) -> bool:
        """Whether it is a parameter, which is compared by identity."""
        return id(value) in self._bound

    def settle(self) -> None:
        """Called after the last one: find which are the same object."""
        self.same = self._aliases()

    def _aliases(self, seen: Mapping[int, Tensor] = _NONE_SEEN) -> tuple[int, ...]:
        return first_of_each(
            seen[id(fact)] if id(fact) in seen else fact.place.get() for fact in self.facts
        )

    def places(self) -> dict[int, Location]:
        """The place of each tensor, by its id."""
        places: dict[int, Location] = {}
        for fact in self.facts:
            places.setdefault(id(fact.place.get()), fact.place)
        return places

    def differences(self, seen: Mapping[int, Tensor] = _NONE_SEEN) -> Iterator[str]:
        """The tensors whose type or identity with others has changed, in words. ``seen``: by the
        ids of facts, tensors that others have found to be as they were."""
        for fact in self.facts:
            if id(fact) in seen:
                continue
            now = fact.place.get()
            if not isinstance(now, Tensor) or tensor_fact(now) != fact.fact:
                yield f"{fact.place.label}: {words_of(fact)} became {words_of_value(now)}"
            elif id(now) in self._bound:
                yield f"{fact.place.label}: a tensor became a parameter"
        if self._aliases(seen) != self.same:
            yield _OTHER_ALIASES

    def join(self, watches: Watches, seen: Mapping[int, Tensor]) -> None:
        """Watch that there is no difference. ``seen``: as above, by what is watched already."""
        if len(seen) < len(self.facts):
            watches.polled.append(lambda: not any(True for _ in self.differences(seen)))
