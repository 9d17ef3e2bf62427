"""Texts of what stands in for something else: ``str(n)``, ``f"{loss:.2f}"``, ``"%d" % n``.

::

    f"loss {loss.item():.2f}"   ->  a text that stands in, computed after the launch
    f"step {self.n}"            ->  likewise, of the number of the call

They may be joined, printed, returned and stored, as numbers that stand in may. What needs the text
itself while the step is captured depends on it: TR-102 where it is known after the launch only.
The functions here give what Python's do, but for such values; ``text_calls`` has code call them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from treadle.capture.container_recorders import as_plain, is_recorded
from treadle.capture.deferred import text_of, whole_tensor
from treadle.capture.flatten import flatten_containers, replaced, unflatten
from treadle.capture.introspect import is_heap
from treadle.capture.numbers import Text, is_stand_in
from treadle.compat.pytree import TreeSpec


@final
@dataclass(frozen=True, slots=True)
class Shown:
    """In the place of an object of which a text is made later: what it says of itself now."""

    text: str
    representation: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.representation

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)


def taken(tree: object) -> tuple[list[Any], TreeSpec]:
    """What is in lists, tuples and dicts, as it is now, with what stands in for tensors."""
    plain = replaced(tree, lambda node: as_plain(node) if is_recorded(node) else None)
    leaves, spec = flatten_containers(plain)
    return [_taken(each) for each in leaves], spec


def _taken(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return whole_tensor(leaf)
    if is_stand_in(leaf) or not is_heap(type(leaf)):
        return leaf
    return Shown(str(leaf), repr(leaf))


def _has_stand_ins(leaves: Iterable[object]) -> bool:
    return any(is_stand_in(each) or isinstance(each, Tensor) for each in leaves)


def made_by(function: Callable[..., Any], *given: Any) -> Any:
    """``function``, which makes a text, of what may stand in."""
    if not _has_stand_ins(flatten_containers(given)[0]):
        return function(*given)
    leaves, spec = taken(given)
    return text_of(_Rebuilt(function, spec), leaves)


@final
@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """``function`` of the leaves of its arguments."""

    function: Callable[..., Any]
    spec: TreeSpec

    def __call__(self, *leaves: Any) -> Any:
        return self.function(*unflatten(list(leaves), self.spec))


def formatted(value: Any, spec: Any = "") -> Any:
    """``format(value, spec)``."""
    if isinstance(value, Tensor):
        if not value.ndim:
            return formatted(value.item(), spec)
        return object.__format__(value, spec) if spec else made_by(str, value)
    if isinstance(value, Text) and not spec:
        return value
    return made_by(format, value, spec)


def shown(value: Any) -> Any:
    """``str(value)``."""
    return value if isinstance(value, Text) else made_by(str, value)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "s": shown,
    "r": functools.partial(made_by, repr),
    "a": functools.partial(made_by, ascii),
}


def piece(value: Any, conversion: str, spec: Any) -> Any:
    """``{value!conversion:spec}`` of an f-string."""
    return formatted(_CONVERSIONS[conversion](value) if conversion else value, spec)


def joined(*pieces: Any) -> Any:
    """The pieces of an f-string, one after the other."""
    return text_of(_concatenated, pieces) if any(map(is_stand_in, pieces)) else "".join(pieces)


def _concatenated(*pieces: str) -> str:
    return "".join(pieces)


def modulo(left: Any, right: Any) -> Any:
    """``left % right``, where that may be a text of ``right``."""
    is_text = type(left) is str or isinstance(left, Text)
    return made_by(_modulo, left, right) if is_text else left % right


def _modulo(left: Any, right: Any) -> Any:
    return left % right


def method(owner: Any, name: str) -> Any:
    """``owner.name``, where that may be a method of texts which takes others."""
    if type(owner) is not str and not isinstance(owner, Text):
        return getattr(owner, name)
    if name == "join":
        return functools.partial(_join, owner)
    return functools.partial(_called, owner, name)


def _join(separator: Any, texts: Iterable[Any]) -> Any:
    return made_by(_joined_by, separator, list(texts))


def _joined_by(separator: str, texts: Sequence[str]) -> str:
    return separator.join(texts)


def _called(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    def call(owner: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    return made_by(call, owner, args, kwargs)


TEXTS: dict[Callable[..., Any], Callable[..., Any]] = {
    str: shown,
    repr: _CONVERSIONS["r"],
    ascii: _CONVERSIONS["a"],
    format: formatted,
}
"""What is called in the place of Python's functions that make texts."""
