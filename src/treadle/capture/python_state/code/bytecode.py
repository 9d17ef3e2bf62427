"""Instructions of Python code under the same names for all versions of Python, and static analysis
of them.

    self.__dict__["k"]     ->  LOAD_FAST self; LOAD_ATTR __dict__; LOAD_CONST "k"; SUBSCR
"""

import builtins
import dis
import functools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType
from typing import Any, final


def plain_name(name: str) -> str:
    """A name as written in the user's code."""
    return name.partition(" ")[0]  # no name of anybody's code has a space


_SILENT = frozenset(
    {"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "NOT_TAKEN", "RESUME", "KW_NAMES"}
)
_RENAMED = {
    "LOAD_METHOD": "LOAD_ATTR",
    "LOAD_NAME": "LOAD_GLOBAL",
    "LOAD_CLASSDEREF": "LOAD_DEREF",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_DEREF",
    "LOAD_FROM_DICT_OR_GLOBALS": "LOAD_GLOBAL",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "BINARY_SUBSCR": "SUBSCR",
    "STORE_SUBSCR": "SUBSCR",
    "DELETE_SUBSCR": "SUBSCR",
}
_KEYED_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})
"""Methods of dicts that look at the entry of their first argument alone."""


@final
@dataclass(frozen=True, slots=True)
class Instruction:
    """``op``: its name in every version; ``arg``: a name, a constant or a count."""

    offset: int
    op: str
    arg: Any
    is_target: bool = False


