"""Ctrl-C waits until a step is done, so that no parameter is left half updated."""

import signal
import threading
from _signal import getsignal  # pyright: ignore  # those of ``signal`` search for names
from _signal import signal as set_handler  # pyright: ignore
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Generator[None]:
    """Hold SIGINT back inside, and deliver it afterwards. Other threads are never interrupted."""
    handler = getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))

    set_handler(signal.SIGINT, hold)
    try:
        yield
    finally:
        set_handler(signal.SIGINT, handler)
    if held:
        handler(*held[0])
