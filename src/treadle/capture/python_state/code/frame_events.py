"""The events that tell when a frame begins, and when a C function is called.

::

    CPython 3.11             the profile hook of each thread, off while something is quiet
    CPython 3.12 and later   sys.monitoring, where a switch would instrument all code again: code
                             that has nothing to tell is switched off, each for itself
"""

import cProfile
import sys
from collections.abc import Callable, Mapping
from sys import _getframe, getprofile, setprofile
from threading import get_ident
from threading import setprofile as set_thread_profile
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, Protocol, final

_MONITORING: Any = getattr(sys, "monitoring", None)
_TOOLS = (3, 4, 1, 0, 2, 5)
"""Tool numbers that may be used; first those that Python reserves for nothing (0, 1, 2 and 5 are a
debugger's, a coverage tool's, a profiler's and an optimizer's)."""


class FrameEvents(Protocol):
    """From ``begin`` to ``end``, ``enters(frame)`` is called for each frame that begins, and
    ``calls(frame, function)`` for each call of a function made in C, in this thread, in those that
    start meanwhile, and in those that ``listen``."""

    def begin(self) -> None:
        """Begin the events."""
        ...

    def end(self) -> None:
        """End the events; may be called more than once."""
        ...

    def listen(self) -> None:
        """Report events of this thread as well."""
        ...

    def pause(self) -> bool:
        """Suspend events in this thread until ``resume``; whether there were any before."""
        ...

    def resume(self) -> None:
        """Resume events after ``pause`` returned true."""
        ...


def frame_events(
    enters: Callable[[FrameType], None],
    calls: Callable[[FrameType, object], None],
    passes_over: Callable[[CodeType], bool],
    is_silent: Callable[[CodeType], bool],
) -> FrameEvents:
    """``passes_over``: whether a code object can be ignored; ``is_silent``: whether its calls can
    be ignored."""
    if _MONITORING is None or all(map(_MONITORING.get_tool, _TOOLS)):
        return _Profiling(enters, calls, passes_over)
    return _Monitoring(enters, calls, passes_over, is_silent)


@final
class _Monitoring:
    def __init__(
        self,
        enters: Callable[[FrameType], None],
        calls: Callable[[FrameType, object], None],
        passes_over: Callable[[CodeType], bool],
        is_silent: Callable[[CodeType], bool],
    ) -> None:
        self._enters = enters
        self._calls = calls
        self._passes_over = passes_over
        self._is_silent = is_silent
        self._tool: int | None = None
        self._heard: set[int] = set()  # threads
        self._quiet: set[int] = set()  # of them, those that look at objects, or pause

    def begin(self) -> None:
        self._heard = {get_ident()}
        self._tool = next(tool for tool in _TOOLS if _MONITORING.get_tool(tool) is None)
        _MONITORING.use_tool_id(self._tool, "treadle")
        events, callbacks = 0, self._callbacks()
        for event, callback in callbacks.items():
            _MONITORING.register_callback(self._tool, event, callback)
            events |= event
        set_thread_profile(self._on_thread)
        _MONITORING.set_events(self._tool, events)

    def end(self) -> None:
        if self._tool is None:
            return
        tool, self._tool = self._tool, None
        self._heard = set()
        set_thread_profile(None)  # type: ignore[arg-type]
        _MONITORING.set_events(tool, 0)
        for event in self._callbacks():
            _MONITORING.register_callback(tool, event, None)
        _MONITORING.free_tool_id(tool)

    def listen(self) -> None:
        if self._tool is not None:
            self._heard.add(get_ident())

    def pause(self) -> bool:
        thread = get_ident()
        if thread in self._quiet or thread not in self._heard:
            return False
        self._quiet.add(thread)
        return True

    def resume(self) -> None:
        self._quiet.discard(get_ident())

    def _callbacks(self) -> Mapping[int, Callable[..., object]]:
        events = _MONITORING.events
        return {
            events.PY_START: self._on_start,
            events.PY_RESUME: self._on_start,
            events.PY_THROW: self._on_throw,
            events.CALL: self._on_call,
        }

    def _on_start(self, code: CodeType, _: int) -> object:
        if self._passes_over(code):
            return _MONITORING.DISABLE
        thread = get_ident()
        if thread in self._quiet or thread not in self._heard:
            return None
        self._quiet.add(thread)  # what looking at objects runs is not the step's
        try:
            self._enters(_getframe(1))
        finally:
            self._quiet.discard(thread)
        return None

    def _on_throw(self, code: CodeType, _: int, __: BaseException) -> None:
        """A generator's frame is entered by an exception: an event that cannot be switched off."""
        thread = get_ident()
        if thread in self._heard and thread not in self._quiet and not self._passes_over(code):
            self._enters(_getframe(1))

    def _on_call(self, code: CodeType, _: int, function: object, __: object) -> object:
        """A call of anything."""
        if self._is_silent(code):
            return _MONITORING.DISABLE
        if type(function) is not BuiltinFunctionType:
            return None
        thread = get_ident()
        if thread in self._heard and thread not in self._quiet:
            self._calls(_getframe(1), function)
        return None

    def _on_thread(self, *_: object) -> None:
        """The first event in a thread that was started meanwhile."""
        setprofile(None)
        self.listen()


@final
class _Profiling:
    def __init__(
        self,
        enters: Callable[[FrameType], None],
        calls: Callable[[FrameType, object], None],
        passes_over: Callable[[CodeType], bool],
    ) -> None:
        self._enters = enters
        self._calls = calls
        self._passes_over = passes_over
        self._hook = self._on_event
        self._before: Any = None
        self._active = False
        self._busy: set[int] = set()  # threads that look at objects
        self._passed: dict[int, CodeType] = {}  # by their ids, which are looked up in no time

    def begin(self) -> None:
        self._before = getprofile()
        self._active = True
        set_thread_profile(self._hook)  # threads that the step starts
        setprofile(self._hook)

    def end(self) -> None:
        if self._active:
            self._active = False
            set_thread_profile(None)  # type: ignore[arg-type]
            setprofile(None)
            if isinstance(self._before, cProfile.Profile):
                self._before.enable()
            else:
                setprofile(self._before)

    def listen(self) -> None:
        if self._active and getprofile() is None:
            setprofile(self._hook)

    def pause(self) -> bool:
        if getprofile() is not self._hook:
            return False
        setprofile(None)
        return True

    def resume(self) -> None:
        if self._active:
            setprofile(self._hook)

    def _on_event(self, frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and self._active:
            if id(frame.f_code) not in self._passed:
                self._calls(frame, function)
            return
        if event != "call" or (id(frame.f_code) in self._passed and self._active):
            return
        thread = get_ident()
        if thread in self._busy:
            return
        if not self._active:
            setprofile(None)  # a thread of the engine's that outlives the run
            return
        if self._passes_over(frame.f_code):
            self._passed[id(frame.f_code)] = frame.f_code
        self._busy.add(thread)  # what looking at objects runs is not the step's
        try:
            self._enters(frame)
        finally:
            self._busy.discard(thread)
