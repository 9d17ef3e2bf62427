"""Calls of functions that accept or return only real numbers: ``float(t)``, ``len(t)``, ``cos(n)``.

::

    LOAD_GLOBAL  NULL + float            ->    LOAD_GLOBAL  NULL + float (ours)

During capture, code that calls ``float``, ``int``, ``len`` or a function of ``math`` through a
variable of any name is replaced by a copy in which the call goes to a function of treadle;
functions of ``math`` in objects are replaced as well. For a traced tensor, it returns the number
that is known after the launch (``capture/symbolic/deferred``), or a length that depends on values;
for a substitute number, another substitute; for anything else, Python's result. Only that name
differs.
"""

import builtins
import contextlib
import dis
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.python_state.containers.container_recorders import (
    is_for_container,
    length_of_recorded,
)
from treadle.capture.symbolic.arrays.arrays import is_array
from treadle.capture.symbolic.arrays.deferred_arrays import DeferredArray, converted
from treadle.capture.symbolic.arrays.legacy_tensors import LEGACY
from treadle.capture.symbolic.conversion_warnings import warn_of_float
from treadle.capture.symbolic.deferred import CONVERSIONS, OF_NUMBERS, number_in, number_of
from treadle.capture.symbolic.functions.reductions import REDUCTIONS
from treadle.capture.symbolic.held_functions import (
    HeldFunction,
    functions_among,
    held_functions,
    instead_of,
)
from treadle.capture.symbolic.numbers import PlainNumber, SourcePosition, Text, is_number
from treadle.capture.symbolic.size_numbers import as_number, is_size, truncated
from treadle.capture.symbolic.source_rewriting import called_functions, rewritten_source
from treadle.capture.symbolic.texts.texts import TEXTS
from treadle.compat.fake import class_of, is_traced
from treadle.compat.tracing import works_for
from treadle.compat.unsized import is_unsized, length_of
from treadle.util.frames.frame_variables import variables

_MOST_NAMES = 1 << 7
"""Of a code object: an instruction names the first of them without a prefix."""
_MOST_CONSTANTS = 1 << 8


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
        self._asked: list[FunctionType] = []
        self.originals: dict[CodeType, CodeType] = {}  # by the copy, and by code within it
        self._codes: set[CodeType] = set()
        self._places: frozenset[SourcePosition] = frozenset()
        self._held: dict[object, HeldFunction] = {}  # functions of ``math`` in objects
        if isinstance(function, FunctionType) and _calls_any(function, frozenset(), asked=False):
            self._functions.append(function)

    def cover(
        self,
        asking: Iterable[tuple[CodeType, ...]],
        known: Iterable[object],
        places: AbstractSet[SourcePosition] = frozenset(),
    ) -> bool:
        """Rewrite code that asked for numbers from now on; whether any of it is new. ``asking``:
        each with the code of the frames around it, innermost first. ``known``: objects that the run
        has met, functions among them. ``places``: where it looked for entries."""
        more = not places <= self._places
        self._places |= places
        return self._covers(asking, known) or more

    def _covers(self, asking: Iterable[tuple[CodeType, ...]], known: Iterable[object]) -> bool:
        codes: list[CodeType] = []
        for inner, *around in asking:
            if inner not in self._codes:
                codes += [inner, *(outer for outer in around if inner in _within(outer))]
        if not codes:
            return False
        self._codes.update(codes)
        # what a program has frozen, the collector does not find
        objects = [*known, *gc.get_referrers(*codes)]
        asking_functions = {
            id(function): function
            for function in functions_among(objects)
            if _has_any(function.__code__, codes)
        }
        new = [
            function
            for function in asking_functions.values()
            if not any(function is f for f in self._asked)
        ]
        new = [function for function in new if _calls_any(function, self._places, asked=True)]
        self._asked += new
        held = {function.identity: function for function in held_functions(objects, OF_NUMBERS)}
        others = held.keys() - self._held.keys()
        self._held |= held
        return bool(new or others)

    @contextlib.contextmanager
    def rewritten(self) -> Iterator[None]:
        """Inside, functions with that code have the rewritten copy."""
        with contextlib.ExitStack() as undo:
            by_name: dict[str, Callable[..., object]] = {}
            instead = _all_instead()
            called = called_functions(instead)
            others = [f for f in self._functions if not any(f is known for known in self._asked)]
            for function in (*self._asked, *others):
                undo.callback(setattr, function, "__code__", function.__code__)
                scope = _Scope.of(function, instead, asked=function in self._asked)
                code = rewritten_source(function.__code__, function.__globals__, self._places)
                by_name |= called if code is not function.__code__ else {}
                original, function.__code__ = function.__code__, _rewritten(code, scope, by_name)
                self.originals |= dict.fromkeys(
                    (function.__code__, *_within(function.__code__)), original
                )
            for name, call in by_name.items():
                setattr(builtins, name, call)
                undo.callback(delattr, builtins, name)
            undo.enter_context(instead_of(self._held.values(), OF_NUMBERS))
            yield


