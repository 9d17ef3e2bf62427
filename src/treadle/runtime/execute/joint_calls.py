"""Calls of an artifact with a forward and a backward: they stop where the incoming gradients are
needed.

::

    forward     begin; the steps ahead of the first incoming gradient; the forward's results
    backward    the gradients; the other steps; the gradients of the inputs

Between the two, the values saved for the backward are in the arena. So each open call has its own
program, with its own arena; the programs share the code. A call ends after its backward, or when
its backward can no longer be called, and its program is then reused.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from torch import Tensor

from treadle.runtime.execute.executable import Executable
from treadle.runtime.execute.incoming import INCOMING
from treadle.runtime.replay.joint_replay import JointReplay
from treadle.runtime.store.artifact import Artifact, CallStep


@final
class JointCalls:
    """The calls of ``first``, whose first ``results`` results are the forward's."""

    def __init__(self, first: Executable, results: int) -> None:
        self._first = first
        self._results = results
        self._first_program = _Program(first, results)
        self._free = [self._first_program]

    @property
    def note(self) -> str:
        """Why calls are or are not recorded, in words."""
        return self._first_program.note

    def forward(
        self, inputs: Sequence[Tensor], seconds: list[float] | None = None
    ) -> tuple[list[Tensor | None], "OpenCall"]:
        """The results of the forward, and what runs its backward. ``seconds``: gets the time of
        each step, which is waited for."""
        try:  # one operation, and no lock: a collection may end another call at any point here
            program = self._free.pop()
        except IndexError:
            program = _Program(self._first.another(), self._results)
        call = OpenCall(program, self._free.append)
        try:
            return program.forward(inputs, seconds), call
        except BaseException:
            call.close()
            raise

    def release(self) -> None:
        """Give back the arenas of calls that are over; the next call allocates one again."""
        idle: list[_Program] = []
        with suppress(IndexError):  # taken one by one: no other call begins in one meanwhile
            while True:
                idle.append(self._free.pop())
        for program in idle:
            program.release()
        self._free += idle


@final
class OpenCall:
    """A call whose forward has run."""

    def __init__(self, program: "_Program", over: Callable[["_Program"], None]) -> None:
        self._program: _Program | None = program
        self._over = over

    def backward(
        self,
        gradients: list[Tensor],
        *,
        again: bool = False,
        seconds: list[float] | None = None,
    ) -> list[Tensor | None]:
        """The gradients of the inputs. ``gradients``: those of the results, which the call lets go
        of as soon as it has read them. ``again``: there may be another backward of this call."""
        program = self._program
        assert program is not None, "a call is over after its backward"
        try:
            return program.backward(gradients, seconds, again=again)
        finally:
            if not again:
                self.close()

    def close(self) -> None:
        """End the call without a backward."""
        program, self._program = self._program, None
        if program is not None:
            program.close()
            self._over(program)


@final
class _Program:
    """Runs one call at a time."""

    def __init__(self, executable: Executable, results: int) -> None:
        self._executable = executable
        self._frame = executable.frame
        self._results = results
        artifact = executable.artifact
        self._cut = _cut(artifact)
        self._over = _over(artifact, self._cut, results)
        self._replay: JointReplay | None = None
        policy, recorder = executable.policy, executable.recorder
        if policy is not None and recorder is not None and executable.replay is not None:
            halves = self._cut, results
            self._replay = JointReplay(artifact, self._frame, recorder, policy, *halves)

    @property
    def note(self) -> str:
        """Why its calls are or are not recorded."""
        return "" if self._replay is None else self._replay.note

    def forward(self, inputs: Sequence[Tensor], seconds: list[float] | None) -> list[Tensor | None]:
        """Begin a call and run its forward."""
        frame = self._frame

        def usual() -> list[Tensor | None]:
            frame.begin(inputs, starts=frame.memory.allocate)
            frame.actions.run(seconds, end=self._cut)
            results = frame.results(end=self._results)
            frame.let_go(self._over)
            return results

        with self._executable.undisturbed():
            if self._replay is None or seconds is not None:
                return usual()
            return self._replay.forward(inputs, usual)

    def backward(
        self, gradients: list[Tensor], seconds: list[float] | None, *, again: bool
    ) -> list[Tensor | None]:
        """Run the backward. ``again``: everything that it reads still exists afterwards."""
        frame, replay = self._frame, self._replay

        def usual() -> list[Tensor | None]:
            frame.use_threads()
            frame.bring_gradients(gradients)
            frame.actions.run(seconds, first=self._cut)
            return frame.results(self._results)

        with self._executable.undisturbed():
            restore = self._copied() if again else None
            try:
                if replay is None:
                    return usual()
                return replay.backward(gradients, usual, again=again)
            finally:
                if restore is not None:
                    restore()

    def _copied(self) -> Callable[[], None]:
        """A function that restores the present state of the call."""
        frame, replay = self._frame, self._replay
        kept = frame.copied()
        if replay is None or not replay.is_replayed:
            return lambda: frame.restore(kept)
        allocated = replay.copied()

        def restore() -> None:
            frame.restore(kept)
            replay.restore(allocated)

        return restore

    def release(self) -> None:
        """Free its arena, unless it runs a call."""
        self._executable.release()

    def close(self) -> None:
        """The call is over."""
        self._frame.end()
        if self._replay is not None:
            self._replay.close()


def _cut(artifact: Artifact) -> int:
    """The first step that takes an incoming gradient, or the number of steps if none does."""
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
