"""Step counters of many parameters, which ``torch.optim`` keeps as one tensor each.

They are 0-dim tensors on the host that hold one and the same number. Their addresses are looked up
once, and again after a write to the objects that hold them. Their values are read at every call,
all at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.guards.memory_fingerprint import Floats
from treadle.guards.watching import (
    Unchanged,
    Watches,
    comparison_of_floats,
    watch_dicts,
    watch_tensors,
)


@final
class SharedCounters:
    """The counters of some parameters of one optimizer."""

    def __init__(
        self,
        dicts: Sequence[dict[object, object]],
        tensors: Mapping[str, Sequence[Tensor]],
        places: Unchanged | None,
    ) -> None:
        self._dicts = watch_dicts(dicts)
        self._places = places
        self._numbers = {
            name: Floats([counter.data_ptr() for counter in counters])
            for name, counters in tensors.items()
        }
        self._firsts = [(name, numbers.first) for name, numbers in self._numbers.items()]
        self._first_other = comparison_of_floats()
        tables = [numbers.addresses for numbers in self._numbers.values()]
        self._tables = [(addresses.ctypes.data, len(addresses)) for addresses in tables]

    @staticmethod
    def of(
        optimizer: Optimizer, parameters: Sequence[Tensor], names: Sequence[str]
    ) -> "SharedCounters | None":
        """``None`` if they are not on the host, or are not numbers of four bytes."""
        states = [optimizer.state.get(parameter) for parameter in parameters]
        dicts: list[Any] = [vars(optimizer), optimizer.state, *filter(None, states)]
        if not all(isinstance(mapping, dict) for mapping in dicts):
            return None
        if not names:
            return SharedCounters(dicts, {}, None)
        if not all(states):
            return None
        tensors = {name: [state.get(name) for state in states if state] for name in names}
        flat = [counter for counters in tensors.values() for counter in counters]
        if not all(map(_is_float, flat)):
            return None
        places = watch_tensors(flat)
        return None if places is None else SharedCounters(dicts, tensors, places)

    def hold(self) -> bool:
        """Whether the counters are where they were."""
        return self._dicts.is_same() and (self._places is None or self._places.is_same())

    def agree(self) -> bool:
        """Whether the counters of one name are equal."""
        first = self._first_other
        if first is not None:
            for at, count in self._tables:  # noqa: SIM110  # asked at every call
                if first(at, count) >= 0:
                    return False
            return True
        by_name = [number.read() for number in self._numbers.values()]
        return all(bool((counters == counters[0]).all()) for counters in by_name)

    def join(self, watches: Watches) -> None:
        """Watch that the counters are where they were, and agree."""
        watches.add(self._dicts)
        if self._places is not None:
            watches.add(self._places)
        watches.polled.append(self.agree)

    def now(self) -> dict[str, float]:
        """The values of counters that agree."""
        return {name: number.value for name, number in self._firsts}

    def write(self, values: Mapping[str, float]) -> None:
        """Set the counters to these values."""
        for name, value in values.items():
            self._numbers[name].write(value)


def _is_float(value: object) -> bool:
    return (
        type(value) is Tensor and value.is_cpu and value.dtype is torch.float32 and not value.ndim
    )
