"""``float(t)``, ``int(t)`` and ``len(t)`` of tensors, where Python takes no number but a real one.

::

    LOAD_GLOBAL  NULL + float            ->    LOAD_GLOBAL  NULL + float (deferred)

Code that calls one of them by its name is given a copy of it, while a step is captured, in
which the call is one of ours: of a traced tensor it gives the number that is known after the launch
(``capture/deferred``), or a length that values decide; of anything else what Python gives. Nothing
but that name differs.
"""

import builtins
import contextlib
import dis
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.deferred import CONVERSIONS, AsksNumber
from treadle.capture.numbers import is_number
from treadle.compat.fake import is_traced
from treadle.compat.tracing import works_for
from treadle.compat.unsized import is_unsized, length_of

_DEFERRED = " (deferred)"
"""Ends the names of our calls: no name of anybody's code has a space."""
_MOST_NAMES = 1 << 7
"""Of a code object: an instruction names the first of them without a prefix."""


def plain_name(name: str) -> str:
    """As the user's code has it."""
    return name.removesuffix(_DEFERRED)


@final
class NumberCalls:
    """The functions whose calls are rewritten, for one capture."""

    def __init__(self, function: Callable[..., object]) -> None:
        """``function``: the step's, whose own code is."""
        while isinstance(function, functools.partial | MethodType):
            function = (
                function.func if isinstance(function, functools.partial) else function.__func__
            )
        self._functions: list[FunctionType] = []
        if isinstance(function, FunctionType) and _calls_any(function.__code__):
            self._functions.append(function)

    def cover(self, error: AsksNumber, known: Iterable[object]) -> bool:
        """From now on the code that asked is rewritten; whether that is new. ``known``: objects
        that the run has met, functions among them."""
        asking = error.codes[0]
        codes = [each for each in error.codes if each is asking or asking in _within(each)]
        # what a program has frozen, the collector does not find
        objects = [*known, *gc.get_referrers(*codes)]
        found = {id(each): each for each in _functions(objects) if each.__code__ in codes}
        new = [each for each in found.values() if not any(each is f for f in self._functions)]
        self._functions += new
        return bool(new)

    @contextlib.contextmanager
    def rewritten(self) -> Iterator[None]:
        """While inside, functions of that code have the copy."""
        with contextlib.ExitStack() as undo:
            for name, kind in CONVERSIONS.items():
                setattr(builtins, name + _DEFERRED, _conversion(kind))
                undo.callback(delattr, builtins, name + _DEFERRED)
            for function in self._functions:
                if function.__globals__.keys() & CONVERSIONS.keys():
                    continue  # other functions of those names
                undo.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = _rewritten(function.__code__)
            yield


def _conversion(kind: Callable[..., object]) -> Callable[..., object]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> object:
        if len(args) == 1 and not kwargs and works_for(thread):
            (value,) = args
            if isinstance(value, Tensor) and is_traced(value):
                value = length_of(value) if kind is len else value.item()
                if kind is len:
                    return value
            if is_unsized(value):
                return torch.sym_float(value) if kind is float else torch.sym_int(value)
            if is_number(value):
                return value.derived(kind)
        return kind(*args, **kwargs)

    return call


def _rewritten(code: CodeType) -> CodeType:
    """``code`` and what is defined in it, with our calls."""
    constants = tuple(_rewritten(e) if isinstance(e, CodeType) else e for e in code.co_consts)
    sites = _sites(code)
    names = dict.fromkeys((*code.co_names, *(name + _DEFERRED for name in sites)))
    places = {name: at for at, name in enumerate(names)}
    made = bytearray(code.co_code)
    for name, offsets in sites.items():
        at = places[name + _DEFERRED]
        for offset in offsets if at < _MOST_NAMES else ():
            made[offset + 1] = at << 1 | 1
    return code.replace(co_code=bytes(made), co_names=tuple(names), co_consts=constants)


def _sites(code: CodeType) -> dict[str, list[int]]:
    """Where they are loaded to be called, by name."""
    found: dict[str, list[int]] = {}
    prefixed = False
    for each in dis.get_instructions(code):
        loads = each.opname == "LOAD_GLOBAL" and each.arg is not None and bool(each.arg & 1)
        if loads and not prefixed and each.argval in CONVERSIONS:
            found.setdefault(each.argval, []).append(each.offset)
        prefixed = each.opname == "EXTENDED_ARG"
    return found


def _calls_any(code: CodeType) -> bool:
    return bool(_sites(code)) or any(map(_calls_any, _constants(code)))


def _constants(code: CodeType) -> Iterable[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))


def _functions(objects: Iterable[object]) -> Iterator[FunctionType]:
    """Those among objects and classes, and what they decorate."""
    left = list(objects)
    seen: set[int] = set()
    while left:
        each = left.pop()
        if isinstance(each, type) and id(each) not in seen:
            left += vars(each).values()
        elif isinstance(each, FunctionType) and id(each) not in seen:
            yield each
            left += _held(each)
        seen.add(id(each))


def _held(function: FunctionType) -> Iterator[object]:
    """What a function holds: a decorator's the function that it decorates."""
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
            yield cell.cell_contents


def _within(code: CodeType) -> list[CodeType]:
    """What is defined in ``code``, at any depth."""
    own = list(_constants(code))
    return [*own, *(inner for each in own for inner in _within(each))]


__all__ = ["NumberCalls", "plain_name"]
