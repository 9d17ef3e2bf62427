"""Tensor operations in threads that a step starts: the modes of the trace are not active there, so
the operations would not be in the graph. They are detected and refused.

A thread that the step starts itself gets a mode of its own, which hears every operation. In other
threads, which were there before, the fake tensors of the trace are heard.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.compat.fake import fake_operations_heard
from treadle.compat.tracing import DispatchMode
from treadle.util.errors import CaptureError

_START = threading.Thread.start.__code__


class Threads:
    """The threads of one run. The tracing thread and those of the autograd engine are followed."""

    def __init__(self) -> None:
        self._followed = {threading.get_ident()}
        self._started: list[threading.Thread] = []
        self._listening: set[int] = set()
        self._lines: list[str] = []
        self._runs = True

    def follow(self) -> None:
        """Follow this thread of the engine, whose operations are part of the trace."""
        self._followed.add(threading.get_ident())

    def enters(self, frame: FrameType) -> None:
        """Called when a frame begins."""
        thread = threading.get_ident()
        of_step = thread in self._followed or thread in self._listening
        if frame.f_code is _START and of_step:
            self._started.append(frame.f_locals["self"])
        if not of_step and any(started.ident == thread for started in self._started):
            self._listening.add(thread)
            _Hearing(self._hear).__enter__()  # until the thread ends

    def _hear(self) -> None:
        if self._runs and threading.get_ident() not in self._followed:
            self._lines.append(here())

    @contextmanager
    def watching(self, traced: Sequence[Tensor]) -> Iterator[None]:
        """``traced``: tensors of the trace. TR-122 if an operation ran in another thread."""
        try:
            with fake_operations_heard(traced, self._hear):
                yield
        except Exception as error:
            if self._lines:  # whatever the step missed then
                raise self._refusal() from error
            raise
        finally:
            self._runs = False
        if self._lines:
            raise self._refusal()

    def _refusal(self) -> CaptureError:
        return CaptureError(
            "the step computes with tensors in another thread, where nothing can be captured",
            code="TR-122",
            where=self._lines[0],
            remedy=(
                "compute in the thread that calls the step; other threads may prepare Python "
                "values, and tensors before the step is called"
            ),
        )


class _Hearing(DispatchMode):
    """Calls ``hear`` at every operation of its thread."""

    def __init__(self, hear: Callable[[], None]) -> None:
        super().__init__()
        self._hear = hear

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self._hear()
        return func(*args, **(kwargs or {}))
