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
"""What an argument of an operation is if it is no tensor; sizes that the call decides are ``int``
as well."""

Nested: TypeAlias = T | tuple["Nested[T]", ...] | list["Nested[T]"] | dict[str, "Nested[T]"]


def map_leaves(f: Callable[[T], U], nested: Nested[T]) -> Nested[U]:
    """``f`` of each leaf, in tuples where there were tuples or lists, in dicts where dicts."""
    if isinstance(nested, tuple | list):
        return tuple([map_leaves(f, each) for each in nested])
    if isinstance(nested, dict):
        return {name: map_leaves(f, each) for name, each in nested.items()}
    return f(nested)


def leaves(*nested: Nested[T]) -> list[T]:
    """All that is no tuple, list or dict, in order."""
    found: list[T] = []
    _collect(nested, found)
    return found


def _collect(nested: Iterable[Nested[T]], found: list[T]) -> None:
    for each in nested:
        if isinstance(each, tuple | list):
            _collect(each, found)
        elif isinstance(each, dict):
            _collect(each.values(), found)
        else:
            found.append(each)
