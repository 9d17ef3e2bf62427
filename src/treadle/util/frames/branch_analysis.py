"""Which outcome of a ``bool()`` call does not raise an error, by the bytecode that makes the call.

::

    if (x < 0).any(): raise ValueError(...)      False
    assert torch.isfinite(loss)                  True
    if not math.isfinite(loss): sys.exit(1)      True, of what isfinite asks
    if loss > 0: loss = loss * 2                 neither answer only raises: None

Both outcomes are followed through the code that asks, and through its callers if it returns the
outcome. An outcome *only raises* if every path from there ends in an exception that no handler of
that function catches. If this cannot be determined, the result is ``None``. The result is only a
good assumption: code that assumes an outcome must still check it.
"""

import builtins
import dis
import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any, final

from treadle.util.frames.frame_variables import variables

_MOST = 4000
"""Instructions that are followed before it counts as not told."""
_NOTHING = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "RESUME", "TO_BOOL"})
"""Leave what is known of the stack as it is: what is known of a value is whether it is true."""
_ASKS_ALL = frozenset({"bool", "all", "any"})
"""Builtins whose result is the answer, if every answer that they get is the same."""
_CALLS = frozenset({"CALL", "PRECALL"})
_EXITS = (sys.exit, *(vars(builtins).get(name, sys.exit) for name in ("exit", "quit")))
"""Functions that only raise, ``SystemExit``."""
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_TO_BOOL = 16
"""The bit of ``COMPARE_OP`` by which its result is asked as well, since Python 3.13."""

Truth = bool | None
"""Whether a value is true, where that is known."""


def answer_without_error(frame: FrameType, is_ours: Callable[[FrameType], bool]) -> bool | None:
    """The answer after which the code of ``frame``, which asks for the truth of a value just now,
    does not only raise; ``None`` if both may go on, or that cannot be told. ``is_ours``: frames
    that are not followed into."""
    raises = {answer: _Follower(is_ours).from_question(frame, answer) for answer in (True, False)}
    if raises[True] is raises[False]:
        return None
    return not raises[True]


@final
@dataclass(frozen=True, slots=True)
class _Code:
    """The instructions of a code object, and where each exception is handled."""

    instructions: tuple[dis.Instruction, ...]
    offsets: tuple[int, ...]
    handlers: tuple[Any, ...]

    @staticmethod
    @functools.lru_cache(maxsize=1 << 7)
    def of(code: CodeType) -> "_Code":
        shown: Any = dis.Bytecode(code)
        shown_instructions = tuple(shown)
        return _Code(
            shown_instructions,
            tuple(instruction.offset for instruction in shown_instructions),
            tuple(shown.exception_entries),
        )

    def at(self, offset: int) -> int:
        """The number of the instruction at ``offset`` or whose cache is there, or of the one that
        it is a prefix of."""
        at = max(bisect_right(self.offsets, offset) - 1, 0)
        while at < len(self.offsets) and self.instructions[at].opname == "EXTENDED_ARG":
            at += 1
        return at

    def handler(self, at: int) -> int | None:
        offset = self.offsets[at]
        targets = [entry.target for entry in self.handlers if entry.start <= offset < entry.end]
        return self.at(targets[-1]) if targets else None


@final
@dataclass(frozen=True, slots=True)
class _ProgramPoint:
    """Before instruction ``at`` of the code of a frame, with what is known of the end of the stack
    and of variables."""

    frame: FrameType
    at: int
    stack: tuple[Truth, ...]
    names: Mapping[str, Truth]

    def after(self, stack: tuple[Truth, ...], names: Mapping[str, Truth]) -> "_ProgramPoint":
        """Before the next instruction."""
        return _ProgramPoint(self.frame, self.at + 1, stack, names)

    def identity(self) -> tuple[object, ...]:
        """Equal for places from which the same follows."""
        return id(self.frame), self.at, self.stack, tuple(sorted(self.names.items(), key=str))


