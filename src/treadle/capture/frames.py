"""What code a run enters: by every frame of it, the names that it mentions and the globals that it
uses. Nothing that Python executes in the thread of the run is missed: a profile hook sees it all.
"""

import cProfile
import dis
import functools
import logging
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

_READ = frozenset(
    {
        "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE",
        "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS",  # 3.12 and later
    }
)  # fmt: skip
_ASSIGNED = frozenset({"STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"})
REFLECTION = frozenset(
    {
        "vars", "dir", "__dict__", "attrgetter", "methodcaller", "__getattribute__", "getmembers",
        "globals", "eval", "exec", "__globals__", "getattr_static",
    }
)  # fmt: skip
"""Names by which code reads attributes that it does not name."""

_OF_LIBRARY = frozenset({"__reduce_ex__", "getmembers", "getattr_static"})
"""Those that tell of the library's code: ``copy``, ``pickle`` and ``inspect`` look at all of an
object. What else it mentions it reads of its own objects."""

_TORCH = str(Path(torch.__file__).parent)
_NUMPY = str(Path(np.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
_MACHINERY = tuple(
    f"{_TORCH}/{each}"
    for each in (
        "_dispatch", "_dynamo", "_export", "_functorch", "_guards", "_higher_order_ops",
        "_inductor",
        "_library", "_logging", "_ops", "_prims", "_refs", "_subclasses", "fx", "_decomp", "_meta",
        "utils/_", "overrides.py", "_tensor.py", "_compile.py", "library.py", "types.py",
    )
) + tuple(str(Path(_TORCH).parent / each) for each in ("sympy", "mpmath"))  # fmt: skip
"""Parts of torch that trace: they see tensors, and no object of the user's."""


class Whose(IntEnum):
    """Whose code runs: ours and the machinery of the trace read nothing of the user's."""

    OURS = 0
    TORCH = 1
    STDLIB = 2
    USER = 3


@functools.cache
def whose(filename: str) -> Whose:
    """By the file of the code."""
    if filename.startswith((_OURS, *_MACHINERY)):
        return Whose.OURS
    if filename.startswith(_TORCH):
        return Whose.TORCH
    if filename.startswith(("<frozen", _NUMPY)):
        return Whose.STDLIB
    for folder in _STDLIB:
        rest = filename.removeprefix(folder)
        if rest != filename and not rest.lstrip("/").startswith(_INSTALLED):
            return Whose.STDLIB
    return Whose.USER


@dataclass(frozen=True, slots=True)
class Mentions:
    """What a piece of code names. ``reads``: variables of others that it may need; ``assigns``:
    those that it sets; ``names``: attributes, keys and texts of its own; ``modules``: what it may
    import or look up as modules."""

    names: frozenset[str]
    reads: frozenset[str]
    assigns: frozenset[str]
    modules: frozenset[str]


@functools.lru_cache(maxsize=1 << 14)
def mentions(code: CodeType) -> Mentions:
    """``code`` alone; code within it is entered for itself."""
    steps = list(dis.get_instructions(code))
    free = frozenset(code.co_freevars)
    reads, assigns = (
        frozenset(
            step.argval
            for step in steps
            if step.opname in kind and ("GLOBAL" in step.opname or step.opname == "LOAD_NAME"
                                        or step.argval in free)
        )
        for kind in (_READ, _ASSIGNED)
    )  # fmt: skip
    names = frozenset(code.co_names) | frozenset(_texts(code.co_consts))
    imported = {step.argval for step in steps if step.opname == "IMPORT_NAME"}
    looks_up = names & {"modules", "import_module", "__import__"}
    return Mentions(names, reads, assigns, names if looks_up else frozenset(imported))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case tuple() | frozenset():
            for each in value:
                yield from _texts(each)
        case _:
            pass


@dataclass
class Entered:
    """The code that a run entered. ``spaces``: by their ids, globals and the names in them that
    were read; ``deep``: those of code that is neither torch's nor the library's."""

    names: set[str] = field(default_factory=set[str])
    codes: set[CodeType] = field(default_factory=set[CodeType])
    spaces: dict[int, tuple[dict[str, Any], set[str], Whose]] = field(
        default_factory=dict[int, tuple[dict[str, Any], set[str], Whose]]
    )
    modules: set[str] = field(default_factory=set[str])
    reflects: bool = False  # attributes are read by names that no code mentions
    resumed: str = ""  # a generator that was there before the run, and has been advanced

    def note(self, code: CodeType, space: dict[str, Any]) -> bool:
        """Whether this code is new."""
        if code in self.codes and id(space) in self.spaces:
            return False
        self.codes.add(code)
        found, owner = mentions(code), whose(code.co_filename)
        self.names |= found.names
        if owner is Whose.USER:
            self.modules |= found.modules
        if found.names & (REFLECTION if owner is Whose.USER else _OF_LIBRARY):
            own = code.co_name in ("__getattribute__", "__getattr__")
            self.reflects |= not own or bool(found.names & (REFLECTION - {"__getattribute__"}))
        _, known, _ = self.spaces.setdefault(id(space), (space, set(), owner))
        known |= found.reads - frozenset(code.co_freevars)
        return True


class FrameRecorder:
    """While it runs, ``entered`` grows with every frame, and ``meets(frame)`` is called for those
    of the user's code before they begin."""

    def __init__(self, meets: Callable[[FrameType], None]) -> None:
        self.entered = Entered()
        self._meets = meets
        self._before: Any = None
        self._active = False
        self._busy = False
        self._generators: dict[int, FrameType] = {}  # held, so that no id is used twice

    def __enter__(self) -> "FrameRecorder":
        self._before = sys.getprofile()
        self._active = True
        threading.setprofile(self._on_event)  # threads that the step starts
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        self._generators.clear()

    def rest(self) -> None:
        """The step's own code is done."""
        if self._active:
            self._active = False
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)
            if isinstance(self._before, cProfile.Profile):
                self._before.enable()
            else:
                sys.setprofile(self._before)

    def listen(self) -> None:
        """Hear this thread as well: one of the autograd engine's."""
        if self._active and sys.getprofile() is None:
            sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._active:
            sys.setprofile(None)  # a thread of the engine's that outlives the run
            return
        if event != "call" or self._busy:
            return
        self._busy = True  # what looking at objects runs is not the step's
        try:
            self._enters(frame)
        finally:
            self._busy = False

    def _enters(self, frame: FrameType) -> None:
        code = frame.f_code
        owner = whose(code.co_filename)
        if owner is Whose.OURS or _logs(frame):
            return
        if code.co_flags & _RESUMABLE:
            self._resumes(frame)
        self.entered.note(code, frame.f_globals)
        if owner is Whose.USER:
            self.entered.names.update(
                value for value in frame.f_locals.values() if type(value) is str
            )
            self._meets(frame)

    def _resumes(self, frame: FrameType) -> None:
        """A generator's frame is entered again at each value; the first time from its start."""
        if id(frame) not in self._generators:
            self._generators[id(frame)] = frame
            if frame.f_lasti > _first(frame.f_code):
                self.entered.resumed = frame.f_code.co_qualname


def _logs(frame: FrameType) -> bool:
    """Whether this is a handler of a log or a warning, called from one of the last frames."""
    caller = frame.f_back
    for _ in range(6):
        if caller is None:
            return False
        if caller.f_code.co_filename in _LOGS:
            return True
        caller = caller.f_back
    return False


_LOGS = (str(logging.__file__), str(warnings.__file__))
_RESUMABLE = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators


@functools.lru_cache(maxsize=1 << 10)
def _first(code: CodeType) -> int:
    """Up to where a frame is when it begins: at its first ``RESUME``."""
    return next((s.offset for s in dis.get_instructions(code) if s.opname == "RESUME"), 0)
