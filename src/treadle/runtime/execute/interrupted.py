"""Calls of an artifact that is a forward and a backward: they stop where gradients come in.

::

    forward     begin; the steps ahead of the first incoming gradient; the forward's results
    backward    the gradients; the other steps; the gradients of the inputs

Between the two, what the backward takes of the forward lies in the arena. So each call that is open
has a program of its own, with its own arena; they share the code. A call is over after its
backward, or when nobody can ask for it any more, and its program serves another one then.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import final

from torch import Tensor

from treadle.runtime.execute.executable import Executable
from treadle.runtime.execute.incoming import INCOMING
from treadle.runtime.store.artifact import Artifact, CallStep


@final
class InterruptedCalls:
    """The calls of ``first``, whose first ``results`` results are the forward's."""

    def __init__(self, first: Executable, results: int) -> None:
        self.results = results
        self.cut = _cut(first.artifact)
        self._over = _over(first.artifact, self.cut, results)
        self._first = first
        self._free = [first]
        self._lock = threading.Lock()

    def forward(
        self, inputs: Sequence[Tensor], seconds: list[float] | None = None
    ) -> tuple[list[Tensor | None], "OpenCall"]:
        """The results of the forward, and what runs its backward."""
        with self._lock:
            program = self._free.pop() if self._free else self._first.another()
        call = OpenCall(self, program)
        try:
            values = program.run_until(self.cut, inputs, self.results, seconds)
            program.frame.let_go(self._over)
            return values, call
        except BaseException:
            call.close()
            raise

    def take_back(self, program: Executable) -> None:
        """A call of ``program`` is over."""
        with self._lock:
            self._free.append(program)


@final
class OpenCall:
    """A call whose forward has run."""

    def __init__(self, calls: InterruptedCalls, program: Executable) -> None:
        self._calls = calls
        self._program: Executable | None = program

    def backward(
        self,
        gradients: Sequence[Tensor],
        *,
        again: bool = False,
        seconds: list[float] | None = None,
    ) -> list[Tensor | None]:
        """The gradients of the inputs. ``again``: there may be another backward of this call."""
        program, calls = self._program, self._calls
        assert program is not None, "a call is over after its backward"
        kept = program.frame.copied() if again else None
        try:
            return program.run_from(calls.cut, gradients, calls.results, seconds)
        finally:
            if kept is None:
                self.close()
            else:
                program.frame.restore(kept)

    def close(self) -> None:
        """Nobody will ask for its backward."""
        program, self._program = self._program, None
        if program is not None:
            program.frame.end()
            self._calls.take_back(program)

    def close_with(self, owner: object) -> None:
        """When ``owner`` is gone, at the latest."""
        weakref.finalize(owner, self.close)


def _cut(artifact: Artifact) -> int:
    """The first step that takes an incoming gradient; behind the last one where none does."""
    takes = (
        at
        for at, step in enumerate(artifact.steps)
        if isinstance(step, CallStep) and step.op == INCOMING
    )
    return next(takes, len(artifact.steps))


def _over(artifact: Artifact, cut: int, results: int) -> frozenset[str]:
    """Inputs and results that nothing reads from ``cut`` on."""
    read = {view.buffer for view in artifact.results[results:] if view is not None}
    for step in artifact.steps[cut:]:
        if isinstance(step, CallStep):
            read.update(view.buffer for view in step.views)
        else:
            read.update(name for row in step.buffers for name in row)
    given = {view.buffer for view in artifact.results[:results] if view is not None}
    return frozenset({*artifact.inputs, *given} - read)