@dataclass
class _Follower:
    """Follows one answer. What is not known to only raise does not."""

    is_ours: Callable[[FrameType], bool]

    def from_question(self, frame: FrameType, answer: bool) -> bool:
        """Whether ``answer`` to what ``frame`` asks only raises."""
        code = _Code.of(frame.f_code)
        at = code.at(frame.f_lasti)
        if at >= len(code.instructions):
            return False
        asking = code.instructions[at]
        name = asking.opname
        names = _known(frame)
        if name == "TO_BOOL" or (name == "COMPARE_OP" and _compares_to_bool(asking)):
            return self._only_raises(_ProgramPoint(frame, at + 1, (answer,), names))
        if name == "UNARY_NOT":
            return self._only_raises(_ProgramPoint(frame, at + 1, (not answer,), names))
        if "IF_TRUE" in name or "IF_FALSE" in name:
            return self._only_raises(_ProgramPoint(frame, at, (answer,), names))
        if name in _CALLS and _called(code, at) in _ASKS_ALL:
            return self._only_raises(_ProgramPoint(frame, _after_call(code, at), (answer,), names))
        return False

    def _only_raises(self, start: _ProgramPoint) -> bool:
        """Whether every way on from ``start`` raises."""
        pending = [start]
        seen: set[object] = set()
        while pending:
            place = pending.pop()
            identity = place.identity()
            if identity in seen:
                continue  # the ways out of a loop are followed where it was met first
            seen.add(identity)
            ways = None if len(seen) > _MOST else self._ways_on(place)
            if ways is None:
                return False
            pending += ways
        return True

    def _ways_on(self, place: _ProgramPoint) -> list[_ProgramPoint] | None:
        """Where the instruction at ``place`` may lead: nowhere if it raises; ``None`` if that is
        not known, or goes on with something else than this answer."""
        code = _Code.of(place.frame.f_code)
        if place.at >= len(code.instructions):
            return None
        instruction = code.instructions[place.at]
        name = instruction.opname
        stack, names = place.stack, place.names
        if name in ("RAISE_VARARGS", "RERAISE") or _exits(place.frame, code, place.at):
            handler = code.handler(place.at)
            return [] if handler is None else [_ProgramPoint(place.frame, handler, (), {})]
        if name.startswith("RETURN"):
            value = instruction.argval if name == "RETURN_CONST" else _top(stack)
            if name not in ("RETURN_VALUE", "RETURN_CONST") or not isinstance(value, bool):
                return None
            return self._returned(place.frame.f_back, value)
        if name == "FOR_ITER" or "JUMP" in name:
            ways = _jumps_to(instruction, place.at, code, stack)
            return [_ProgramPoint(place.frame, to, rest, names) for to, rest in ways]
        if _jumps(instruction) or "YIELD" in name:
            return None
        if _top(stack) is not None and name in _CALLS and _called(code, place.at) == "bool":
            return [place.after(stack[-1:], names)]
        return [place.after(*_after(instruction, stack, names))]

    def _returned(self, frame: FrameType | None, value: bool) -> list[_ProgramPoint] | None:
        """Where ``frame`` goes on with ``value`` from what it called; ``None`` if not known."""
        if frame is None or self.is_ours(frame):
            return None
        code = _Code.of(frame.f_code)
        at = code.at(frame.f_lasti)
        if at >= len(code.instructions):
            return None
        name = code.instructions[at].opname
        if not name.startswith(("CALL", "PRECALL", "LOAD_ATTR")):
            return None
        return [_ProgramPoint(frame, _after_call(code, at), (value,), _known(frame))]


def called_name(frame: FrameType) -> str:
    """The global name of what ``frame`` calls just now; empty if it calls nothing, or that is not
    plain."""
    code = _Code.of(frame.f_code)
    at = code.at(frame.f_lasti)
    if at >= len(code.instructions) or code.instructions[at].opname not in _CALLS:
        return ""
    return _called(code, at)


def _exits(frame: FrameType, code: _Code, at: int) -> bool:
    """Whether the instruction at ``at`` calls ``sys.exit``, by any global name or as a module's."""
    if code.instructions[at].opname not in _CALLS:
        return False
    path = _called_path(code, at)
    found: object = None
    for number, name in enumerate(path):
        if number == 0:
            found = frame.f_globals.get(name, frame.f_builtins.get(name))
        else:
            found = vars(found).get(name) if isinstance(found, ModuleType) else None
    return any(found is each for each in _EXITS)


def calls_value(frame: FrameType) -> bool:
    """Whether ``frame`` calls just now what no global name is: an attribute, a variable of its
    own."""
    code = _Code.of(frame.f_code)
    at = code.at(frame.f_lasti)
    if at >= len(code.instructions) or code.instructions[at].opname not in _CALLS:
        return False
    return not _called(code, at)


def _known(frame: FrameType) -> dict[str, Truth]:
    """Which of the variables of a frame are true; a stand-in for a ``bool`` says nothing yet."""
    return {key: flag for key, flag in variables(frame).items() if type(flag) is bool}


def _top(stack: tuple[Truth, ...]) -> Truth:
    return stack[-1] if stack else None


