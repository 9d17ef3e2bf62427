"""The errors that users of treadle can meet, and the one way to raise them.

Every error carries a stable code: ``TR-1xx`` capture, ``2xx`` planning, ``3xx`` lowering,
``4xx`` run time, ``5xx`` distributed. ``docs/reference/errors.md`` has a section for each.
"""

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

_Ours = TypeVar("_Ours", bound="TreadleError")
BUGS = ("TR-199", "TR-900", "TR-901")
"""Codes of what is wrong in treadle, and not in what it was given."""


class TreadleError(Exception):
    """Something that treadle cannot do, with a message that a user can act on.

    ``code`` is stable, ``where`` is the user's source line (``file:line: text``) when known, and
    ``remedy`` says what to do.
    """

    def __init__(
        self, message: str, *, code: str = "TR-000", where: str = "", remedy: str = ""
    ) -> None:
        self.message = message
        self.code = code
        self.where = where
        self.remedy = remedy
        super().__init__(self._text())

    def rewrite(self, change: Callable[[str], str]) -> None:
        """Apply ``change`` to every text of this error."""
        self.message, self.where = change(self.message), change(self.where)
        self.remedy = change(self.remedy)
        self.args = (self._text(),)

    def __str__(self) -> str:
        return self._text()  # also where another base would show something else

    def _text(self) -> str:
        lines = [f"[{self.code}] {self.message}"]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


class ParseError(TreadleError):
    """A text is not what ``show`` prints (``TR-007``). ``line`` and ``column`` count from 1::

    [TR-007] there is no value 'y'
      at line 2, column 17:
        neg: f32[2] = neg(y)
                          ^
    """

    def __init__(self, message: str, text: str, at: int, remedy: str) -> None:
        begin = text.rfind("\n", 0, at) + 1
        end = text.find("\n", begin)
        self.line = text.count("\n", 0, at) + 1
        self.column = at - begin + 1
        shown = text[begin:] if end < 0 else text[begin:end]
        where = f"line {self.line}, column {self.column}:\n    {shown}\n    {' ' * (at - begin)}^"
        super().__init__(message, code="TR-007", where=where, remedy=remedy)


class CaptureError(TreadleError):
    """The step cannot become one graph (``TR-1xx``)."""


class PlanError(TreadleError):
    """No memory plan fits the request (``TR-2xx``)."""


class LoweringError(TreadleError):
    """An operation cannot be lowered as asked (``TR-3xx``)."""


class RuntimeFailure(TreadleError):
    """A compiled step cannot be built or run (``TR-4xx``)."""


class BadIndex(RuntimeFailure, IndexError, RuntimeError):
    """A number of the batch points outside what it indexes (``TR-407``): eager's ``IndexError``,
    or its ``RuntimeError`` where an operation raises that. Nothing was changed."""


class GroupFailure(RuntimeFailure):
    """Ranks of a process group cannot go on together (``TR-5xx``). Nothing was written: parameters
    and optimizer state are those from before the call."""

    def at(self, where: str) -> "GroupFailure":
        """The same for a line of the user's, unless it has one."""
        where = self.where or where
        return GroupFailure(self.message, code=self.code, where=where, remedy=self.remedy)


class VerifyError(TreadleError):
    """An IR broke one of its own rules: a bug in the pass that produced it (``TR-900``)."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, code="TR-900", remedy="this is a bug in treadle; please report it"
        )


class InternalError(TreadleError):
    """Something failed in a stage that should not (``TR-900``). The exception is its cause."""

    def __init__(self, stage: str, error: Exception, where: str = "") -> None:
        super().__init__(
            f"{stage} failed: {type(error).__name__}: {error}",
            code="TR-900",
            where=where,
            remedy=(
                "this is a bug in treadle; please report it with this text. Until then, call the "
                "function without treadle.compile"
            ),
        )


@contextmanager
def internal_errors(stage: str, where: str = "", of: object = "") -> Iterator[None]:
    """What fails inside without a code is a bug, in ``stage`` of something, for the user's line
    ``where``. Texts are made of neither unless it fails."""
    from torch import OutOfMemoryError  # late: the command line's help needs no PyTorch

    try:
        yield
    except (TreadleError, OutOfMemoryError):
        raise
    except Exception as error:
        raise InternalError(f"{stage} {of}".rstrip(), error, where) from error


def require(condition: bool, error: TreadleError | type[TreadleError], reason: str = "") -> None:
    """Raise ``error`` unless ``condition``: an instance as it is, a kind with ``reason``."""
    if not condition:
        raise error if isinstance(error, TreadleError) else error(reason)


@functools.cache
def joined_with(kind: type[Exception], ours: type[_Ours]) -> type[_Ours]:
    """``ours``, an error of treadle's, that is a ``kind`` as well, or the nearest builtin one."""
    bases = [base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base]
    nearest = next(base for base in bases if not issubclass(base, UnicodeError))
    if nearest is Exception:
        return ours
    said = "Captured" if ours.__name__ == "CaptureError" else "Failed"
    both = type(f"{said}{nearest.__name__}", (ours, nearest), {"__module__": "treadle"})
    return cast("type[_Ours]", both)


def with_article(name: str) -> str:
    """``"an int"``, ``"a list"``: for messages about an object of a class of that name."""
    return f"{'an' if name[:1].lower() in tuple('aeio') else 'a'} {name}"


def kind_of(value: object) -> str:
    """``"an int"``, or for a class ``"the class Linear"``: for messages about a wrong argument."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return with_article(type(value).__name__)


def counted(count: int, noun: str, several: str = "") -> str:
    """``"1 input"``, ``"2 inputs"``; ``several``: the plural, if it has not an ``s`` more."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def not_installed(error: ModuleNotFoundError) -> TreadleError:
    """TR-010, which is an ``ImportError``, for a library that was not found."""
    library = str(error.name).partition(".")[0]
    return joined_with(ImportError, TreadleError)(
        f"{library} is not installed", code="TR-010", remedy=f"pip install {library}"
    )
