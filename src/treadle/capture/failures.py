"""Failures of a capture as errors that a user can act on.

::

    an error of torch's   ->  [TR-132] its text, the user's line, what to do; still a RuntimeError
    an error of the user  ->  itself, with a note that says when it was raised
    an error of ours      ->  [TR-199]

Tracebacks keep the frames that are neither torch's nor ours.
"""

import dis
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from treadle.capture.explain_errors import (
    OURS,
    ExitsProgram,
    called_with,
    computed_outside,
    is_between,
    looks_at_value,
    refused_nested,
    show_line,
)
from treadle.capture.symbolic.deferred import LATER
from treadle.capture.symbolic.entries import looked_up
from treadle.capture.symbolic.numbers import made_now
from treadle.compat.fake import (
    FROM_OUTSIDE,
    METADATA_CHANGES,
    NEEDS_MEMORY,
    NESTED,
    NO_FAKE,
    UNSUPPORTED,
    DataDependentOutputException,
    is_traced,
)
from treadle.compat.operators.kernel_checks import dim_is_there
from treadle.util.errors import CaptureError, TreadleError, joined_with

_TORCH, _TREADLE = OURS
_DISTRIBUTED = f"{_TORCH}distributed"
_TYPES = tuple(f"{_TORCH}{name}" for name in ("_decomp", "_meta_registrations", "_prims", "_refs"))
"""Files in which PyTorch computes the types of results in Python."""
_SHARDED = tuple(str(Path(_DISTRIBUTED) / name) for name in ("tensor", "fsdp", "_tensor"))
"""Files that make tensors spread over ranks; their communication is in the graph."""
_CALLS_TORCH = frozenset({"__torch_function__", "run_backward", dim_is_there.__name__})
"""Our functions in which errors of torch's C++ code appear, or that raise the errors of its
kernels."""
_FOR_USERS = frozenset({made_now.__name__, looked_up.__name__})


def raise_told(error: Exception) -> NoReturn:
    """Raise the error that the user sees for ``error``, with the user's frames only."""
    told = _told(error)
    frames = _users_frames(error.__traceback__)
    if told is error:
        raise error.with_traceback(frames)
    raise told.with_traceback(frames) from None


def _told(error: Exception) -> Exception:
    frames = traceback.extract_tb(error.__traceback__)
    where, inner = _line_of(frames), frames[-1] if frames else None
    if isinstance(error, TreadleError | ExitsProgram):
        return error
    if isinstance(error, TypeError) and inner is not None and inner.name == called_with.__name__:
        return error  # the step does not take these arguments, which Python says as well
    if isinstance(error, KeyError) and any(map(is_traced, error.args)):
        return _looks_up(where)
    if any(map(_is_communication, frames)):
        return _communicates(frames, where)
    if _looks_at_value(error):
        return looks_at_value(where)
    if _changes_storage(error, inner):
        return _swaps(where)
    if FROM_OUTSIDE in str(error):
        return computed_outside("an argument", where)
    if any(text in str(error) for text in NEEDS_MEMORY):
        return of_torch(error, where)
    is_ours = inner is not None and is_between(inner.filename)
    if inner is None or not is_ours or _is_users(error, frames):
        return _noted(error, "while treadle captured it", where)
    if not inner.filename.startswith(_TREADLE) or inner.name in _CALLS_TORCH:
        return of_torch(error, where)
    return of_torch(error, where) if _is_of_torch_s_code(error) else _internal(error, where)


def _is_of_torch_s_code(error: Exception) -> bool:
    """Whether torch's C++ raised it, for a call of ours: such frames have no entry of their own."""
    *_, last = _entries(error.__traceback__)
    operation = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    return type(error) is RuntimeError and operation.startswith("CALL")


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    """The entries of a traceback, the innermost last."""
    while entry is not None:
        yield entry
        entry = entry.tb_next


def noted_eager(error: BaseException) -> None:
    """Add a note to an error of a call that ran eagerly because a kernel or a check had refused
    it."""
    if isinstance(error, Exception) and not isinstance(error, TreadleError):
        where = _line_of(traceback.extract_tb(error.__traceback__))
        _noted(error, "which ran without treadle: a check of the compiled step failed", where)


def _noted(error: Exception, when: str, where: str) -> Exception:
    """The user's own error, unchanged."""
    code = f"[TR-138] raised by the step's own code, {when}"
    error.add_note(f"{code}\n  at {where}\n  remedy: see the line; eager raises it as well")
    return error


def _looks_up(where: str) -> CaptureError:
    return CaptureError(
        "the step, or a hook in it, looks up a tensor in a dict from outside by key: during "
        "capture another tensor takes its place",
        code="TR-117",
        where=where,
        remedy=(
            "use names or numbers as keys; step optimizers that a hook steps one by one in the "
            "step, after backward()"
        ),
    )


def _changes_storage(error: Exception, inner: traceback.FrameSummary | None) -> bool:
    """Whether the failure was an attempt to give a tensor from outside the storage of another one,
    or to swap both."""
    return METADATA_CHANGES in str(error) or (inner is not None and inner.name == "swap_tensors")


