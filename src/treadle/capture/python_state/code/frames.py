"""The code that a run enters: for each frame, the names that it mentions and the globals that it
uses. Python's frame events report everything that is executed in the thread of the run.
"""

import collections
import dataclasses
import dis
import functools
import sysconfig
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import _bootstrap  # pyright: ignore[reportAttributeAccessIssue]
from sys import _getframe, gettrace
from types import CodeType, FrameType
from typing import Protocol

import torch

from treadle.capture.explain_errors import Line, running_line, show_line
from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.code.bytecode import ReflectiveRead
from treadle.capture.python_state.code.code_references import CodeReferences, references_in
from treadle.capture.python_state.code.distributions import is_installed
from treadle.capture.python_state.code.frame_events import frame_events
from treadle.capture.python_state.system import is_introspection_frame, os_call_name
from treadle.capture.python_state.threads import Threads
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.compat.fake import is_traced
from treadle.util.frames.frame_variables import variables
from treadle.util.package import folder_of, is_machinery_file

_TORCH = folder_of(torch)
_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
_TRACING = all_of(lambda integration: integration.tracing_files)
LIBRARY_FILES = all_of(lambda integration: integration.library_files)
"""Installed code that counts as Python's own library."""
_NAMED_TUPLE = ("_tuple_new",)
"""The names that the ``__new__`` of a named tuple mentions."""
_IMPORTING: CodeType = vars(_bootstrap)["_find_and_load_unlocked"].__code__
_REPORTING = frozenset(all_of(lambda integration: integration.reporting_files))


class CodeOwner(IntEnum):
    """The owner of code that runs. Our own code and the tracing machinery read no state of the
    user's."""

    OURS = 0
    TORCH = 1
    STDLIB = 2
    INSTALLED = 3
    USER = 4


@functools.cache
def code_owner(filename: str) -> CodeOwner:
    """The owner of code, by its file."""
    if is_machinery_file(filename) or filename.startswith(_TRACING):
        return CodeOwner.OURS
    if filename.startswith(_TORCH):
        return CodeOwner.TORCH
    if filename.startswith(("<frozen", *LIBRARY_FILES)):
        return CodeOwner.STDLIB
    if any(f"/{folder}/" in filename for folder in _INSTALLED):
        return CodeOwner.INSTALLED
    if filename.startswith(_STDLIB):
        return CodeOwner.STDLIB
    return CodeOwner.INSTALLED if is_installed(filename) else CodeOwner.USER


@dataclass
class ExecutionRecord:
    """The code that a run entered. ``spaces``: globals by their ids, with the names in them that
    were read; ``deep``: those read by code that is neither torch's nor the standard library's."""

    names: set[str] = field(default_factory=set[str])
    theirs: set[str] = field(default_factory=set[str])  # those of users' and installed code
    codes: dict[tuple[int, int], CodeType] = field(
        default_factory=dict[tuple[int, int], CodeType]
    )  # by their ids and those of globals: a code's own hash goes through all of it
    their_codes: dict[int, CodeType] = field(default_factory=dict[int, CodeType])  # by their ids
    spaces: dict[int, tuple[dict[str, object], set[str], CodeOwner]] = field(
        default_factory=dict[int, tuple[dict[str, object], set[str], CodeOwner]]
    )
    modules: set[str] = field(default_factory=set[str])
    any_name: bool = False  # what hears no reading is read by names that cannot be said
    past: bool = False  # objects are read past what hears their reading
    past_names: set[str] = field(default_factory=set[str])  # likewise, under these names alone
    whole: dict[int, object] = field(default_factory=dict[int, object])
    """Objects whose reads cannot be watched and all of whose attributes were read."""
    whole_spaces: set[int] = field(default_factory=set[int])  # likewise, globals
    asks_types: bool = False  # of a value that stands for another one, ``type`` may be asked
    calls_type: dict[int, tuple[CodeType, ...]] = field(
        default_factory=dict[int, tuple[CodeType, ...]]
    )
    """Code that may ask a traced tensor for its type, by its id, with the code of the frames around
    it."""
    resumed: str = ""  # a generator that was there before the run, and has been advanced
    resumed_at: str = ""  # by which line of the user's

    def knows(self, code: CodeType, space: dict[str, object]) -> bool:
        """Whether the code was entered before."""
        return (id(code), id(space)) in self.codes

    def note(self, code: CodeType, space: dict[str, object], owner: "CodeOwner") -> None:
        """Note that ``code`` of ``owner`` runs on the globals ``space``."""
        if self.knows(code, space):
            return
        self.codes[id(code), id(space)] = code
        references = references_in(code)
        self.names |= references.names
        if owner >= CodeOwner.INSTALLED:
            self.their_codes[id(code)] = code
            self.theirs |= references.names
            self.modules |= references.modules
        _, known, _ = self.spaces.setdefault(id(space), (space, set(), owner))
        known |= references.reads - frozenset(code.co_freevars)


