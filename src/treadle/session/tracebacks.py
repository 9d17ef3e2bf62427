"""Tracebacks with the user's lines, and none of treadle's."""

import contextlib
from types import TracebackType

from treadle.util.errors import BUGS, TreadleError
from treadle.util.package import FOLDER

_EXAMPLES = f"{FOLDER}examples"
_TOLD = f"{FOLDER}capture/failures.py"
"""What raises errors of the user's again: one without a line of theirs is about the call."""


def hide_own_frames(error: Exception) -> None:
    """Take the frames of treadle's out of the traceback of ``error``, in place.

    ::

        before   train.py: step(x)   api.py   serve.py   step.py   train.py: F.cross_entropy(...)
        after    train.py: step(x)                                 train.py: F.cross_entropy(...)

    All of them stay where they are what a report needs: in a bug of treadle's (``BUGS``), and in an
    error without a code that begins in treadle.
    """
    frames = _frames(error)
    if isinstance(error, TreadleError):
        if error.code in BUGS:
            return
    elif not frames or (_is_own(frames[-1]) and _path(frames[-1]) != _TOLD):
        return
    shown: TracebackType | None = None
    is_below_own = False
    for frame in reversed(frames):
        is_manager = is_below_own and _path(frame) == contextlib.__file__
        if not _is_own(frame) and not is_manager:
            frame.tb_next = shown
            shown = frame
            is_below_own = False
        else:
            is_below_own = True
    error.__traceback__ = shown


def _frames(error: Exception) -> list[TracebackType]:
    """From the outermost to the one that raised it."""
    frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames


def _path(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_own(frame: TracebackType) -> bool:
    path = _path(frame)
    return path.startswith(FOLDER) and not path.startswith(_EXAMPLES)