def _all_instead() -> dict[int, Callable[..., object]]:
    """The replacements of functions and types, by their ids."""
    instead_of_ids: dict[int, Callable[..., object]] = {
        id(conversion): _conversion(conversion) for conversion in CONVERSIONS
    }
    others = (*OF_NUMBERS.items(), *REDUCTIONS.items(), *TEXTS.items(), *LEGACY.items())
    instead_of_ids |= {id(original): instead for original, instead in others}

    def mapped(
        function: Callable[..., object], *args: Iterable[object], **kwargs: object
    ) -> object:
        return _MAP(instead_of_ids.get(id(function), function), *args, **kwargs)

    return instead_of_ids | {id(map): mapped, id(type): _type}


_TYPE: Callable[..., object] = type
_MAP: Callable[..., object] = map


def _type(*args: object, **kwargs: object) -> object:
    """``type(value)``, of a traced tensor the class of the user's own."""
    if len(args) == 1 and isinstance(args[0], Tensor) and is_traced(args[0]):
        return class_of(args[0])
    return _TYPE(*args, **kwargs)


def _conversion(kind: Callable[..., PlainNumber]) -> Callable[..., object]:
    thread = threading.get_ident()

    def call(*args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and works_for(thread):
            (value,) = args
            if isinstance(value, Tensor) and kind is not len:
                if kind is float:
                    warn_of_float(value)
                value = number_in(value)
            elif isinstance(value, Tensor) and is_traced(value):
                return length_of(value)
            if kind is len and is_for_container(value):
                return length_of_recorded(value)
            if is_unsized(value) and kind in (float, int):
                return torch.sym_float(value) if kind is float else torch.sym_int(value)
            if is_size(value):
                if kind is int:
                    return truncated(value)
                value = as_number(value)
            if is_number(value):
                return value.derived(kind)
            if isinstance(value, Text):
                return number_of(kind, value)
            if is_array(value) and kind is not len:
                return value.computed(kind, value)
            if type(value) is DeferredArray and kind is not len:
                return converted(kind, value)
        return kind(*args, **kwargs)

    return call


@final
@dataclass(frozen=True, slots=True)
class _Scope:
    """The meaning of names in a code object. ``instead``: the replacements, by the ids of the
    originals; ``asked``: whether the code has asked for a real number."""

    variables: Mapping[str, object]
    cells: Mapping[str, CellType]
    instead: Mapping[int, Callable[..., object]]
    asked: bool

    @staticmethod
    def of(
        function: FunctionType, instead: Mapping[int, Callable[..., object]], *, asked: bool
    ) -> "_Scope":
        """That of a function."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return _Scope(function.__globals__, dict(cells), instead, asked)

    def within(self, code: CodeType) -> "_Scope":
        """That of code which is defined in it: a name that is its own there is no longer free."""
        cells = {name: cell for name, cell in self.cells.items() if name in code.co_freevars}
        return _Scope(self.variables, cells, self.instead, self.asked)

    def called(self, name: str) -> Callable[..., object] | None:
        """The replacement for a call of a global variable."""
        known = self.variables.get(name, vars(builtins).get(name))
        return self.instead.get(id(known))

    def called_in(self, name: str) -> Callable[..., object] | None:
        """What to call in the place of a function's own variable, or one of a function around.
        What there is not yet is asked when it is called."""
        cell = self.cells.get(name)
        known = self.asked if cell is None else id(_content(cell)) in self.instead

        def call(*args: object, **kwargs: object) -> object:
            function: Any = variables(sys._getframe(1))[name]
            return self.instead.get(id(function), function)(*args, **kwargs)

        return call if known else None


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _rewritten(
    code: CodeType, scope: _Scope, by_name: dict[str, Callable[..., object]]
) -> CodeType:
    """``code`` and what is defined in it, with our calls. ``by_name``: those that it finds by name,
    which are added."""
    constants: list[object] = [
        _rewritten(constant, scope.within(constant), by_name)
        if isinstance(constant, CodeType)
        else constant
        for constant in code.co_consts
    ]
    names = list(code.co_names)
    bytecode = bytearray(code.co_code)
    for site in _call_sites(code):
        call = scope.called_in(site.name) if site.in_frame else scope.called(site.name)
        if call is None:
            continue
        if site.in_frame:
            if len(constants) < _MOST_CONSTANTS:
                bytecode[site.offset : site.offset + 2] = _LOAD_CONST, len(constants)
                constants.append(call)
            continue
        name = f"{site.name} ({id(call)})"
        if name not in names and len(names) < _MOST_NAMES:
            names.append(name)
        if name in names:
            bytecode[site.offset + 1] = names.index(name) << 1 | 1
            by_name[name] = call
    return code.replace(co_code=bytes(bytecode), co_names=tuple(names), co_consts=tuple(constants))


_LOAD_CONST = dis.opmap["LOAD_CONST"]


@final
@dataclass(frozen=True, slots=True)
class _CallSite:
    """Where a variable is loaded to be called: the function's own or one of a function around it,
    or a global one."""

    name: str
    offset: int
    in_frame: bool


def _call_sites(code: CodeType) -> Iterator[_CallSite]:
    steps = [
        instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"
    ]
    for at, step in enumerate(steps):
        if at > 0 and steps[at - 1].opname == "EXTENDED_ARG":
            continue
        if step.opname == "LOAD_GLOBAL" and step.arg is not None and step.arg & 1:
            yield _CallSite(step.argval, step.offset, in_frame=False)
        elif step.opname in _LOADS and _is_called(steps, at):
            yield _CallSite(step.argval, step.offset, in_frame=True)


def _is_called(steps: Sequence[dis.Instruction], at: int) -> bool:
    """Whether what is loaded there is what a call calls, and no part of it: ``f(x)``, and not
    ``f.g(*x)`` or ``f[0](x)``, in which something else begins in the place where ``f`` does."""
    if _NULL_BEHIND:
        return at + 1 < len(steps) and steps[at + 1].opname == "PUSH_NULL"
    if at == 0 or steps[at - 1].opname != "PUSH_NULL":
        return False
    begin = _begin(steps[at])
    uses = (step.opname for step in steps[at + 1 :] if _begin(step) == begin)
    return next(uses, "").startswith(_CALLING)


def _begin(step: dis.Instruction) -> tuple[int | None, int | None]:
    where = step.positions
    return (None, None) if where is None else (where.lineno, where.col_offset)


_LOADS = frozenset({"LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_NULL_BEHIND = sys.version_info >= (3, 13)
"""Where ``PUSH_NULL`` stands, by what is called; on the other side it is another call's."""
_CALLING = ("CALL", "PRECALL", "KW_NAMES", "BUILD_", "LOAD_CONST")
"""How the names of steps begin that belong to a call: it, or arguments that are put together."""


def _calls_any(function: FunctionType, places: frozenset[SourcePosition], *, asked: bool) -> bool:
    """Whether it calls a function of real numbers, or may do so if it ``asked`` for one."""
    scope = _Scope.of(function, _all_instead(), asked=asked)
    by_name: dict[str, Callable[..., object]] = {}
    if rewritten_source(function.__code__, function.__globals__, places) is not function.__code__:
        return True
    return _rewritten(function.__code__, scope, by_name) != function.__code__


def _constants(code: CodeType) -> Iterable[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _has_any(code: CodeType, codes: Sequence[CodeType]) -> bool:
    """Whether it is one of ``codes``, or one of them is defined in it."""
    return code in codes or any(_has_any(constant, codes) for constant in _constants(code))


def _within(code: CodeType) -> list[CodeType]:
    """The code objects defined in ``code``, at any depth."""
    own = list(_constants(code))
    return [*own, *(inner for part in own for inner in _within(part))]
