"""Objects that hold tensors, among arguments and results: taken apart and put together again."""

import copy
import dataclasses
import operator
import pickle
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.python_state.parts import Reading
from treadle.capture.python_state.plain_values import PLAIN
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.util.errors import CaptureError, with_article

_VALUES = PLAIN | {slice, range, type(...), torch.memory_format, torch.layout}
_CLOSED = (nn.Module, Optimizer, Enum, type, torch.Generator)

Flatten = Callable[[object], list[object]]


def is_value(leaf: object) -> bool:
    """Whether it is a tensor or a plain Python value."""
    if type(leaf) is torch.Size:
        return all(type(size) is int for size in leaf)
    return type(leaf) in _VALUES or isinstance(leaf, Tensor) or is_stand_in(leaf)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Sized:
    """A shape some of whose sizes are stand-ins."""

    sizes: tuple[object, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An object without its parts: equal to another that takes the same parts."""

    kind: type
    names: tuple[object, ...]
    blank: object = dataclasses.field(compare=False, repr=False)

    def filled(self, values: Sequence[object]) -> object:
        """A new object with these parts."""
        return _with_parts(self.blank, dict(zip(self.names, values, strict=True)))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Flattened:
    """``Batch(x=tensor, n=3)  ->  Flattened(ObjectSpec(Batch, ("x", "n")), (tensor, 3))``."""

    shell: ObjectSpec
    values: tuple[object, ...]


def flattened(value: object, flatten: Flatten) -> Flattened | None:
    """The parts of ``value``, by name; ``None`` if it is no container of tensors and values.

    Data classes, ``UserDict`` (the batches of tokenizers), ``SimpleNamespace``, subclasses of
    ``dict`` and ``list``, of ``tuple`` with attributes, are opened always, other objects if an
    attribute holds a tensor.
    ``flatten``: gives the leaves of nested lists, tuples and dicts.
    """
    if is_value(value) or isinstance(value, _CLOSED) or callable(value):
        return None
    parts = _parts(value)
    if parts is None:
        return None
    always = isinstance(value, dict | list | tuple | UserDict | SimpleNamespace)
    if not (always or dataclasses.is_dataclass(value)):
        leaves = {name: flatten(part) for name, part in parts.items()}
        parts = {k: v for k, v in parts.items() if all(is_value(leaf) for leaf in leaves[k])}
        if not any(isinstance(leaf, Tensor) for name in parts for leaf in leaves[name]):
            return None
    blank = _with_parts(value, dict.fromkeys(parts))
    return Flattened(ObjectSpec(type(value), tuple(parts), blank), tuple(parts.values()))


def has_own(value: object) -> bool:
    """Whether an object has attributes of its own, which would be lost if only its entries were
    rebuilt."""
    return bool(_vars(value))


def names_of_parts(
    value: object, taken_apart: Flattened | None, leaves: Sequence[object]
) -> frozenset[object]:
    """Attributes of a container that repeat its parts, which are compared already. ``leaves``:
    those of a class with its own flattening."""
    if isinstance(value, UserDict):
        return frozenset({"data"})
    if taken_apart is not None:
        return (
            frozenset()
            if isinstance(value, dict | list | tuple)
            else frozenset(taken_apart.shell.names)
        )
    held = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return frozenset(name for name, part in _vars(value).items() if id(part) in held)


def _parts(value: object) -> Reading | None:
    match value:
        case dict():
            return dict(value)
        case list():
            return dict(enumerate(value))
        case tuple():
            return dict(enumerate(value)) if has_own(value) else None
        case UserDict():
            return dict(value.data)
        case _ if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: operator.attrgetter(name)(value) for name in names}
        case _:
            return dict(_vars(value)) or None


def _vars(value: object) -> Mapping[Any, object]:
    try:
        return vars(value)
    except TypeError:  # it has none: an object of a class with slots, or made in C
        return {}


def _with_parts(value: object, parts: Mapping[Any, object]) -> object:
    """A shallow copy of ``value`` with ``parts`` in it; no method of the user's class runs."""
    if isinstance(value, tuple):
        kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
        twin = tuple.__new__(kind, parts.values())
        vars(twin).update(_vars(value))
        return twin
    try:
        twin = copy.copy(value)
    except (TypeError, pickle.PicklingError, copy.Error) as error:
        raise CaptureError(
            f"{with_article(type(value).__name__)} holds tensors and cannot be copied: {error}",
            code="TR-116",
            remedy="pass or return its tensors, or give the class a __copy__ method",
        ) from error
    for name, part in parts.items():
        match twin:
            case dict():
                dict.__setitem__(twin, name, part)
            case list():
                list.__setitem__(twin, name, part)
            case UserDict():
                twin.data[name] = part
            case _:
                object.__setattr__(twin, name, part)
    return twin
