"""What a call carries to the next one, or to a flush.

::

    nothing pending --call--> pending --call--> pending --flush--> nothing pending
            first              steady                   flush

A call of another variant, a compile, an eager call, and every visible read of parameters or state
flush first. Pending work is removed only after a program that used it succeeded.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.compat.tracing import without_classes
from treadle.compiler.compiled import Carrying, Compiled
from treadle.runtime.execute.interrupt import Uninterrupted
from treadle.session.agreement import RankCall
from treadle.session.awaited import AsLeft
from treadle.session.perform import perform
from treadle.session.read_hooks import ReadHooks
from treadle.session.undo import Undo
from treadle.util.errors import RuntimeFailure
from treadle.util.memory import memory_start


@final
class _Carriers:
    """Some carriers, which it does not keep alive. ``refs``: by identity; every call asks whether
    there are any."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Carrier]] = {}

    def add(self, carrier: "Carrier") -> None:
        key = id(carrier)
        self.refs[key] = weakref.ref(carrier, lambda _: self.refs.pop(key, None))

    def discard(self, carrier: "Carrier") -> None:
        self.refs.pop(id(carrier), None)

    def alive(self) -> "list[Carrier]":
        found = [ref() for ref in list(self.refs.values())]
        return [carrier for carrier in found if carrier is not None]


_pending = _Carriers()
"""All with something pending: another step may read what one of them is to write. The modules whose
parameters are to be written keep it alive, by their hooks, and nothing else does."""
_hooked = _Carriers()
"""All with hooks in place, which no step may meet: it would take them for the user's."""


@final
@dataclass(frozen=True, slots=True)
class _Pending:
    """What ``compiled`` has yet to do, the values that it carries, and the memory it will write."""

    compiled: Compiled
    carrying: Carrying
    tensors: list[Tensor]
    storages: frozenset[int]
    written: list[Tensor]  # by the flush
    left: AsLeft  # these

    def continues(self, compiled: Compiled, inputs: Sequence[Tensor]) -> bool:
        """Whether a call of ``compiled`` on ``inputs`` updates what this writes to: a parameter or
        a state that was replaced by another one takes no part in it."""
        if compiled is not self.compiled:
            return False
        now = [inputs[at] for at in self.carrying.flushed]
        pairs = zip(now, self.written, strict=True)
        return all(new is old or _storage(new) == _storage(old) for new, old in pairs)


