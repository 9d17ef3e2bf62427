"""The line that changed a place outside the step.

Changes by a step are found after its code has run, when the line is no longer known. If a change is
an error, the step's code runs once more in the same mode, and the place is read after each of the
user's lines::

    x = model(batch)
    seen.append(x)        seen is as before, up to here
    loss = x.sum()        before this line runs it is not: the line above is accused
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

from treadle.capture.explain_errors import Line, is_between
from treadle.capture.python_state.code.frames import CodeOwner, code_owner, file_of
from treadle.capture.python_state.plain_values import is_same_value

Look = Callable[[], Sequence[object]]
"""Reads the present value of a place."""


@final
class LineWatch:
    """While it runs, ``changed`` is the line after which ``look()`` was no longer what it was at
    the start, and stayed so; ``last`` the line of the step's own function that ran last."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._others = sys.gettrace()
        self._before: Sequence[object] = ()
        self._lines: list[Line] = []  # of the user's frames that run, the step's own first
        self.changed: Line | None = None
        self.last: Line | None = None

    def __enter__(self) -> None:
        """The step's code runs inside; afterwards the trace function of a debugger or coverage tool
        is restored."""
        self._others, self._before = sys.gettrace(), self._look()
        sys.settrace(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._others)

    def _on_event(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        """Called when a frame begins or continues. Lines of frames that are not the user's are
        ignored."""
        name = frame.f_code.co_filename
        if is_between(name) or code_owner(file_of(frame)) is not CodeOwner.USER:
            return None
        self._check()  # the caller's line has done something before it calls
        self._lines.append((name, frame.f_lineno))
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event in ("line", "return") and self._lines:
            self._check()
            if event == "line":
                self._lines[-1] = frame.f_code.co_filename, frame.f_lineno
            else:
                self.last = self._lines.pop()
        return self._in_frame

    def _check(self) -> None:
        if not self._lines:
            return
        if _are_same(self._before, self._look()):
            self.changed = None
        elif self.changed is None:
            self.changed = self._lines[-1]


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    if len(one) != len(other):
        return False
    return all(a is b or is_same_value(a, b) for a, b in zip(one, other, strict=True))
