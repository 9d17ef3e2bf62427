"""The progress line. A terminal has one live display at a time; this one gives way to others."""

import shutil
import sys
import threading
import time
from typing import IO, TextIO

from treadle.report.stages import Watcher

_TERMINAL = threading.Lock()
"""Held by the progress line that is shown: a process has one terminal."""
_CLEAR = "\r\x1b[K"


def is_taken() -> bool:
    """Whether a live display of rich is shown, in any console of this process. It redirects both
    streams, or draws itself again from a thread of its own."""
    if any(_behind(stream) is not None for stream in (sys.stdout, sys.stderr)):
        return True
    return any(type(thread).__module__ == "rich.live" for thread in threading.enumerate())


def _behind(stream: IO[str]) -> IO[str] | None:
    """The stream that rich has put another in front of, if it has. Whoever shows a display has
    loaded rich: a step does not, as that draws from Python's random numbers, which are the
    user's."""
    if "rich.file_proxy" not in sys.modules:
        return None
    from rich.file_proxy import FileProxy

    return stream.rich_proxied_file if isinstance(stream, FileProxy) else None


class ProgressLine(Watcher):
    """``treadle: plan memory ... 4 s`` on one line, from the first second on, then gone.

    Nothing is written while another live display is shown, be it rich's or another of these.
    """

    def __init__(self, stream: TextIO, *, after: float = 1.0, every: float = 0.5) -> None:
        self._stream = _behind(stream) or stream
        self._after, self._every = after, every
        self._stage = ""
        self._shown = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def begins(self, stage: str) -> None:
        self._stage = stage
        if self._thread is None:
            self._thread = threading.Thread(target=self._show, name="treadle", daemon=True)
            self._thread.start()

    def closes(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._hide()

    def _show(self) -> None:
        start = time.monotonic()
        wait = self._after
        while not self._done.wait(wait):
            wait = self._every
            if is_taken():
                self._hide()
            elif self._shown or _TERMINAL.acquire(blocking=False):
                self._shown = True
                self._write(f"treadle: {self._stage} ... {time.monotonic() - start:.0f} s")

    def _write(self, text: str) -> None:
        """Cut to one line of the terminal: a line that wraps could not be erased."""
        self._stream.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def _hide(self) -> None:
        """Erase the line, if this one is shown, and free the terminal."""
        if self._shown:
            self._shown = False
            self._write("")
            _TERMINAL.release()
