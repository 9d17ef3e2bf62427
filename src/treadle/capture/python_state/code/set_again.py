"""The variables that the code around a call of a step sets before the next call, found without
running it.

::

    for x, y in loader:
        step(x, y)             runs again: it is in a loop that the call is in
        WEIGHT *= 0.98         so WEIGHT is likely to be another number at the next call
        anneal(config)         and whatever ``anneal`` sets

Only the user's code is analysed. A wrong answer does no harm: a number that is said to change and
does not is an input of the graph, and one that is not said to is a constant until it changes.
"""

import dis
import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, final

from treadle.capture.python_state.code.bytecode import Instruction, Instructions, plain_name
from treadle.capture.python_state.code.frames import CodeOwner, code_owner

_Range = tuple[int, int]
_WHOLE: _Range = (0, 1 << 62)
_MODULE = "<module>"
_MOST = 1 << 10
"""The most functions that are analysed."""


@final
@dataclass(slots=True)
class SetAgain:
    """``variables``: with the ids of the globals that they are in; ``cells``: variables of
    functions; ``attributes``; ``keys``: constants under which entries may be set."""

    variables: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    cells: set[str] = field(default_factory=set[str])
    attributes: set[str] = field(default_factory=set[str])
    keys: set[object] = field(default_factory=set[object])

    @staticmethod
    def around(frames: Iterable[FrameType], entered: Collection[CodeType] = ()) -> "SetAgain":
        """By the user's code among ``frames``, the innermost first, from the end of the call that
        they are in to its next one. ``entered``: code of that call, whose changes are known."""
        running: list[_Scope] = []
        runs_again = False
        for frame in reversed([frame for frame in frames if _is_users(frame.f_code)]):
            if frame.f_code.co_name == _MODULE:  # what runs it again makes it anew
                running, runs_again = [], False
            part = _WHOLE if runs_again else _loop_around(frame.f_code, frame.f_lasti)
            runs_again = part is not None
            running.append(_Scope(frame.f_code, frame.f_globals, part))
        found = SetAgain()
        found._add(running, {*entered})
        return found

    def _add(self, running: "list[_Scope]", seen: set[CodeType]) -> None:
        """Add the variables that these set, and those set by functions that they may call; ``seen``
        functions are skipped."""
        scopes = [scope for scope in running if scope.part is not None]
        seen |= {scope.code for scope in scopes}
        for scope in scopes:  # what it calls comes behind it
            does = scope.does
            self.variables |= {(id(scope.variables), name) for name in does.variables}
            self.cells |= does.cells
            self.attributes |= does.attributes
            self.keys |= does.keys
            for outer in (*running, scope):
                for called in outer.called(does.mentions):
                    if called.code not in seen and len(seen) < _MOST:
                        seen.add(called.code)
                        scopes.append(called)


@final
@dataclass(frozen=True, slots=True)
class _Scope:
    """Code, its globals, and the part of it that runs again."""

    code: CodeType
    variables: dict[str, Any]
    part: _Range | None

    @property
    def does(self) -> "_Sets":
        """The names that this part sets and calls."""
        return _sets(self.code, self.part or (0, -1))

    def called(self, names: frozenset[str]) -> Iterator["_Scope"]:
        """The user's code that these names may mean: functions in it, those of its module, and
        methods of the module's classes."""
        for code in _inner(self.code):
            if code.co_name in names:
                yield _Scope(code, self.variables, _WHOLE)
        methods = [vars(value) for value in self.variables.values() if isinstance(value, type)]
        for held in (self.variables, *methods):
            for value in map(held.get, names):
                if isinstance(value, classmethod | staticmethod):
                    value = value.__func__
                if isinstance(value, FunctionType) and _is_users(value.__code__):
                    yield _Scope(value.__code__, value.__globals__, _WHOLE)


@final
@dataclass(frozen=True, slots=True)
class _Sets:
    """The names that one part of a code object sets; ``mentions``: variables and attributes that it
    loads."""

    variables: frozenset[str]
    cells: frozenset[str]
    attributes: frozenset[str]
    keys: frozenset[str | int]
    mentions: frozenset[str]


@functools.lru_cache(maxsize=1 << 10)
def _sets(code: CodeType, part: _Range) -> _Sets:
    start, end = part
    steps = [step for step in Instructions(code).all if start <= step.offset <= end]
    of_module = ("STORE_NAME",) if code.co_name == _MODULE else ()
    raw = (step for step in dis.get_instructions(code) if start <= step.offset <= end)
    sets_entries = any(step.opname == "STORE_SUBSCR" for step in raw)
    constants = (step.arg for step in steps if step.op == "LOAD_CONST")
    return _Sets(
        variables=_named(steps, "STORE_GLOBAL", *of_module),
        cells=_named(steps, "STORE_DEREF"),
        attributes=_named(steps, "STORE_ATTR"),
        keys=frozenset(filter(_is_key, constants)) if sets_entries else frozenset(),
        mentions=_named(steps, "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF"),
    )


def _is_key(constant: object) -> bool:
    return type(constant) in (str, int)


def _named(steps: Iterable[Instruction], *ops: str) -> frozenset[str]:
    arguments = (step.arg for step in steps if step.op in ops)
    return frozenset(plain_name(arg) for arg in arguments if type(arg) is str)


@functools.lru_cache(maxsize=1 << 10)
def _loops(code: CodeType) -> tuple[_Range, ...]:
    """The loops, each from its first instruction to the one that jumps back."""
    steps = dis.get_instructions(code)
    jumps = ((step.argval, step.offset) for step in steps if step.opcode in dis.hasjrel)
    return tuple((target, offset) for target, offset in jumps if target <= offset)


def _loop_around(code: CodeType, at: int) -> _Range | None:
    """The outermost loop that contains instruction ``at``."""
    around = [(start, end) for start, end in _loops(code) if start <= at <= end]
    if not around:
        return None
    return min(start for start, _ in around), max(end for _, end in around)


def _is_users(code: CodeType) -> bool:
    return code_owner(code.co_filename) is CodeOwner.USER


@functools.lru_cache(maxsize=1 << 10)
def _inner(code: CodeType) -> tuple[CodeType, ...]:
    """The code objects defined in it, at any depth."""
    own = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return (*own, *(inner for each in own for inner in _inner(each)))
