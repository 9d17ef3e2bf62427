"""The names that a code object mentions, found without running it."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from treadle.capture.python_state.code.bytecode import (
    Instructions,
    ReflectiveRead,
    plain_name,
    sites,
)


@dataclass(frozen=True, slots=True)
class CodeReferences:
    """What a piece of code names. ``reads``: variables of its module or of Python that it may
    need; ``assigns``: those that it sets; ``names``: attributes, keys and texts of its own;
    ``modules``: what it may import or look up as modules; ``typed``: of which of its parameters it
    asks ``type``, and ``asks_types``: of what else it may ask it; ``calls_type``: whether it may
    call it by that name, which is not yet another's (``number_calls``). ``sites``: where it reads
    by names that it does not mention."""

    names: frozenset[str]
    reads: frozenset[str]
    assigns: frozenset[str]
    modules: frozenset[str]
    typed: frozenset[str]
    asks_types: bool
    calls_type: bool
    sites: tuple[ReflectiveRead, ...]


@functools.lru_cache(maxsize=1 << 14)
def references_in(code: CodeType) -> CodeReferences:
    """The references of ``code`` itself; nested code objects are entered separately."""
    steps = Instructions(code)
    named = {op: frozenset(s.arg for s in steps.all if s.op == op) for op in _NAMING}
    names = frozenset(map(plain_name, code.co_names)) | frozenset(_texts(code.co_consts))
    looks_up = names & {"modules", "import_module", "__import__"}
    typed, asks = _typed(steps)
    types = any(s.op == "LOAD_GLOBAL" and s.arg == "type" for s in steps.all)
    return CodeReferences(
        names=names,
        reads=named["LOAD_GLOBAL"],
        assigns=named["STORE_GLOBAL"] | named["DELETE_GLOBAL"],
        modules=names if looks_up else named["IMPORT_NAME"],
        typed=typed,
        asks_types=asks,
        calls_type=types,
        sites=sites(steps),
    )


_NAMING = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")


def _typed(steps: Instructions) -> tuple[frozenset[str], bool]:
    """The parameters ``p`` of each ``type(p)``, as far as they stay what they were; and whether
    ``type`` is used in another way. What it answers no object can decide."""
    names: set[str] = set()
    asks = False
    for at, step in enumerate(steps.all[:-2]):
        if step.op not in ("LOAD_GLOBAL", "LOAD_DEREF") or plain_name(step.arg) != "type":
            continue
        argument, call = steps.all[at + 1 : at + 3]
        simple = argument.op == "LOAD_FAST" and argument.arg in steps.fixed
        if simple and call.op == "CALL" and call.arg == 1:
            names.add(argument.arg)
        else:
            asks = True
    return frozenset(names), asks


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case tuple() | frozenset():
            for part in value:
                yield from _texts(part)
        case _:
            pass
