"""``FILE:FUNCTION`` on the command line: the training job that a user's file defines."""

import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from treadle.api import Models, Optimizers
from treadle.capture.explain_errors import OURS, show_line
from treadle.compat.fake import fake_mode_of
from treadle.session.user_step import arguments_of
from treadle.util.errors import PlanError, TreadleError
from treadle.util.package import FOLDER

_STANDARD = sysconfig.get_path("stdlib")
_REMEDY = "run the function without treadle; an error that appears there too is in your code"
_LINES = 5
"""Lines of the user's that are shown of where an error came from."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A step, what it trains, and one batch for it."""

    step: Callable[..., Any]
    model: Models
    optimizer: Optimizers
    batch: tuple[object, ...]


class EntryPoint:
    """A function without arguments that returns ``(step, model, optimizer, batch)``."""

    def __init__(self, text: str) -> None:
        name, colon, function = text.rpartition(":")
        path = Path(name if colon else text)
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "does not exist"
            raise _wrong(f"{text!r} names no function in a file: {path} {what}")
        names = vars(load_module(path))
        if not function or not colon:
            raise _wrong(f"{text!r} names no function of {path}; it has {_functions(names)}")
        self.text = text
        self._function = names.get(function)
        if not callable(self._function):
            what = "is not a function" if function in names else "is not there"
            raise _wrong(f"{path}: {function!r} {what}; it has {_functions(names)}")
        _check_makes(text, self._function)

    def make(self, *, seed: int = 0, fake: bool = False) -> TrainingJob:
        """A new one from this seed, each time. ``fake``: nothing is allocated."""
        torch.manual_seed(seed)
        assert callable(self._function)
        with users_code(self.text), fake_mode_of([]) if fake else nullcontext():
            function = self._function()
        if not isinstance(function, tuple | list) or len(function) != 4:
            count = f" of {len(function)}" if isinstance(function, tuple | list) else ""
            raise _wrong(
                f"{self.text} returned {type(function).__name__}{count}, not (step, model, "
                "optimizer, batch)"
            )
        step, model, optimizer, batch = function
        if not callable(step):
            raise _wrong(f"the first item that {self.text} returned is not a function: {step!r}")
        arguments = arguments_of(batch)
        _check_call(self.text, step, arguments)
        return TrainingJob(step, model, optimizer, arguments)


def _check_makes(what: str, function: Callable[..., object]) -> None:
    """``PlanError`` TR-203 where the function cannot be called without arguments."""
    wrong = _mismatch(function, ())
    if wrong:
        raise _wrong(
            f"{what} needs arguments: {wrong.removeprefix('missing a required argument: ')}"
        )


def _check_call(what: str, step: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """``PlanError`` TR-203 where the step does not take so many arguments."""
    wrong = _mismatch(step, arguments)
    if wrong:
        count = f"{len(arguments)} arguments" if len(arguments) != 1 else "one argument"
        raise _wrong(f"the step does not accept the batch of {what} ({count}): {wrong}")


def _mismatch(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    """Why the function does not take these arguments, in Python's words; empty if it does, or if
    its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


def _wrong(message: str) -> PlanError:
    remedy = (
        "write FILE:FUNCTION; the function takes no arguments and returns "
        "(step, model, optimizer, batch)"
    )
    return PlanError(message, code="TR-203", remedy=remedy)


def _functions(names: Mapping[str, object]) -> str:
    own = [
        name
        for name, value in names.items()
        if isinstance(value, FunctionType) and value.__module__ == names["__name__"]
    ]
    return ", ".join(own) or "no functions"


@contextmanager
def users_code(what: str) -> Generator[None]:
    """What the user's code raises is TR-206, with the lines of theirs that led there."""
    try:
        yield
    except TreadleError:
        raise
    except SystemExit as stopped:
        remedy = 'put the training code under `if __name__ == "__main__":`'
        message = f"{what} ended the process ({stopped})"
        raise PlanError(message, code="TR-206", remedy=remedy) from None
    except Exception as error:
        raise raised_by_user(what, error) from error


def raised_by_user(what: str, error: Exception) -> PlanError:
    """``error``, which the user's code raised: its text, and only the user's lines."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 0) for frame in frames if is_users(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((error.filename, error.lineno or 0))
    where = "\n     ".join(show_line(line) for line in lines[-_LINES:])
    message = f"{what} raised {type(error).__name__}: {error}"
    return PlanError(message, code="TR-206", where=where, remedy=_REMEDY)


def is_users(path: str) -> bool:
    """Whether a file is neither torch's nor treadle's nor of Python's standard library."""
    library = path.startswith(_STANDARD) and "-packages" not in path
    return not library and not path.startswith((*OURS, "<"))


def is_users_error(error: Exception) -> bool:
    """Whether ``error`` came out of the user's code, and not out of treadle's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(map(is_users, files)) and not files[-1].startswith(FOLDER)


def load_module(path: Path) -> ModuleType:
    """The file as a module; files beside it can be imported, as if it were run."""
    spec = importlib.util.spec_from_file_location(f"treadle_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise _wrong(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes and pickles look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with users_code(str(path)):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module
