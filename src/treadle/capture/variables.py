"""The variables outside of a function that its code reads: names of its closure, and globals."""

import builtins
import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from treadle.capture.places import MISSING, Place

_READ = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_ASSIGNED = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"})


class Variables:
    """What a step's code names outside of itself, and what functions beside it name that it calls.

    ``read``: places whose value the code may need; ``assigned``: those that it only sets.
    ``owners``: objects whose methods run. What functions of other files read is not seen.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.read: list[Place] = []
        self.assigned: list[Place] = []
        self.owners: list[Any] = []
        self._seen: set[int] = set()
        self._visit(function, None)

    def _visit(self, function: Any, beside: dict[str, Any] | None) -> None:
        """``beside``: the globals of the file whose functions are visited; ``None`` at first."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        match function:
            case functools.partial():
                self._visit(cast(Any, function).func, beside)
            case MethodType():
                self.owners.append(function.__self__)
                self._visit(function.__func__, beside)
            case FunctionType() if beside is None or function.__globals__ is beside:
                self._function(function)
            case nn.Module() | type() | FunctionType():
                pass
            case _ if beside is None:
                self.owners.append(function)
                self._visit(vars(type(function)).get("__call__"), beside)
            case _:
                pass

    def _function(self, function: FunctionType) -> None:
        code, space = function.__code__, function.__globals__
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
