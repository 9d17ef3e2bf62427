"""Errors of a traced run in words that a user can act on."""

import contextlib
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

from treadle.compat.tracing import METHOD_FILES
from treadle.compat.unsized import ASKING_FILES
from treadle.util.errors import CaptureError
from treadle.util.package import PACKAGE

OURS = (str(Path(torch.__file__).parent), str(PACKAGE))
"""Where frames are torch's or ours."""
BETWEEN = (*OURS, "<", str(contextlib.__file__))
"""Where frames are not the user's."""

_METHODS = METHOD_FILES | ASKING_FILES

Line = tuple[str, int]
"""A file and a line number; empty and 0 if there is none."""


def looks_at_value(where: str) -> CaptureError:
    """TR-102, for the user's line ``where``."""
    return CaptureError(
        "the step looks at the value of a tensor, which does not exist while it is captured",
        code="TR-102",
        where=where,
        remedy="return the tensor and look at it outside, or use torch.where instead of a branch; "
        "a check whose one way does nothing but raise is captured",
    )


def branches(where: str) -> CaptureError:
    """TR-102 of a strict step, for the user's line ``where``."""
    return CaptureError(
        "strict: the step decides by a tensor's value, and each way on is a variant of its own",
        code="TR-102",
        where=where,
        remedy="leave strict off, or use torch.where instead of a branch",
    )


def refused_nested(what: str, where: str) -> CaptureError:
    """TR-127 for a step that ``what``, for the user's line ``where``."""
    return CaptureError(
        f"the step {what}: a list of tensors in one, whose sizes differ and are known to it alone",
        code="TR-127",
        where=where,
        remedy="pad the rows to one length (torch.nn.utils.rnn.pad_sequence), and mask what was "
        "added; packed sequences (pack_padded_sequence) are captured",
    )


def running_line() -> Line:
    """The innermost line that runs and is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(BETWEEN):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def users_frames() -> Iterator[FrameType]:
    """From the innermost that is not of ours outwards, and no method of tensors or sizes; others of
    torch's are among them."""
    frame = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_codes(error: Exception) -> tuple[CodeType, ...]:
    """The code of the frames that an error came through, the innermost first, if that one is no
    function of ours or of torch's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not codes or codes[-1].co_filename.startswith(BETWEEN):
        return ()
    return tuple(reversed(codes))


def _is_between(file: str) -> bool:
    return file.startswith(OURS[1]) or file in _METHODS


def show_line(line: Line) -> str:
    """``file:line: text``; nothing for no line."""
    name, number = line
    return f"{name}:{number}: {linecache.getline(name, number).strip()}" if name else ""


def here() -> str:
    """The user's line that is running."""
    return show_line(running_line())