class HearsReflection(Protocol):
    """Is told of code that may read by names that no code mentions. ``machinery``: code around the
    run that belongs to no file and no module, which the tracer evaluates."""

    machinery: frozenset[CodeType]

    def enters(self, frame: FrameType) -> None:
        """Called when any code begins."""
        ...

    def looks(self, frame: FrameType, sites: Sequence[ReflectiveRead], owner: CodeOwner) -> None:
        """Called when code of the user's or of installed packages begins that may make such reads
        at ``sites``."""
        ...

    def calls(self, frame: FrameType, function: object) -> None:
        """Called when code calls a C function."""
        ...


class _Seen:
    """The mark of one recorder on frames: a trace function that traces nothing."""

    def __call__(self, *_: object) -> None: ...


class FrameRecorder:
    """While it runs, ``executed`` grows with every frame, and ``meets(frame)`` is called for those
    of the user's code and of what they installed before they begin. ``reflection`` is called with
    each frame and each call that may read by names that no code mentions."""

    def __init__(
        self,
        executed: ExecutionRecord,
        meets: Callable[[FrameType], None],
        threads: Threads,
        reflection: HearsReflection,
    ) -> None:
        self.executed = executed
        self._meets = meets
        self._reflection = reflection
        self._threads = threads
        self.asked: tuple[str, Line] | None = None  # of the operating system, by the user's code
        self._told: set[tuple[int, int]] = set()  # by ids, of torch and the library: all is known
        self._mentions: dict[int, tuple[CodeType, CodeReferences]] = {}
        self._events = frame_events(self._enters, self._calls, _is_ours_alone, _is_silent)
        self._seen = _Seen()
        self._traced: dict[int, FrameType] = {}  # generators' frames that cannot be marked
        self._below: list[FrameType] = []
        self._imports = False  # whether the run is the first to import anything

    def __enter__(self) -> "FrameRecorder":
        around = list(callers(_getframe(1)))
        self._below = [frame for frame in around if _is_import(frame)]
        ours = [at for at, frame in enumerate(around) if _is_ours(frame)]
        inside = around[: max(ours, default=0)]  # of the call of ours that the user has made
        bare = (frame.f_code for frame in inside if "__name__" not in frame.f_globals)
        self._reflection.machinery = frozenset(bare)
        self._events.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        self._traced.clear()
        self._below.clear()

    def rest(self) -> None:
        """The step's own code has run."""
        self._events.end()

    def listen(self) -> None:
        """Record this thread as well, one of the autograd engine's."""
        self._threads.follow()
        self._events.listen()

    def pause(self) -> bool:
        """Stop recording in this thread until ``resume``, while only the machinery's code runs;
        whether frames were recorded before."""
        return self._events.pause()

    def resume(self) -> None:
        """Record frames again, after ``pause`` returned true."""
        self._events.resume()

    def _enters(self, frame: FrameType) -> None:
        """Called when a frame begins."""
        self._threads.enters(frame)
        code, key = frame.f_code, (id(frame.f_code), id(frame.f_globals))
        self._reflection.enters(frame)
        if key in self._told:
            return
        if _makes_named_tuple(code, frame.f_globals):
            self._told.add(key)
            return
        imports = _is_import(frame)
        self._imports = self._imports or imports
        owner = code_owner(file_of(frame))
        if owner is CodeOwner.OURS:
            return
        known = self.executed.knows(code, frame.f_globals)
        if not known and self._is_introspection_frame(frame):
            return
        resumable = bool(code.co_flags & _RESUMABLE)
        if resumable:
            self._resumes(frame)
        if owner >= CodeOwner.INSTALLED:
            arguments = variables(frame)
            references = self._mentioned(code)
            self._asks_types(references, arguments, owner)
            if references.calls_type and id(code) not in self.executed.calls_type:
                self._calls_type(frame, owner)
            texts = {value for value in arguments.values() if type(value) is str}
            new = not texts <= self.executed.names
            self.executed.names |= texts
            if not known or new:
                self.executed.note(code, frame.f_globals, owner)
                self._meets(frame)
            if references.sites:
                self._reflection.looks(frame, references.sites, owner)
            return
        if not known and not _is_executed_text(code):
            self.executed.note(code, frame.f_globals, owner)
        if not imports and not resumable:
            self._told.add(key)

    def _mentioned(self, code: CodeType) -> CodeReferences:
        """``references_in`` without hashing the code, for code that is entered often."""
        known = self._mentions.get(id(code))
        if known is None:
            known = self._mentions[id(code)] = code, references_in(code)
        return known[1]

    def _asks_types(
        self, references: CodeReferences, arguments: Mapping[str, object], owner: CodeOwner
    ) -> None:
        """Whether ``type`` is asked of a number that stands in: of an argument, which can be
        seen; or of something that users' code got in other ways, or installed code was given."""
        asked = any(is_stand_in(arguments.get(name)) for name in references.typed)
        if not asked and (
            references.asks_types or any(value is type for value in arguments.values())
        ):
            asked = owner is CodeOwner.USER or any(map(is_stand_in, arguments.values()))
        self.executed.asks_types |= asked

    def _calls_type(self, frame: FrameType, owner: CodeOwner) -> None:
        """A traced tensor is of another class than the user's own. Installed code has it from its
        arguments."""
        if owner is CodeOwner.USER or any(map(_is_traced_tensor, variables(frame).values())):
            around = tuple(caller.f_code for caller in callers(frame))
            self.executed.calls_type[id(frame.f_code)] = around

    def _resumes(self, frame: FrameType) -> None:
        """A generator's frame is entered again at each value; the first time from its start. It is
        marked and not held: from Python 3.12 on, a frame that is held beyond its end holds those
        of all its callers, and so all of their values."""
        if frame.f_trace is self._seen or id(frame) in self._traced:
            return
        if gettrace() is None:
            frame.f_trace = self._seen
        else:  # a debugger's or a coverage tool's place
            self._traced[id(frame)] = frame
        if frame.f_lasti > _first(frame.f_code):
            self.executed.resumed = frame.f_code.co_qualname
            self.executed.resumed_at = show_line(running_line(frame.f_back))

    def _calls(self, frame: FrameType, function: object) -> None:
        """Called when code in ``frame`` calls a C function."""
        self._reflection.calls(frame, function)
        name = "" if self.asked is not None else os_call_name(function)
        if not name or self.is_importing(frame):
            return
        for caller in callers(frame):
            owner = code_owner(file_of(caller))
            if (
                is_of_logs(caller)
                or is_introspection_frame(caller)
                or CodeOwner.STDLIB != owner < CodeOwner.USER
            ):
                return
            if owner is CodeOwner.USER:
                self.asked = name, (caller.f_code.co_filename, caller.f_lineno)
                return

    def _is_introspection_frame(self, frame: FrameType) -> bool:
        """Whether it runs for a handler of a log or a warning, or for a module that is imported
        for the first time: neither is the step."""
        return self.is_importing(frame) or any(map(is_of_logs, callers(frame)))

    def is_importing(self, frame: FrameType) -> bool:
        """Whether it runs for a module that the run is the first to import."""
        if not self._imports:
            return False
        caller: FrameType | None = frame
        while caller is not None:  # without a call for each: it is asked for every read
            if caller.f_code is _IMPORTING and caller not in self._below:
                return True
            caller = caller.f_back
        return False


