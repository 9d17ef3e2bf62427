"""The progress line. A terminal has one live display at a time; this one gives way to others."""

import shutil
import sys
import threading
import time
from typing import IO, TextIO

from rich.console import Console
from rich.file_proxy import FileProxy

from treadle.report.stages import Watcher

_TERMINAL = threading.Lock()
"""Held by the progress line that is shown: a process has one terminal."""
_CLEAR = "\r\x1b[K"


def can_be_live(stream: IO[str]) -> bool:
    """Whether ``stream`` is a terminal on which a line can be written again."""
    return stream.isatty() and not Console(file=stream).is_dumb_terminal


def is_taken() -> bool:
    """Whether a live display of rich is shown, in any console of this process. It redirects both
    streams, or draws itself again from a thread of its own."""
    if isinstance(sys.stdout, FileProxy) or isinstance(sys.stderr, FileProxy):
        return True
    return any(type(thread).__module__ == "rich.live" for thread in threading.enumerate())


class ProgressLine(Watcher):
    """``treadle: plan memory ... 4 s`` on one line, from the first second on, then gone.

    Nothing is written while another live display is shown, be it rich's or another of these.
    """

    def __init__(self, stream: TextIO, *, after: float = 1.0, every: float = 0.5) -> None:
        self._stream = stream.rich_proxied_file if isinstance(stream, FileProxy) else stream
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
        """A line that wraps could not be taken back."""
        self._stream.write(_CLEAR + text[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def _hide(self) -> None:
        """Only the one that shows a line holds the terminal."""
        if self._shown:
            self._shown = False
            self._write("")
            _TERMINAL.release()