@final
class Instructions:
    """The instructions of one code object, without those that only help the interpreter."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.all = tuple(_normalized(code))
        self._offsets = [step.offset for step in self.all]
        count = code.co_argcount + code.co_kwonlyargcount
        stored = {step.arg for step in self.all if step.op in ("STORE_FAST", "DELETE_FAST")}
        self.fixed = frozenset(code.co_varnames[:count]) - stored
        """Parameters that stay what they were when the frame began."""

    def at(self, offset: int) -> int:
        """The position of the instruction at an offset, or that its caches belong to."""
        return bisect_right(self._offsets, offset) - 1

    def op(self, at: int) -> str:
        """The name of the instruction at a position; empty beyond the end."""
        return self.all[at].op if 0 <= at < len(self.all) else ""

    def key_of(self, at: int) -> Instruction | None:
        """The instruction that loads the only key under which the mapping that instruction ``at``
        makes is looked at. ``None`` if the mapping is passed on, or several entries are read."""
        following = self.op(at + 1)
        if following in ("LOAD_CONST", "LOAD_FAST") and self.op(at + 2) == "SUBSCR":
            return self.all[at + 1]
        if following == "CONTAINS_OP":
            return self._tested(at)
        if following != "LOAD_ATTR" or self.all[at + 1].arg not in _KEYED_METHODS:
            return None
        key, call = self.op(at + 2), at + 3
        if self.op(call) in ("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL"):
            call += 1  # a default
        if key in ("LOAD_CONST", "LOAD_FAST") and self.op(call) == "CALL":
            return self.all[at + 2] if self.all[call].arg == call - at - 2 else None
        return None

    def _tested(self, at: int) -> Instruction | None:
        """Of ``k in x.__dict__`` what loads ``k``."""
        start = at
        while self.op(start) == "LOAD_ATTR":
            start -= 1
        between = self.all[start : at + 2]
        if self.op(start) not in _SIMPLE or any(step.is_target for step in between):
            return None
        before = self.op(start - 1)
        return self.all[start - 1] if before in ("LOAD_CONST", "LOAD_FAST") else None

    def makes(self, at: int, makers: Collection[str]) -> bool:
        """Whether instruction ``at`` takes a ``__dict__`` itself, or calls one of ``makers`` for
        at most one object: another function that gets one might do anything with it."""
        step = self.all[at]
        if step.op == "LOAD_ATTR":
            return step.arg == "__dict__"
        start = at - 1
        if step.op == "CALL" and step.arg == 1:
            while self.op(start) == "LOAD_ATTR":
                start -= 1
            if self.op(start) not in _SIMPLE:
                return False
            start -= 1
        return step.op == "CALL" and step.arg < 2 and self.all[start].arg in makers

    def is_known(self, load: Instruction) -> bool:
        """Whether it loads a constant, or the initial value of a parameter."""
        return load.op == "LOAD_CONST" or (load.op == "LOAD_FAST" and load.arg in self.fixed)


_SIMPLE = frozenset({"LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF"})


def _normalized(code: CodeType) -> Iterator[Instruction]:
    for instruction in dis.get_instructions(code):
        name, target = instruction.opname, instruction.is_jump_target
        if name in _SILENT:
            if target:  # what follows is one
                yield Instruction(instruction.offset, "TARGET", None, is_target=True)
            continue
        if name == "BINARY_OP" and instruction.argrepr == "[]":
            name = "BINARY_SUBSCR"
        names = split_name(name)
        args = instruction.argval if len(names) > 1 else (instruction.argval,)
        for one, arg in zip(names, args, strict=True):
            op = _RENAMED.get(one, one)
            arg = plain_name(arg) if op == "LOAD_GLOBAL" else arg
            yield Instruction(instruction.offset, op, arg, target)


@functools.cache
def split_name(name: str) -> tuple[str, ...]:
    """``LOAD_FAST_BORROW_LOAD_FAST_BORROW`` is two; borrowed and checked loads are loads."""
    parts = name.split("_")
    starts = [at for at, part in enumerate(parts) if part in ("LOAD", "STORE")]
    if "FAST" not in parts or not starts:
        return (name,)
    names = ["_".join(parts[a:b][:2]) for a, b in pairwise([*starts, len(parts)])]
    return tuple(names)


@final
@dataclass(frozen=True, slots=True)
class ReflectiveRead:
    """Where code reads by a name that it does not mention, in a way that no call tells.

    ``kind``: ``dict`` for ``x.__dict__`` of which no single entry is looked at; ``globals`` for
    ``f.__globals__`` and ``frames`` for ``f_globals`` of a frame, with the ``name`` of a single
    entry; ``past`` for ``X.__getattribute__(x, name)``; ``names`` for what reads computed names
    (``attrgetter``). ``owner`` and ``name``: what loads them; ``None`` if that cannot be said.
    """

    kind: str
    owner: Instruction | None = None
    name: Instruction | None = None


def sites(steps: Instructions) -> tuple[ReflectiveRead, ...]:
    """All such reads in a code object."""
    all_sites = (_site(steps, at) for at in range(len(steps.all)))
    return tuple(site for site in all_sites if site is not None)


def _site(steps: Instructions, at: int) -> ReflectiveRead | None:
    step = steps.all[at]
    match step.op, step.arg:
        case "LOAD_ATTR", "__dict__":
            known = _known_key(steps, at)
            return None if known else ReflectiveRead("dict", _loaded(steps, at))
        case "LOAD_ATTR", "__globals__":
            return ReflectiveRead("globals", _loaded(steps, at), _known_key(steps, at))
        case "LOAD_ATTR", "f_globals" | "f_locals":
            return ReflectiveRead("frames", None, _known_key(steps, at))
        case "LOAD_ATTR" | "LOAD_SUPER_ATTR", "__getattribute__":
            return _past(steps, at)
        case "LOAD_ATTR" | "LOAD_GLOBAL" | "IMPORT_FROM", "attrgetter" | "methodcaller":
            return None if _names_are_constants(steps, at) else ReflectiveRead("names")
        case _:
            return None


def _known_key(steps: Instructions, at: int) -> Instruction | None:
    key = steps.key_of(at)
    return key if key is not None and steps.is_known(key) else None


def _loaded(steps: Instructions, at: int) -> Instruction | None:
    """The instruction that loads the object of the attribute that instruction ``at`` takes."""
    return None if steps.all[at].is_target else _known(steps, steps.all[at - 1])


def _known(steps: Instructions, load: Instruction) -> Instruction | None:
    """The instruction that loads an object or a name, if its value is known when a frame begins."""
    return load if load.op == "LOAD_GLOBAL" or steps.is_known(load) else None


def _past(steps: Instructions, at: int) -> ReflectiveRead | None:
    loads = steps.all[at + 1 : at + 3]
    known = [_known(steps, load) for load in loads]
    simple = all(load.op in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_CONST") for load in loads)
    if simple and steps.op(at + 3) == "CALL" and steps.all[at + 3].arg == 2:
        return ReflectiveRead("past", known[0], known[1])
    name = known[0] if steps.op(at + 2) == "CALL" and steps.all[at + 2].arg == 1 else None
    if steps.all[at].op == "LOAD_SUPER_ATTR" or _is_super(steps, at):
        own = steps.code.co_varnames[:1]
        if own and own[0] in steps.fixed:
            return ReflectiveRead("past", Instruction(0, "LOAD_FAST", own[0]), name)
    elif name is not None:
        return None  # a method of the object itself, which hears it
    return ReflectiveRead("past", None, name or _second_constant(steps, at))


_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
"""The instructions before which the arguments of a call are loaded."""


def _second_constant(steps: Instructions, at: int) -> Instruction | None:
    """What loads the second argument of the method that instruction ``at`` takes, where it is
    called at once with two, and that one is a constant."""
    raw = [step for step in dis.get_instructions(steps.code) if step.opname != "CACHE"]
    nth = next(k for k, step in enumerate(raw) if step.offset == steps.all[at].offset)
    if raw[nth].opname != "LOAD_METHOD" and "NULL" not in raw[nth].argrepr:
        return None
    depth = 0  # of the arguments so far
    for before, step in pairwise(raw[nth:]):
        if step.is_jump_target or step.opcode in dis.hasjrel:
            return None
        if depth == 2 and step.arg == 2 and step.opname == _CALL:
            constant = Instruction(before.offset, "LOAD_CONST", before.argval)
            return constant if before.opname == "LOAD_CONST" else None
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth < 0:
            return None
    return None


def _is_super(steps: Instructions, at: int) -> bool:
    """Whether the attribute is one of ``super()``."""
    return steps.op(at - 1) == "CALL" and steps.all[at - 2].arg == "super"


def _names_are_constants(steps: Instructions, at: int) -> bool:
    end = at + 1
    while steps.op(end) == "LOAD_CONST" and _is_plain_name(steps.all[end].arg):
        end += 1
    if steps.all[at].arg == "methodcaller":
        return end > at + 1  # the others are arguments of the method
    return steps.op(end) == "CALL" and steps.all[end].arg == end - at - 1


def _is_plain_name(value: object) -> bool:
    return type(value) is str and "__" not in value


def value_of(
    load: Instruction, arguments: Mapping[str, object], variables: Mapping[str, object]
) -> object:
    """The value that the instruction loads in a frame that begins: a parameter, a global, or a
    builtin."""
    if load.op == "LOAD_CONST":
        return load.arg
    if load.op == "LOAD_FAST":
        return arguments.get(load.arg)
    return variables.get(load.arg, vars(builtins).get(load.arg))
