"""Random numbers that a step draws from Python's or NumPy's generators: only once, when traced."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from treadle.util.errors import CaptureError

_PYTHON_S: Any = random.seed.__self__  # type: ignore[attr-defined]
_NUMPY_S: Any = np.random.mtrand._rand


class Dice:
    """The states of the generators before a traced run: the global ones, and those it may hold."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, Any, Callable[[], Any], Callable[[Any], None]]] = []
        self._keep("Python's random", random.getstate, random.setstate)
        self._keep("numpy.random", np.random.get_state, np.random.set_state)

    def meet(self, each: Any, name: str) -> None:
        """Another object that the step can reach, with the user's name for it."""
        if each is _PYTHON_S or each is _NUMPY_S or isinstance(each, random.SystemRandom):
            return  # the global ones, which are looked after already; what has no state
        if isinstance(each, random.Random):
            self._keep(name, each.getstate, each.setstate)
        elif isinstance(each, np.random.RandomState):
            self._keep(name, each.get_state, each.set_state)
        elif isinstance(each, np.random.Generator):
            self._keep(name, *_state_of(each))

    def _keep(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._kept.append((name, get(), get, put))

    def refuse(self) -> None:
        """``CaptureError`` TR-119 if one of them has been used."""
        for name, before, get, _ in self._kept:
            if not _same(get(), before):
                raise CaptureError(
                    f"the step draws from {name}: that would happen when it is captured, and later "
                    "calls would use the same numbers",
                    code="TR-119",
                    remedy="draw with torch (torch.rand, torch.randperm), or pass the numbers as "
                    "tensors",
                )

    def restore(self) -> None:
        """All of them as they were."""
        for _, before, _, put in self._kept:
            put(before)


def _state_of(generator: np.random.Generator) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    bits = generator.bit_generator

    def put(state: Any) -> None:
        bits.state = state

    return lambda: bits.state, put


def _same(one: Any, other: Any) -> bool:
    """Equality of nested tuples and dicts with arrays in them."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
