"""Functions in objects and containers: ``self.act = math.exp``, ``ACTS["exp"]``.

During capture, another function may replace one in such a place, as in a module.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, final

from torch import Tensor

from treadle.capture.python_state.introspect import attributes_of


@final
@dataclass(frozen=True, slots=True)
class HeldFunction:
    """The function under ``key`` in a dict or a list."""

    holder: Any
    key: Any
    function: Callable[..., object]

    @property
    def identity(self) -> tuple[int, object]:
        """Equal for the same place."""
        return id(self.holder), self.key


def held_functions(
    objects: Iterable[object], functions: Mapping[Callable[..., object], object]
) -> Iterator[HeldFunction]:
    """The places in objects, lists and dicts that have one of ``functions``."""
    known = {id(function): function for function in functions}
    for owner in objects:
        if isinstance(owner, type | ModuleType | FunctionType | Tensor):
            continue
        for holder in (attributes_of(owner), owner):
            if isinstance(holder, dict | list):
                yield from _within(holder, known)


def _within(
    holder: dict[Any, Any] | list[Any], known: Mapping[int, Callable[..., object]]
) -> Iterator[HeldFunction]:
    pairs = enumerate(holder) if isinstance(holder, list) else holder.items()
    for key, value in list(pairs):
        if id(value) in known:
            yield HeldFunction(holder, key, known[id(value)])


def functions_among(objects: Iterable[object]) -> Iterator[FunctionType]:
    """Those among objects and classes, and what they decorate."""
    left = list(objects)
    seen: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, type) and id(value) not in seen:
            left += vars(value).values()
        elif isinstance(value, FunctionType) and id(value) not in seen:
            yield value
            left += _held(value)
        seen.add(id(value))


def _held(function: FunctionType) -> Iterator[object]:
    """What a function holds: a decorator's the function that it decorates."""
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            yield cell.cell_contents


@contextlib.contextmanager
def instead_of(
    places: Iterable[HeldFunction], functions: Mapping[Callable[..., object], object]
) -> Iterator[None]:
    """Inside, other functions are in these places, unless they have been changed."""
    put: list[HeldFunction] = []
    try:
        for place in places:
            if _now(place) is place.function:
                place.holder[place.key] = functions[place.function]
                put.append(place)
        yield
    finally:
        for place in put:
            if _now(place) is functions[place.function]:
                place.holder[place.key] = place.function


def _now(place: HeldFunction) -> object:
    if isinstance(place.holder, dict):
        return place.holder.get(place.key)
    return place.holder[place.key] if place.key < len(place.holder) else None