def _is_silent(code: CodeType) -> bool:
    """Whether ``FrameRecorder`` can ignore all calls in it."""
    return _owner_by_name(code) < CodeOwner.STDLIB


def _is_ours_alone(code: CodeType) -> bool:
    """Whether ``FrameRecorder`` can ignore everything that it does."""
    return _owner_by_name(code) is CodeOwner.OURS


def _owner_by_name(code: CodeType) -> CodeOwner:
    """The owner of code, if the name of its file decides it."""
    name = code.co_filename
    return CodeOwner.USER if name.startswith("<") else code_owner(name)


def _makes_named_tuple(code: CodeType, space: Mapping[str, object]) -> bool:
    """Whether it is the ``__new__`` that ``collections.namedtuple`` made: it reads nothing, belongs
    to no file and to no module, and what it does the fields of its class say."""
    return (
        code.co_names == _NAMED_TUPLE
        and space.get("_tuple_new") is tuple.__new__
        and code.co_code == _named_tuple_code(code.co_varnames[1:])
    )


def _named_tuple_code(fields: tuple[str, ...]) -> bytes:
    made = namedtuple("_", fields, rename=True)  # pyright: ignore[reportUntypedNamedTuple]
    return made.__new__.__code__.co_code


def file_of(frame: FrameType) -> str:
    """The file of the code; of a text that was executed, that of the module which has it, or of
    what makes classes of texts."""
    name = frame.f_code.co_filename
    if not name.startswith("<") or name.startswith("<frozen"):
        return name
    caller = frame.f_back
    makes_class = caller is not None and caller.f_code.co_filename in _MAKE_CLASSES
    if caller is not None and makes_class and _is_executed_text(frame.f_code):
        return caller.f_code.co_filename
    file = frame.f_globals.get("__file__")
    return file if type(file) is str else name


def _is_executed_text(code: CodeType) -> bool:
    """Whether it is a text that is executed, such as a signature, and not a function that the text
    defines."""
    return code.co_name == "<module>" and code.co_filename == "<string>"


_MAKE_CLASSES = frozenset({dataclasses.__file__, collections.__file__})
"""Modules that execute texts when a class is made or a module is imported."""


def is_of_logs(frame: FrameType) -> bool:
    """Whether its code outputs messages: that of logging and warnings."""
    return frame.f_code.co_filename in _REPORTING


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_traced_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_traced(value)


def _is_ours(frame: FrameType) -> bool:
    return code_owner(file_of(frame)) is CodeOwner.OURS


def _is_import(frame: FrameType) -> bool:
    """Whether Python looks for a module that is not loaded yet, and runs it for the first time."""
    return frame.f_code is _IMPORTING


_RESUMABLE = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators


@functools.lru_cache(maxsize=1 << 10)
def _first(code: CodeType) -> int:
    """The offset of the first ``RESUME``, where a frame is when it begins."""
    return next((s.offset for s in dis.get_instructions(code) if s.opname == "RESUME"), 0)
