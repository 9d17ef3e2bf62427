"""The variables outside of a function that its code reads: names of its closure, and globals."""

import builtins
import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from treadle.capture.places import MISSING, Place

_READ = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_ASSIGNED = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"})
_OF_OBJECT = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


class Variables:
    """What a step's code names outside of itself; and what functions, methods and forwards of
    models name that it uses, if they are in the same file.

    ``read``: places whose value the code may need; ``assigned``: those that it only sets.
    ``owners``: objects whose methods run. What code of other files reads is not seen.
    """

    def __init__(self, function: Callable[..., Any], models: Iterable[nn.Module] = ()) -> None:
        self.read: list[Place] = []
        self.assigned: list[Place] = []
        self.owners: list[Any] = []
        self._seen: set[Any] = set()
        space = self._begin(function)
        for kind in {type(module): None for model in models for module in model.modules()}:
            self._method(kind, "forward", space)

    def _begin(self, function: Any) -> dict[str, Any]:
        """Visit the step's own function; the globals of its file."""
        match function:
            case functools.partial():
                return self._begin(cast(Any, function).func)
            case MethodType():
                space = _globals(function.__func__)
                self.owners.append(function.__self__)
                self._method(type(function.__self__), function.__name__, space)
                return space
            case FunctionType() if "__wrapped__" in vars(function):
                self._visit(function, function.__globals__)
                return self._begin(vars(function)["__wrapped__"])
            case FunctionType():
                self._visit(function, function.__globals__)
                return function.__globals__
            case _:
                space = _globals(vars(type(function)).get("__call__"))
                self.owners.append(function)
                self._method(type(function), "__call__", space)
                return space

    def _method(self, kind: type, name: str, space: dict[str, Any]) -> None:
        """Visit a method and the methods of the same object that it uses."""
        if (kind, name) in self._seen:
            return
        self._seen.add((kind, name))
        found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        match found:
            case property():
                function = found.fget
            case staticmethod() | classmethod():
                function = cast(Any, found).__func__
            case _:
                function = found
        if isinstance(function, FunctionType) and function.__globals__ is space:
            self._visit(function, space)
            for other in _names(function.__code__, _OF_OBJECT):
                self._method(kind, other, space)

    def _visit(self, function: Any, space: dict[str, Any]) -> None:
        """Visit a function of the file with these globals."""
        if not isinstance(function, FunctionType) or function in self._seen:
            return
        if function.__globals__ is not space:
            return
        self._seen.add(function)
        code = function.__code__
        named = {name: Place(space, name, name) for name in _names(code, _READ | _ASSIGNED)}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        named |= {name: Place(cell, name, name) for name, cell in cells}
        read = _names(code, _READ)
        for name, place in sorted(named.items()):
            value = place.get()
            if value is MISSING and name in vars(builtins):
                continue
            (self.read if name in read else self.assigned).append(place)
            self._visit(value, space)


def _globals(function: Any) -> dict[str, Any]:
    return function.__globals__ if isinstance(function, FunctionType) else {}


def _names(code: CodeType, operations: frozenset[str]) -> set[str]:
    """Variables outside of the code that it, or code within it, uses by these operations."""
    free = frozenset(code.co_freevars)
    return {
        step.argval
        for each in _codes(code)
        for step in dis.get_instructions(each)
        if step.opname in operations and ("DEREF" not in step.opname or step.argval in free)
    }


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