@final
class Carrier:
    """What one step carries from call to call. ``lock``: of the step's calls. As a context it is
    around a call: what that reads by itself is no reason to flush."""

    def __init__(
        self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
    ) -> None:
        self.lock = threading.RLock()
        self._hooks = ReadHooks(models, optimizers, self.catch_up)
        self._watched: Compiled | None = None
        self._now: _Pending | None = None
        self._calls = 0  # that are being served

    @property
    def is_busy(self) -> bool:
        """Whether a call is being served."""
        return self._calls > 0

    def __enter__(self) -> None:
        if _hooked.refs:
            _unhook()
        self._calls += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeFailure) and error.code == "TR-406":
            self._forget()
        self._calls -= 1
        if _pending.refs:
            _hook()

    def turn(
        self, compiled: Compiled, inputs: Sequence[Tensor]
    ) -> tuple[Compiled, Sequence[Tensor]]:
        """The program that serves a call of ``compiled`` on ``inputs``, and its inputs. TR-542
        where what is pending would come after a write that it was to come before."""
        self._check_order()
        if len(_pending.refs) > (self._now is not None):
            _flush_others(self, inputs)
        if self._now is not None and not self._now.continues(compiled, inputs):
            self._flush()
        carrying = compiled.carrying
        if carrying is None:
            return compiled, inputs
        if self._now is None:
            return carrying.first, inputs
        return carrying.steady, [*inputs, *self._now.tensors]

    def served(self, compiled: Compiled, program: Compiled, inputs: Sequence[Tensor]) -> None:
        """``program`` has run for a call of ``compiled`` on ``inputs``, and succeeded."""
        carrying = compiled.carrying
        if carrying is None:
            return
        compiled.has_run = compiled.has_run or program.has_run
        compiled.measured_peak = program.measured_peak or compiled.measured_peak
        if program is carrying.steady:
            compiled.kernel_seconds = program.kernel_seconds
            self.note_written()
            return
        assert program.kept is not None, "the first call keeps what it carries"
        written = [inputs[at] for at in carrying.flushed]
        places = frozenset(map(_storage, written))
        kept = program.kept.take()
        self._now = _Pending(
            compiled, carrying, kept, places, written, AsLeft(written, compiled.views)
        )
        _pending.add(self)
        if self._watched is not compiled:
            self._watched = compiled
            self._hooks.watch(written)

    def flush(self) -> None:
        """Run what is pending, after whatever was written meanwhile; nothing within a call. TR-539
        where that no longer fits."""
        with self.lock:
            if not self._calls and self._now is not None:
                self._flush()

    def catch_up(self) -> None:
        """A flush for somebody who is about to read or write. TR-542 as of ``turn``."""
        with self.lock, self._hooks.tensors.aside():
            if not self._calls:
                self._check_order()
                self.flush()

    def settle(self) -> None:
        """A flush, also within a call. TR-542 as of ``turn`` if the call is of this step; for the
        call of another step that is no error, and the update stays pending."""
        with self.lock:
            if self._now is None or (not self._calls and self._is_overtaken()):
                return
            with self._hooks.tensors.aside():
                self._check_order()
                self._flush()

    def _check_order(self) -> None:
        if self._is_overtaken():
            raise _overtaken()

    def _is_overtaken(self) -> bool:
        """Whether somebody has written to the tensors that the pending update is to write."""
        with without_classes():
            return self._now is not None and not self._now.left.holds()

    def hook(self) -> None:
        """See from now on who reads what is to be written."""
        _hooked.add(self)
        assert self._now is not None, "there is nothing to wait for"
        self._hooks.attach(self._now.written)

    def unhook(self) -> None:
        """No longer."""
        _hooked.discard(self)
        self._hooks.detach()

    def writes(self, inputs: Sequence[Tensor]) -> bool:
        """Whether it is to write to memory of one of ``inputs``."""
        now = self._now
        return now is not None and any(_storage(input_) in now.storages for input_ in inputs)

    def _flush(self) -> None:
        now = self._now
        assert now is not None, "there is nothing to flush"
        program = now.carrying.flush
        with torch.inference_mode(mode=False), Uninterrupted(), self._hooks.tensors.aside():
            inputs = [*now.written, *now.tensors]
            call = RankCall(program)
            try:
                perform(program, inputs, Undo.of(program, inputs), None, call)
            except RuntimeFailure as error:
                call.failed(error)
                if error.code == "TR-401":
                    self._forget()
                    raise _unfit(error) from error
                if error.code == "TR-406":
                    self._forget()
                self.note_written()  # it was undone
                raise
        self._forget()

    def note_written(self) -> None:
        """What we have written ourselves overtakes nothing."""
        if self._now is not None:
            self._now.left.note()

    def _forget(self) -> None:
        self._now = None
        _pending.discard(self)


def _flush_others(carrier: Carrier, inputs: Sequence[Tensor]) -> None:
    """What other steps are to write to memory that this call reads or writes. TR-542 as of
    ``turn``."""
    for other in _pending.alive():
        if other is not carrier and other.writes(inputs):
            other.catch_up()


def flush_all() -> None:
    """Whatever any step of the process has pending, within a call of one of them. TR-542 as of
    ``Carrier.settle``: what stays pending in other steps is an error only where its tensors are
    used."""
    for carrier in _pending.alive():
        carrier.settle()


def flush_for_eager() -> None:
    """Likewise, before user code runs eagerly: hooks see it read what stays pending."""
    flush_all()
    _hook()


def _hook() -> None:
    for carrier in _pending.alive():
        if not carrier.is_busy:
            carrier.hook()


def _unhook() -> None:
    for carrier in _hooked.alive():
        carrier.unhook()


def _storage(tensor: Tensor) -> int:
    return memory_start(tensor) if tensor.layout is torch.strided else 0


def _overtaken() -> RuntimeFailure:
    return RuntimeFailure(
        "something else that holds the memory of parameters or state (a view, p.data or an "
        "earlier array) wrote to them between two calls, while an update was carried to the next "
        "one: that update would run after the write instead of before it. Nothing is lost",
        code="TR-542",
        remedy=(
            "call step.flush() before such writes; now, step.flush() runs the update after the "
            "write, and the next call continues from there"
        ),
    )


def _unfit(error: RuntimeFailure) -> RuntimeFailure:
    return RuntimeFailure(
        f"an update that was carried to this call no longer fits, and is lost: {error.message}",
        code="TR-539",
        remedy="load the last checkpoint; call step.flush() before parameters or state are moved, "
        "converted or replaced",
    )
