"""Steps that are bound by launch overhead: recorded once as a CUDA graph, and replayed.

A step of hundreds of small kernels takes as long as the host needs to launch them. Its launches are
the same at every call: the arena, parameters and state stay where they are. So the third call is
timed (``when_to_record``), and if launching took a large part of it, the launches are recorded and
later calls pass all of them to the GPU at once::

    call 1, 2     launch by launch: kernels are compiled, libraries choose their algorithms
    call 3        the same, timed
    call 4 ...    moving inputs are copied to fixed places; replay; results are copied out

Random numbers advance the generator as they do when launched one by one. Operations that may wait
for the host cannot be recorded, so only operations that are known not to are recorded; the others
run between recordings of the rest (``segments``). A call whose parameters moved is launched
normally, and then recorded again.
"""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from treadle.runtime.execute.call_frame import CallFrame
from treadle.runtime.replay.fixed_places import FixedPlaces
from treadle.runtime.replay.recording_plan import RecordingPlan
from treadle.runtime.replay.recordings import Recording, record_segments, record_whole
from treadle.runtime.replay.replay_policy import Recorder, ReplayPolicy
from treadle.runtime.replay.shared_recordings import RecordingBytes
from treadle.runtime.replay.unchanged_inputs import Vouched, WatchedInputs
from treadle.runtime.replay.when_to_record import WhenToRecord, memory_for_recording
from treadle.runtime.store.artifact import Artifact
from treadle.util.expected import NotExpected


@final
class Replay:
    """Records a step when it is time, and replays the calls for which its recording is valid."""

    def __init__(
        self, artifact: Artifact, frame: CallFrame, recorder: Recorder, policy: ReplayPolicy
    ) -> None:
        self._plan = RecordingPlan.of(artifact, policy)
        self._when = WhenToRecord(self._plan.refusal)
        self._places = FixedPlaces(artifact, frame, policy, self._plan.placeable)
        self._frame, self._recorder = frame, recorder
        self._recording: Recording | None = None
        self.limit_bytes = artifact.peak_bytes + policy.room
        frame.memory.recordings.join(self)

    @property
    def note(self) -> str:
        """Why it is or is not recorded, in words."""
        return self._when.note

    @property
    def is_recorded(self) -> bool:
        """Whether calls replay a recording."""
        return self._recording is not None

    def watch(self, run: Callable[[], None]) -> None:
        """Run a call as usual; one of the first calls is timed."""
        if not self._when.is_timed():
            run()
            return
        try:
            self._when.took(*self._recorder.timed(run))
        except NotExpected:
            self._when.time_another()
            raise

    @property
    def watched(self) -> WatchedInputs | None:
        """The inputs that stay, which a replay checks."""
        return self._places.watched

    def run(
        self, inputs: Sequence[Tensor], begins: Callable[[], None], vouched: Vouched = ()
    ) -> list[Tensor | None] | None:
        """The results of a replayed call; ``None`` if this one is to run as usual. ``begins`` is
        called before anything runs."""
        if self._when.is_off:
            return None
        memory = self._frame.memory
        if self._recording is not None:
            if self._places.fit(inputs, vouched) and memory.keeps_block():
                memory.recordings.use(self)
                begins()
                self._places.fill(inputs)
                return self._recording.replay(inputs)
            self.drop()
        elif not self._when.is_due:
            self._places.observe(inputs)
        elif (places := self._memory_for_places(inputs)) is not None:
            begins()
            return self._record(inputs, places)
        return None

    def drop(self) -> None:
        """Forget the recording and free its memory."""
        self._frame.memory.recordings.leave(self)
        self.lose_recording(again=False)

    def lose_recording(self, *, again: bool) -> None:
        """Forget the recording; a later call makes it again. ``again``: however often it was
        made."""
        self._recording = None
        self._places.drop()
        self._when.put_off(again=again)

    @property
    def place_bytes(self) -> int:
        """Bytes of the places that its inputs need."""
        return 0 if self._when.is_off else self._places.nbytes

    def _memory_for_places(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Memory for places, if this call may be recorded."""
        need = RecordingBytes(self._places.nbytes, self._plan.nbytes)
        refusal = "an argument is written to" if self._places.are_written else ""
        memory = self._frame.memory
        return memory_for_recording(self, self._when, self._places, memory, need, inputs, refusal)

    def give_up(self, why: str) -> None:
        """Launch as usual for good."""
        self.drop()
        self._when.give_up(why)

    def _record(self, inputs: Sequence[Tensor], places: Tensor) -> list[Tensor | None]:
        record = record_segments if self._plan.segments else record_whole
        self._places.settle(inputs, places)
        try:
            attempt = record(self._frame, self._recorder, self._plan, self._places, inputs)
        except NotExpected:
            self.drop()
            self._frame.settle(failed=True)
            raise
        self._recording = attempt.recording
        if attempt.recording is None:
            self.give_up(attempt.failure)
        else:
            self._when.recorded(str(attempt.recording))
        return attempt.results
