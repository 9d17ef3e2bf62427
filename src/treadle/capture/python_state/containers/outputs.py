"""The output of a step (prints and logs): repeated at every call, in order, after the launch.

::

    print("loss", loss.item())    ->    print("loss", <the number of this call>)

While a step is captured nothing is printed; each call of ``print`` by the user's or by installed
code, each record that the user's code logs, and what is written to ``sys.stdout`` and
``sys.stderr`` is noted with what it is given. What libraries log and warn of is told when a step is
captured.
"""

import builtins
import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TextIO, final

from torch import Tensor

from treadle.capture.integrations.integration import OutputMethod
from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.code.frames import CodeOwner, callers, code_owner, is_of_logs
from treadle.capture.python_state.flatten import unflatten
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.capture.symbolic.texts import texts
from treadle.capture.symbolic.texts.texts import shown, taken
from treadle.compat.pytree import TreeSpec
from treadle.compat.tracing import works_for

_PRINT: Callable[..., None] = builtins.print
_STREAMS = ("stdout", "stderr")
_METHODS = all_of(lambda integration: integration.outputs)
"""By which libraries tell something."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class OutputCall:
    """A place: what is put there is what ``function`` is called with."""

    function: Callable[..., object]
    label: str = "output"

    def get(self) -> object:
        """Nothing stays."""
        return None

    def put(self, value: tuple[Sequence[object], Mapping[str, object]]) -> None:
        """Print it."""
        args, named = value
        self.function(*args, **named)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """In the place of ``sys.stdout`` or ``sys.stderr``: the one there is at a call."""

    name: str

    def __call__(self) -> object:
        return getattr(sys, self.name)


@final
@dataclass(slots=True, eq=False)
class OutputLog:
    """The outputs of a run, in order. ``knows``: objects that were there before it."""

    knows: Callable[[object], bool] = lambda _: False
    calls: list[tuple[OutputCall, list[object], TreeSpec]] = field(
        default_factory=list[tuple[OutputCall, list[object], TreeSpec]]
    )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While inside, nothing is printed by the thread that captures."""
        thread = threading.get_ident()
        before = {name: getattr(sys, name) for name in _STREAMS}
        recorded = {name: _Stream(self, name, stream, thread) for name, stream in before.items()}
        printing = builtins.print  # Python's, or what the user has put there
        builtins.print = self._printing(recorded, thread)
        for name, stream in recorded.items():
            setattr(sys, name, stream)
        originals = [vars(method.owner)[method.name] for method in _METHODS]
        for method, original in zip(_METHODS, originals, strict=True):
            setattr(method.owner, method.name, self._telling(method, original, thread))
        try:
            yield
        finally:
            builtins.print = printing
            for method, original in zip(_METHODS, originals, strict=True):
                setattr(method.owner, method.name, original)
            for name, stream in before.items():
                setattr(sys, name, stream)

    def note(
        self,
        function: Callable[..., object],
        args: Iterable[object],
        named: Mapping[str, object],
        *whole: object,
    ) -> None:
        """To be called with these at every call. ``whole``: first of all, taken as they are."""
        leaves, spec = taken(((*(0 for _ in whole), *args), named))
        self.calls.append((OutputCall(function), [*whole, *leaves[len(whole) :]], spec))

    def tell_known(self) -> None:
        """Of a run that failed, what it said before it said something that is not known yet."""
        for output, leaves, spec in self.calls:
            if any(map(_is_later, leaves)):
                return
            output.put(
                unflatten([leaf() if isinstance(leaf, Stream) else leaf for leaf in leaves], spec)
            )

    def _printing(self, recorded: dict[str, "_Stream"], thread: int) -> Callable[..., None]:
        def call(*args: object, file: object = None, **named: object) -> None:
            stream = sys.stdout if file is None else file
            name = next((n for n, known in recorded.items() if known is stream), "")
            is_kept = bool(name) or self.knows(stream)
            if not is_kept or not works_for(thread) or not _is_users(sys._getframe(1)):
                _PRINT(*args, file=file, **named)
                return
            shown_args = [shown(arg) if isinstance(arg, Tensor) else arg for arg in args]
            self.note(_print_to, shown_args, named, Stream(name) if name else stream)

        return call

    def _telling(
        self, method: OutputMethod, original: Callable[..., None], thread: int
    ) -> Callable[..., None]:
        def tell(owner: object, told: object) -> None:
            if works_for(thread) and _logs(sys._getframe(1)) is CodeOwner.USER:
                values, fields = method.arguments(told)
                later = {name: fields.pop(name) for name in [*fields] if _is_later(fields[name])}
                self.note(method.replay, values, later, owner, fields)
            else:
                original(owner, told)

        return tell


def _is_later(value: object) -> bool:
    return is_stand_in(value) or isinstance(value, Tensor)


def _is_users(frame: FrameType) -> bool:
    return _logs(frame) >= CodeOwner.INSTALLED


def _logs(frame: FrameType) -> CodeOwner:
    """Whose code speaks: that of the frame, or which calls Python's own library there."""
    for caller in callers(frame):
        owner = code_owner(caller.f_code.co_filename)
        if owner is not CodeOwner.STDLIB and caller.f_code.co_filename != str(texts.__file__):
            return owner
    return CodeOwner.OURS


def _print_to(stream: object, *args: object, **named: object) -> None:
    _PRINT(*args, file=stream, **named)


@final
class _Stream:
    """Stands for a stream of Python's while a step is captured."""

    def __init__(self, log: OutputLog, name: str, stream: TextIO, thread: int) -> None:
        self._log, self._name, self._stream, self._thread = log, name, stream, thread

    def write(self, text: str) -> int:
        """Noted, where the step writes it."""
        if not works_for(self._thread) or not self._is_written(sys._getframe(1)):
            return self._stream.write(text)
        self._log.note(_write_to, (text,), {}, Stream(self._name))
        return 0 if is_stand_in(text) else len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Likewise."""
        for text in texts:
            self.write(text)

    def _is_written(self, frame: FrameType) -> bool:
        return _is_users(frame) and not any(map(is_of_logs, callers(frame)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _write_to(stream: TextIO, text: str) -> None:
    stream.write(text)
