"""Errors of a traced run, as messages that a user can act on."""

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import final

import torch

from treadle.compat.tracing import METHOD_FILES
from treadle.compat.unsized import ASKING_FILES
from treadle.util.errors import CaptureError
from treadle.util.package import FOLDER, folder_of

OURS = (folder_of(torch), FOLDER)
"""Folders whose code is torch's or ours."""
_MADE = ("<frozen ", "<eval_with_key>", "<__array_function__ ")
"""Names of code without a file that Python and libraries generate. Others (``<string>``,
``<stdin>``, ``<ipython-input-1>``) are the user's: of a notebook, or a text that is executed."""
BETWEEN = (*OURS, *_MADE, str(contextlib.__file__))
"""Folders whose code is not the user's."""

_METHODS = METHOD_FILES | ASKING_FILES

Line = tuple[str, int]
"""A file and a line number; empty and 0 if there is none."""


def looks_at_value(where: str) -> CaptureError:
    """TR-102, for the user's line ``where``."""
    return CaptureError(
        "the step reads the value of a tensor, but tensors have no values during capture",
        code="TR-102",
        where=where,
        remedy=(
            "return the tensor and read it outside. Checks that only raise are captured. So are "
            "branches and whole numbers, unless the step communicates: use torch.where there"
        ),
    )


def branches(where: str) -> CaptureError:
    """TR-102 of a strict step, for the user's line ``where``."""
    return CaptureError(
        "strict=True: the step branches on a tensor's value, and each path would be a variant",
        code="TR-102",
        where=where,
        remedy="leave strict off, or replace the branch by torch.where",
    )


def needs_numbers(where: str) -> CaptureError:
    """TR-102 of a strict step, for the user's line ``where``."""
    return CaptureError(
        "strict=True: Python needs a number of a tensor, and each number would be a variant",
        code="TR-102",
        where=where,
        remedy="leave strict off, or compute with the tensor",
    )


def computed_outside(what: str, where: str) -> CaptureError:
    """TR-110 for ``what``, which is not a leaf, for the user's line ``where``."""
    return CaptureError(
        f"{what} was computed outside the step, and the step would backpropagate through it",
        code="TR-110",
        where=where,
        remedy="compute it in the step, or detach it",
    )


def refused_nested(what: str, where: str) -> CaptureError:
    """TR-127 for a step that ``what``, for the user's line ``where``."""
    return CaptureError(
        f"the step {what}: a list of tensors in one, whose sizes only it knows",
        code="TR-127",
        where=where,
        remedy=(
            "pad the rows to one length (torch.nn.utils.rnn.pad_sequence) and mask the padding; "
            "packed sequences (pack_padded_sequence) are captured"
        ),
    )


def is_between(file: str) -> bool:
    """Whether code in a file of that name is not the user's."""
    return file.startswith(BETWEEN)


def running_line(frame: FrameType | None = None) -> Line:
    """The innermost line that runs, in ``frame`` or around it, and is neither torch's nor ours."""
    frame = frame or sys._getframe(1)
    while frame is not None and _is_machinery(frame):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_machinery(frame: FrameType) -> bool:
    """Code that belongs to no file and to no module is the user's inside the step; around it, it
    is what the tracer evaluates."""
    name = frame.f_code.co_filename
    if not name.startswith("<") or "__name__" in frame.f_globals:
        return name.startswith(BETWEEN)
    around = frame.f_back
    while around is not None and around.f_code is not called_with.__code__:
        around = around.f_back
    return around is None


@final
class ExitsProgram(Exception):
    """The step calls ``sys.exit``, which is an error like others until it leaves the capture."""

    def __init__(self, exits: SystemExit) -> None:
        super().__init__(str(exits))
        self.exits = exits


def called_with(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Call ``function`` with these arguments. If they do not fit, Python raises in this frame; all
    frames around it are the tracer's."""
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        raise ExitsProgram(error) from error


def users_frames() -> Iterator[FrameType]:
    """The frames from the innermost outwards that is neither ours nor a method of tensors or sizes;
    other frames of torch's are included."""
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
