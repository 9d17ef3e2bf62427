"""Values of a dataclass that have another type than it declares, since Python checks none."""

import functools
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from treadle.util.errors import with_article


def undeclared(record: object) -> Iterator[tuple[str, str]]:
    """The names of such fields, each with words for what it takes: ``"an int or None"``. A ``bool``
    is no number, and a path may be a ``str``."""
    for name, declared in _declared(type(record)).items():
        if not _is_of(getattr(record, name), declared):
            yield name, _words(declared)


@functools.cache
def _declared(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_of(value: object, declared: Any) -> bool:
    if isinstance(declared, UnionType):
        return any(_is_of(value, each) for each in get_args(declared))
    if get_origin(declared) is tuple:
        kind, _ = get_args(declared)
        return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)
    if declared in (int, float):
        return isinstance(value, declared) and not isinstance(value, bool)
    return isinstance(value, str | PathLike if declared is Path else declared)


def _words(declared: Any) -> str:
    if isinstance(declared, UnionType):
        return " or ".join(map(_words, get_args(declared)))
    if get_origin(declared) is tuple:
        return f"a tuple of {get_args(declared)[0].__name__}"
    return "None" if declared is NoneType else with_article(declared.__name__)
