"""Strings made from substitutes: ``str(n)``, ``f"{loss:.2f}"``, ``"%d" % n``.

::

    f"loss {loss.item():.2f}"   ->  a text that stands in, computed after the launch
    f"step {self.n}"            ->  likewise, of the number of the call

They may be joined, printed, returned and stored, like substitute numbers. Code that needs the
string itself during capture depends on it: TR-102 if it is known only after the launch. The
functions here return what Python's do, but for such values; ``source_rewriting`` makes code call
them.
"""

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.python_state.containers.container_recorders import as_plain, is_for_container
from treadle.capture.python_state.flatten import flatten_containers, replaced, unflatten
from treadle.capture.python_state.introspect import is_heap
from treadle.capture.python_state.object_pytrees import Sized
from treadle.capture.symbolic.conversion_warnings import warn_of_float
from treadle.capture.symbolic.deferred import number_of, text_of, whole_tensor
from treadle.capture.symbolic.numbers import Text, is_stand_in
from treadle.capture.symbolic.size_numbers import as_number, is_size
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


def taken(tree: object) -> tuple[list[object], TreeSpec]:
    """What is in lists, tuples and dicts, as it is now, with what stands in for tensors."""
    leaves, spec = flatten_containers(replaced(tree, _open))
    return [_taken(as_number(leaf)) for leaf in leaves], spec


def _open(node: object) -> object:
    """A container in the place of a recorded one, and of a shape with sizes of arguments."""
    if type(node) is torch.Size and any(map(is_size, node)):
        return Sized(tuple(node))
    return as_plain(node) if is_for_container(node) else None


def _taken(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return whole_tensor(leaf)
    if is_stand_in(leaf) or not is_heap(type(leaf)):
        return leaf
    return Shown(str(leaf), repr(leaf))


def _has_stand_ins(leaves: Iterable[object]) -> bool:
    return any(
        is_stand_in(leaf)
        or isinstance(leaf, Tensor)
        or any(map(is_size, leaf if type(leaf) is torch.Size else (leaf,)))
        for leaf in leaves
    )


def made_by(function: Callable[..., object], *args: object) -> object:
    """The string that ``function`` makes of values that may be stand-ins."""
    parts = flatten_containers(args)[0]
    if any(map(is_for_container, parts)):
        args = tuple(replaced(arg, _open) for arg in args)
        parts = flatten_containers(args)[0]
    if not _has_stand_ins(parts):
        return function(*args)
    leaves, spec = taken(args)
    rebuilt = _Rebuilt(function, spec)
    return text_of(rebuilt, leaves) if any(map(is_stand_in, leaves)) else rebuilt(*leaves)


@final
@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """``function`` of the leaves of its arguments."""

    function: Callable[..., object]
    spec: TreeSpec

    def __call__(self, *leaves: object) -> object:
        return self.function(*unflatten(list(leaves), self.spec))


def formatted(value: object, spec: Any = "") -> object:
    """``format(value, spec)``."""
    if isinstance(value, Tensor):
        if not value.ndim:
            return formatted(value.item(), spec)
        return object.__format__(value, spec) if spec else shown(value)
    if isinstance(value, Text) and not spec:
        return value
    return made_by(format, value, spec)


def shown(value: object) -> object:
    """``str(value)``."""
    if isinstance(value, Text):
        return value
    operation = value.grad_fn if isinstance(value, Tensor) else None
    return made_by(str if operation is None else _OfTensor(operation.name()), value)


@final
@dataclass(frozen=True, slots=True)
class _OfTensor:
    """The text of a tensor that a differentiable operation made."""

    operation: str

    def __call__(self, tensor: Tensor) -> str:
        text = str(tensor.detach().requires_grad_())
        head, _, tail = text.rpartition("requires_grad=True")
        return f"{head}grad_fn=<{self.operation}>{tail}"


def _represented(value: object) -> object:
    return shown(value) if isinstance(value, Tensor) else made_by(repr, value)


_CONVERSIONS: dict[str, Callable[[object], object]] = {
    "s": shown,
    "r": _represented,
    "a": functools.partial(made_by, ascii),
}


def piece(value: object, conversion: str, spec: object) -> object:
    """``{value!conversion:spec}`` of an f-string."""
    return formatted(_CONVERSIONS[conversion](value) if conversion else value, spec)


def joined(*pieces: Any) -> object:
    """The pieces of an f-string, one after the other."""
    return text_of(_concatenated, pieces) if any(map(is_stand_in, pieces)) else "".join(pieces)


def _concatenated(*pieces: str) -> str:
    return "".join(pieces)


def modulo(left: Any, right: Any) -> object:
    """``left % right``, where that may be a text of ``right``."""
    if type(left) is str and _makes_floats(left):
        _warn_of_floats(right)
    is_text = type(left) is str or isinstance(left, Text)
    return made_by(_modulo, left, right) if is_text else left % right


def _makes_floats(template: str) -> bool:
    """Whether the operator ``%`` makes a float of a value."""
    specs = (part.lstrip("0123456789.*+- #")[:1] for part in template.split("%")[1:])
    return any(spec in ("e", "E", "f", "F", "g", "G") for spec in specs)


def _warn_of_floats(right: object) -> None:
    for value in flatten_containers(right)[0]:
        warn_of_float(value)


def _modulo(left: Any, right: object) -> object:
    return left % right


def method(owner: object, name: str) -> object:
    """``owner.name``, where that may be a method of texts which takes others, or of a stream which
    takes texts: what is written is printed."""
    if name == "write" and isinstance(owner, io.TextIOBase):
        return functools.partial(_write, owner)
    if type(owner) is not str and not isinstance(owner, Text):
        return getattr(owner, name)
    if name == "join":
        return functools.partial(_join, owner)
    return functools.partial(_called, owner, name)


def _write(stream: io.TextIOBase, text: str | Text) -> object:
    print(text, end="", file=stream)
    return number_of(len, text) if isinstance(text, Text) else len(text)


def _join(separator: object, texts: Iterable[object]) -> object:
    return made_by(_joined_by, separator, list(texts))


def _joined_by(separator: str, texts: Sequence[str]) -> str:
    return separator.join(texts)


def _called(owner: object, name: str, *args: object, **kwargs: object) -> object:
    def call(owner: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
        return getattr(owner, name)(*args, **kwargs)

    return made_by(call, owner, args, kwargs)


def _printed(*args: object, **named: Any) -> None:
    print(*args, **named)


TEXTS: dict[Callable[..., object], Callable[..., object]] = {
    str: shown,
    repr: _CONVERSIONS["r"],
    ascii: _CONVERSIONS["a"],
    format: formatted,
    print: _printed,
}
"""Replacements of Python's functions that make strings."""
