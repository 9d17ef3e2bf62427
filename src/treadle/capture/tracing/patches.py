"""Replacement of functions, attributes and entries during a trace."""

import threading
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

from treadle.compat.tracing import works_for

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
Replacement = tuple[object, str, Callable[..., object]]
"""The owner of an attribute, its name, and its replacement."""


def traced_only(ours: Callable[P, T], original: Callable[P, T]) -> Callable[P, T]:
    """``ours`` where a trace runs; other threads, which train other models meanwhile, see nothing
    of it."""
    thread = threading.get_ident()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (ours if works_for(thread) else original)(*args, **kwargs)

    return call


def put(undo: ExitStack, target: MutableMapping[K, Any], key: K, value: object) -> None:
    """``target[key] = value`` until the stack unwinds."""
    if key in target:
        undo.callback(target.__setitem__, key, target[key])
    else:
        undo.callback(target.pop, key, None)
    target[key] = value


def put_attribute(undo: ExitStack, owner: object, name: str, value: object) -> None:
    """``owner.name = value`` likewise, of a class or a module, which may inherit it or lack it."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
