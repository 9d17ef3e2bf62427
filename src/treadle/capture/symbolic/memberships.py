"""Whether a substitute number is a key of a dict or in a set: a branch.

::

    if self.n in {30, 60}: ...      asks hash(n), and compares n with what has the same hash

A hash would make the number itself part of the graph. The bytecode that asks says in what it is
looked for, and the decision is whether it is there.
"""

import builtins
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from treadle.capture.python_state.code.bytecode import Instructions
from treadle.capture.python_state.plain_values import is_plain
from treadle.util.frames.frame_variables import variables

_LOOKS = (dict.__contains__, set.__contains__, frozenset.__contains__)


class _NotKnown(Exception):
    """The value of an expression is not known without running it."""


@final
@dataclass(frozen=True, slots=True)
class Membership:
    """Whether a number is one of ``values``."""

    values: frozenset[object]

    def __call__(self, number: object) -> bool:
        return number in self.values


def membership_asked(frame: FrameType, number: object) -> Membership | None:
    """In what ``frame`` looks for ``number`` just now, by ``in``; ``None`` if that is not told."""
    steps = Instructions(frame.f_code)
    at = steps.at(frame.f_lasti)
    if steps.op(at) != "CONTAINS_OP":
        return None
    try:
        container, before = _operand(steps, at - 1, frame)
        left, _ = _operand(steps, before, frame)
    except _NotKnown:
        return None
    kind: object = type(container)
    if left is not number or not issubclass(kind, dict | set | frozenset):
        return None
    if kind.__contains__ not in _LOOKS or not all(map(is_plain, container)):
        return None
    return Membership(frozenset(container))


def _operand(steps: Instructions, at: int, frame: FrameType) -> tuple[Any, int]:
    """What the expression that ends at an instruction gives: a constant, a variable, or attributes
    of one that it has itself; and the position before it."""
    if at < 0 or steps.all[at].is_target:
        raise _NotKnown
    arg = steps.all[at].arg
    match steps.op(at):
        case "LOAD_CONST":
            return arg, at - 1
        case "LOAD_FAST" | "LOAD_DEREF" if arg in variables(frame):
            return variables(frame)[arg], at - 1
        case "LOAD_GLOBAL" if arg in frame.f_globals or arg in vars(builtins):
            return frame.f_globals.get(arg, vars(builtins).get(arg)), at - 1
        case "LOAD_ATTR":
            owner, before = _operand(steps, at - 1, frame)
            try:
                held = object.__getattribute__(owner, "__dict__")
            except AttributeError:
                raise _NotKnown from None
            if not isinstance(held, dict) or arg not in held:
                raise _NotKnown
            return held[arg], before
        case _:
            raise _NotKnown
