"""Files that a user asked for: refused before the work, or written whole."""

import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import IO

from treadle.util.errors import TreadleError

_REMEDY = "give the path of a file in a writable directory"

_DUMB = ("dumb", "unknown")
"""Kinds of terminals that write no line again."""


def check_output(path: Path) -> None:
    """``TreadleError`` TR-004 if ``path`` cannot be written. Makes the directories it is in."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=path.parent):  # a mode bit does not tell
            return
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from error


def write_output(path: Path, text: str) -> None:
    """``path`` holds ``text`` in UTF-8, or what it held before and TR-004 is raised."""
    check_output(path)
    data = text.encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
            return
        beside = path.with_name(f".treadle-{os.getpid()}-{threading.get_ident()}")
        try:
            beside.write_bytes(data)
            beside.replace(path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from error


def make_folder(path: Path) -> None:
    """``path`` is a folder; ``TreadleError`` TR-004 if it cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from error


def _cannot(path: Path, error: OSError | ValueError) -> TreadleError:
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return TreadleError(f"{path} cannot be written: {why}", code="TR-004", remedy=_REMEDY)


def can_be_live(stream: IO[str]) -> bool:
    """Whether ``stream`` is a terminal on which a line can be written again."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in _DUMB