def _swaps(where: str) -> CaptureError:
    return CaptureError(
        "the step gives a tensor the storage of another one with set_() or swap_tensors(): this "
        "would happen during capture, and not at later calls",
        code="TR-117",
        where=where,
        remedy="assign the values: tensor.data = value.clone(), or tensor.copy_(value)",
    )


def _is_communication(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_DISTRIBUTED) and not frame.filename.startswith(_SHARDED)


def _is_users(error: Exception, frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether an error of the innermost frame, which is ours or torch's, is the user's own."""
    asked = frames[-1].filename.startswith(_TREADLE) and frames[-1].name == "__getattr__"
    no_attribute = asked and isinstance(error, AttributeError)
    return no_attribute or _stands_for_users(frames) or _recurs(error, frames)


def _stands_for_users(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether Python formats values or looks up an entry on behalf of the user's code."""
    return any(frame.name in _FOR_USERS for frame in frames[-4:])


def _recurs(error: Exception, frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the user's code recursed too deeply, wherever the limit was reached."""
    users = sum(not is_between(frame.filename) for frame in frames)
    return isinstance(error, RecursionError) and 2 * users > len(frames)


def of_torch(error: Exception, where: str) -> CaptureError:
    """The text of torch's error, and which of three things it means."""
    text, kind = (str(error) or type(error).__name__).strip(), _kind_of(error)
    if any(word in text for word in NESTED):
        return refused_nested("creates or receives a nested tensor", where)
    if isinstance(error, UNSUPPORTED) or NO_FAKE in text:
        return also(type(error))(
            "PyTorch cannot infer the type of an operation's result without running it, so it "
            f"cannot be captured: {text}",
            code="TR-133",
            where=where,
            remedy=(
                "do it outside the step and pass the result; give your own operation a shape "
                "function with torch.library.register_fake"
            ),
        )
    if any(phrase in text for phrase in NEEDS_MEMORY):
        return also(type(error))(
            "an operation reads the memory of a tensor, but tensors have no values during "
            f"capture: {text}",
            code="TR-137",
            where=where,
            remedy=(
                "do it outside the step and pass the result, or make it a custom operation "
                "(torch.library.custom_op), which runs at every call"
            ),
        )
    return also(kind)(
        text,
        code="TR-132",
        where=where,
        remedy=(
            "this is PyTorch's error: correct the shapes, dtypes or arguments at that line; "
            "calling the function without treadle shows it as well"
        ),
    )


def _kind_of(error: Exception) -> type[Exception]:
    """The type of error that eager raises. Where PyTorch computes types of results in Python,
    asserts stand for the checks of kernels."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and frames and frames[-1].filename.startswith(_TYPES):
        return RuntimeError
    return type(error)


def _internal(error: Exception, where: str) -> CaptureError:
    return CaptureError(
        f"internal error during capture: {type(error).__name__}: {error}",
        code="TR-199",
        where=where,
        remedy=(
            "this is a bug in treadle; please report it with this text. Until then, call the "
            "function without treadle.compile"
        ),
    )


def _communicates(frames: traceback.StackSummary, where: str) -> CaptureError:
    name = next(frame.name for frame in frames if _is_communication(frame))
    return refused_communication(f"calls {name} of torch.distributed", where)


def refused_communication(what: str, where: str) -> CaptureError:
    """TR-130: the step ``what``."""
    return CaptureError(
        f"the step {what}: it cannot be part of the graph, and ranks would drift apart",
        code="TR-130",
        where=where,
        remedy=(
            "call the wrapper itself, or torch.distributed.all_reduce without async_op; or "
            "compile only forward, loss and backward, and step the optimizer after the call"
        ),
    )


def _looks_at_value(error: Exception) -> bool:
    text = str(error)
    words = "data-dependent" in text or "value out of a tracing tensor" in text
    if isinstance(error, TypeError):  # Python says that it takes no such class
        return any(method.__name__ in text for method in LATER)
    return isinstance(error, DataDependentOutputException) or (
        words and isinstance(error, RuntimeError)
    )


def also(kind: type[Exception]) -> type[CaptureError]:
    """A ``CaptureError`` that is a ``kind`` as well, so that the user's handlers for eager errors
    catch it."""
    return joined_with(kind, CaptureError)


def _line_of(frames: traceback.StackSummary) -> str:
    """The user's line, and below it that of the library in which it happened."""
    around = [at for at, frame in enumerate(frames) if frame.name == called_with.__name__]
    inside = frames[max(around, default=-1) + 1 :]
    users = [frame for frame in inside if not is_between(frame.filename)]
    if not users:
        return ""
    inner = users[-1]
    own = [user for user in users if "site-packages" not in user.filename]
    lines = [own[-1], inner] if own and own[-1] is not inner else [inner]
    return "\n     in ".join(show_line((line.filename, line.lineno or 0)) for line in lines)


def _users_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of torch's and ours. (It may be as long as Python's stack.)"""
    frames: list[TracebackType] = []
    while tb is not None:
        if tb.tb_frame.f_code is called_with.__code__:
            frames.clear()  # what is around the step is the tracer's
        elif not is_between(tb.tb_frame.f_code.co_filename):
            frames.append(tb)
        tb = tb.tb_next
    rest: TracebackType | None = None
    for frame in reversed(frames):
        rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rest
