"""Recordings of calls that stop in the middle: of a forward's launches, and of its backward's.

Like ``replay.py`` for whole steps. Both recordings are in one memory pool, and the forward's
allocations stay until the backward has run; incoming gradients have fixed places::

    call 1, 2     launch by launch
    call 3        the same, timed
    call 4        the forward is recorded, and then the backward
    call 5 ...    moving inputs and incoming gradients are copied to their places; replay

Both are recorded completely, or none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import final

from torch import Tensor

from treadle.runtime.execute.call_frame import CallFrame
from treadle.runtime.execute.incoming import INCOMING
from treadle.runtime.replay.fixed_places import FixedPlaces, place_bytes, places_in
from treadle.runtime.replay.recording_plan import RecordingPlan
from treadle.runtime.replay.replay_policy import Recorder, ReplayPolicy
from treadle.runtime.replay.shared_recordings import RecordingBytes
from treadle.runtime.replay.when_to_record import WhenToRecord, memory_for_recording
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep
from treadle.util.errors import RuntimeFailure
from treadle.util.expected import NotExpected

Results = list[Tensor | None]
Usual = Callable[[], Results]
"""A half of a call, launch by launch."""


class _Mode(Enum):
    """How the open call runs."""

    USUAL = auto()
    TIMED = auto()
    RECORDING = auto()
    REPLAYED = auto()


@final
@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded launches, and the buffers that they allocated and did not free."""

    launch: Callable[[], None]
    alive: Mapping[str, Tensor]