def _jumps_to(
    instruction: dis.Instruction, at: int, code: _Code, stack: tuple[Truth, ...]
) -> list[tuple[int, tuple[Truth, ...]]]:
    """Where a jump may lead, and the stack there."""
    name = instruction.opname
    there, on = code.at(instruction.argval), at + 1
    if name == "FOR_ITER":
        return [(there, ()), (on, ())]
    if "_IF_" not in name:
        return [(there, stack)]
    value = _top(stack)
    rest = stack[:-1]
    kept = stack if "OR_POP" in name else rest
    if value is None:
        return [(there, kept), (on, rest)]
    jumps = "NOT_NONE" in name if "NONE" in name else value is ("IF_TRUE" in name)
    return [(there, kept) if jumps else (on, rest)]


def _after(
    instruction: dis.Instruction, stack: tuple[Truth, ...], names: Mapping[str, Truth]
) -> tuple[tuple[Truth, ...], Mapping[str, Truth]]:
    """What is known after an instruction that does not jump."""
    name = instruction.opname
    if name in _NOTHING:
        return stack, names
    if name == "UNARY_NOT":
        value = _top(stack)
        return (*stack[:-1], None if value is None else not value), names
    if name == "COPY":
        return (*stack, _top(stack) if instruction.arg == 1 else None), names
    if name == "POP_TOP":
        return stack[:-1], names
    if name == "WITH_EXCEPT_START":
        return (*stack, False), names  # a context that does not swallow the exception
    if name == "LOAD_CONST":
        return (*stack, instruction.argval if isinstance(instruction.argval, bool) else None), names
    if name.startswith(("LOAD_FAST", "LOAD_DEREF")) and isinstance(instruction.argval, str):
        return (*stack, names.get(instruction.argval)), names
    if name in ("STORE_FAST", "STORE_DEREF"):
        return stack[:-1], {**names, instruction.argval: _top(stack)}
    if name.startswith(("STORE_FAST", "DELETE_FAST", "LOAD_FAST")):
        gone = (
            instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        )
        return (), {key: value for key, value in names.items() if key not in gone}
    return (), names


def _compares_to_bool(instruction: dis.Instruction) -> bool:
    return "TO_BOOL" in dis.opmap and bool((instruction.arg or 0) & _TO_BOOL)


def _after_call(code: _Code, at: int) -> int:
    """The instruction after a call; in Python 3.11 one has two."""
    return at + 2 if code.instructions[at].opname == "PRECALL" else at + 1


def _called(code: _Code, at: int) -> str:
    """The global name of what the call at ``at`` calls; empty if that is not plain."""
    path = _called_path(code, at)
    return path[0] if len(path) == 1 else ""


def _called_path(code: _Code, at: int) -> tuple[str, ...]:
    """The global name of what the call at ``at`` calls, and the attributes by which it is found
    there (``sys.exit``); empty if that is not plain. Backwards to where the stack was before the
    callee."""
    at -= code.instructions[at - 1].opname == "PRECALL"
    call = code.instructions[at]
    height = (call.arg or 0) + 2  # the callee, what may be beside it, and the arguments
    targets = {instruction.argval for instruction in code.instructions if _jumps(instruction)}
    for back in range(at - 1, -1, -1):
        earlier = code.instructions[back]
        if _jumps(earlier):
            return ()
        if earlier.opname == "EXTENDED_ARG":
            continue
        height -= dis.stack_effect(earlier.opcode, earlier.arg)
        if height == 0:
            first = back + (earlier.opname == "PUSH_NULL")
            callee = code.instructions[first]
            parts = [each for each in code.instructions[first + 1 : at] if _goes_on(callee, each)]
            is_plain = callee.opname in ("LOAD_GLOBAL", "LOAD_NAME") and all(
                part.opname in _ATTRIBUTES for part in parts
            )
            return tuple(str(each.argval) for each in (callee, *parts)) if is_plain else ()
        if earlier.offset in targets:
            return ()
    return ()


def _goes_on(callee: dis.Instruction, later: dis.Instruction) -> bool:
    """Whether ``callee`` is only where what is called begins: ``f.g(x)``, ``f[0](x)``."""
    begin, end = callee.positions, later.positions
    if begin is None or end is None or begin.col_offset is None:
        return False
    is_same = (begin.lineno, begin.col_offset) == (end.lineno, end.col_offset)
    return is_same and not later.opname.startswith(("CALL", "PRECALL", "KW_NAMES", "PUSH_NULL"))


def _jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
