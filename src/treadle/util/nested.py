"""Arguments of a call, however deep they nest: one type, one map.

::

    Nested[T]  =  T  |  (Nested[T], ...)  |  [Nested[T], ...]  |  {name: Nested[T]}

    map_leaves(f, (1, [x, None]))  ->  (f(1), (f(x), f(None)))
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import torch

from treadle.util.generators import GeneratorRef

T = TypeVar("T")
U = TypeVar("U")

Plain: TypeAlias = (
    bool
    | int
    | float
    | complex
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | GeneratorRef
    | None
)
"""Arguments of an operation that are not tensors; dynamic sizes are ``int`` as well."""

Nested: TypeAlias = T | tuple["Nested[T]", ...] | list["Nested[T]"] | dict[str, "Nested[T]"]


def map_leaves(f: Callable[[T], U], nested: Nested[T]) -> Nested[U]:
    """``f`` of each leaf, in tuples where there were tuples or lists, in dicts where dicts."""
    if isinstance(nested, tuple | list):
        return tuple([map_leaves(f, item) for item in nested])
    if isinstance(nested, dict):
        return {name: map_leaves(f, item) for name, item in nested.items()}
    return f(nested)


def leaves(*nested: Nested[T]) -> list[T]:
    """All that is not a tuple, list or dict, in order."""
    collected: list[T] = []
    _collect(nested, collected)
    return collected


def _collect(nested: Iterable[Nested[T]], collected: list[T]) -> None:
    for item in nested:
        if isinstance(item, tuple | list):
            _collect(item, collected)
        elif isinstance(item, dict):
            _collect(item.values(), collected)
        else:
            collected.append(item)