@final
class JointReplay:
    """Records the calls of one program when it is time, and replays those calls for which its
    recordings are valid. ``cut``: the first step of the backward; ``results``: how many of the
    results are the forward's."""

    def __init__(
        self,
        artifact: Artifact,
        frame: CallFrame,
        recorder: Recorder,
        policy: ReplayPolicy,
        cut: int,
        results: int,
    ) -> None:
        plan = RecordingPlan.of(artifact, policy)
        refusal = plan.refusal or (
            "not recorded: part of it waits for the host" if plan.segments else ""
        )
        self._when = WhenToRecord(refusal)
        self._frame, self._recorder = frame, recorder
        self._cut, self._results = cut, results
        self._incoming = _incoming(artifact)
        self._result_bytes = plan.nbytes
        self._places = FixedPlaces(artifact, frame, policy, plan.placeable)
        self._times = (0.0, 0.0)  # launching, and all, of the call that is timed
        self._mode = _Mode.USUAL
        self._inputs: Sequence[Tensor] = ()  # of a call that is replayed
        self._forget()
        self.limit_bytes = artifact.peak_bytes + policy.room
        frame.memory.recordings.join(self)

    def _forget(self) -> None:
        self._forward: _Recorded | None = None
        self._backward: _Recorded | None = None
        self._gradients: dict[int, Tensor] = {}
        self._tables: list[Tensor] = []

    @property
    def note(self) -> str:
        """Why calls are or are not recorded, in words."""
        return self._when.note

    @property
    def is_replayed(self) -> bool:
        """Whether the open call is replayed."""
        return self._mode is _Mode.REPLAYED

    def forward(self, inputs: Sequence[Tensor], usual: Usual) -> Results:
        """The forward's results; ``usual`` computes them launch by launch."""
        self._mode = _Mode.USUAL
        if self._when.is_off:
            return usual()
        if self._forward is not None and self._backward is not None:
            if self._places.fit(inputs) and self._frame.memory.keeps_block():
                return self._replayed_forward(self._forward, inputs)
            self._drop()
        elif self._when.is_due:
            places = self._memory_for_places(inputs)
            if places is not None:
                return self._recorded_forward(inputs, places)
        self._places.observe(inputs)
        if not self._when.is_timed():
            return usual()
        self._mode, self._times = _Mode.TIMED, (0.0, 0.0)
        return self._timed(usual)

    def backward(self, gradients: Sequence[Tensor], usual: Usual, *, again: bool) -> Results:
        """The gradients of the inputs. ``again``: there may be another backward of this call."""
        match self._mode:
            case _Mode.REPLAYED:
                assert self._forward is not None
                assert self._backward is not None
                return self._replayed_backward(self._forward, self._backward, gradients)
            case _Mode.RECORDING if not again:
                return self._recorded_backward(gradients)
            case _Mode.TIMED:
                results = self._timed(usual)
                self._when.took(*self._times)
                self._mode = _Mode.USUAL
                return results
            case _:
                return usual()

    def close(self) -> None:
        """End the call."""
        if self._mode is _Mode.RECORDING and self._backward is None:
            self._drop()  # its backward did not come
        if self._mode is _Mode.TIMED:
            self._when.time_another()
        self._mode, self._inputs = _Mode.USUAL, ()

    def copied(self) -> list[Tensor]:
        """Copies of what the forward of a replayed call has allocated."""
        assert self._forward is not None
        return [tensor.clone() for tensor in self._forward.alive.values()]

    def restore(self, copies: Sequence[Tensor]) -> None:
        """Put back what was copied."""
        assert self._forward is not None
        for tensor, copy in zip(self._forward.alive.values(), copies, strict=True):
            tensor.copy_(copy)

    def _timed(self, usual: Usual) -> Results:
        results: Results = []
        launching, total = self._recorder.timed(lambda: results.extend(usual()))
        self._times = self._times[0] + launching, self._times[1] + total
        return results

    def _drop(self) -> None:
        self._frame.memory.recordings.leave(self)
        self.lose_recording(again=False)

    def lose_recording(self, *, again: bool) -> None:
        """Forget both recordings, and make them again. ``again``: however often they were made."""
        self._forget()
        self._places.drop()
        self._when.put_off(again=again)

    @property
    def place_bytes(self) -> int:
        """Bytes of the places for inputs and incoming gradients."""
        if self._when.is_off:
            return 0
        return self._places.nbytes + place_bytes(self._incoming.values())

    def _memory_for_places(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Memory for places, if this call may be recorded."""
        need = RecordingBytes(self.place_bytes, self._result_bytes)
        memory = self._frame.memory
        return memory_for_recording(self, self._when, self._places, memory, need, inputs)

    def give_up(self, why: str) -> None:
        """Launch as usual for good."""
        self._drop()
        self._when.give_up(why)

    def _recorded_forward(self, inputs: Sequence[Tensor], places: Tensor) -> Results:
        frame = self._frame
        frame.memory.allocate()
        self._places.settle(inputs, places)
        gradients = places_in(places[self._places.nbytes :], self._incoming.values())
        self._gradients = dict(zip(self._incoming, gradients, strict=True))
        self._recorder.start()
        bound = self._places.bound(inputs)

        def launched() -> None:
            frame.begin(*bound)
            frame.actions.run(end=self._cut)

        self._forward = self._record(launched)
        if self._forward is None:
            return frame.results(end=self._results)
        self._mode = _Mode.RECORDING
        return self._own(frame.results(end=self._results), self._forward)

    def _recorded_backward(self, gradients: Sequence[Tensor]) -> Results:
        frame = self._frame
        self._fill(gradients)

        def launched() -> None:
            frame.bring_gradients([self._gradients.get(at, g) for at, g in enumerate(gradients)])
            frame.actions.run(first=self._cut)

        self._backward = self._record(launched)
        results = frame.results(self._results)
        if self._backward is None:
            return results
        self._when.is_due = False
        self._when.recorded("two CUDA graphs")
        return self._own(results, self._backward)

    def _record(self, launched: Callable[[], None]) -> _Recorded | None:
        """A recording of ``launched``, whose work is done too; ``None`` if recording fails, and the
        work is done as usual."""
        frame, before = self._frame, self._frame.alive()

        def run() -> dict[str, Tensor]:
            launched()
            return frame.alive()

        try:
            alive, launch = self._recorder.record(run)
        except (RuntimeError, RuntimeFailure, NotExpected) as error:
            frame.settle(failed=True)
            self.give_up(str(error).partition("\n")[0])
            frame.define(before)
            launched()
            return None
        self._tables += frame.settle()
        launch()
        return _Recorded(launch, alive)

    def _own(self, results: Results, recorded: _Recorded) -> Results:
        """Results that belong to the caller: no later call changes them."""
        return self._frame.copied_out(results, recorded.alive)

    def _replayed_forward(self, forward: _Recorded, inputs: Sequence[Tensor]) -> Results:
        self._mode, self._inputs = _Mode.REPLAYED, inputs
        self._frame.memory.recordings.use(self)
        self._places.fill(inputs)
        forward.launch()
        return self._frame.replayed_results(inputs, forward.alive, end=self._results)

    def _replayed_backward(
        self, forward: _Recorded, backward: _Recorded, gradients: Sequence[Tensor]
    ) -> Results:
        self._fill(gradients)
        backward.launch()
        alive = {**forward.alive, **backward.alive}
        return self._frame.replayed_results(self._inputs, alive, first=self._results)

    def _fill(self, gradients: Sequence[Tensor]) -> None:
        for number, place in self._gradients.items():
            place.copy_(gradients[number])


def _incoming(artifact: Artifact) -> dict[int, BufferSpec]:
    """The buffer that each incoming gradient fills, by the number of the gradient."""
    specs: dict[int, BufferSpec] = {}
    for step in artifact.steps:
        if isinstance(step, CallStep) and step.op == INCOMING:
            number, name = step.args[1], step.outputs[0]
            assert isinstance(number, int)
            assert name is not None
            specs[number] = artifact.buffers[name]
    return specs
