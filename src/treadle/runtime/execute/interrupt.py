"""Ctrl-C waits until a step is done, so that no parameter is left half updated."""

import signal
from _signal import getsignal  # pyright: ignore  # those of ``signal`` search for names
from _signal import signal as set_handler  # pyright: ignore
from types import FrameType
from typing import Any, final


@final
class Uninterrupted:
    """Hold SIGINT back inside, and deliver it afterwards. Other threads are never interrupted."""

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._held: list[tuple[int, FrameType | None]] = []
        self._handler: Any = getsignal(signal.SIGINT)
        if not callable(self._handler):
            self._handler = None
            return
        try:
            set_handler(signal.SIGINT, self._hold)
        except ValueError:  # this is not the main thread
            self._handler = None

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._handler is None:
            return
        set_handler(signal.SIGINT, self._handler)
        if self._held and error is None:
            self._handler(*self._held[0])
