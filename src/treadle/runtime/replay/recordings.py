"""Recordings of a step's launches: of all launches, or of the segments that can be recorded.

Each begins with a call that is recorded while it runs. The results of that call are correct,
whether the recording succeeds or not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor

from treadle.runtime.execute.call_frame import CallFrame
from treadle.runtime.replay.fixed_places import FixedPlaces
from treadle.runtime.replay.recording_plan import RecordingPlan
from treadle.runtime.replay.replay_policy import Recorder
from treadle.runtime.replay.segments import Segment
from treadle.util.errors import RuntimeFailure
from treadle.util.expected import NotExpected


class Recording(Protocol):
    """Launches that were recorded. ``str`` describes them."""

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay a call whose moving inputs are at their places; its results."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """A call that was to be recorded: its results, and the recording or why there is none."""

    results: list[Tensor | None]
    recording: Recording | None
    failure: str = ""


@final
@dataclass(frozen=True, slots=True)
class WholeRecording:
    """All launches as one. ``held``: the results that calls allocated; ``tables``: what the
    launches read."""

    frame: CallFrame
    held: Mapping[str, Tensor]
    launch: Callable[[], None]
    tables: list[Tensor]

    def __str__(self) -> str:
        return "one CUDA graph"

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Copied out of ``held``."""
        self.launch()
        return self.frame.replayed_results(inputs, self.held)


def record_whole(
    frame: CallFrame,
    recorder: Recorder,
    plan: RecordingPlan,
    places: FixedPlaces,
    inputs: Sequence[Tensor],
) -> Attempt:
    """Launch this call on the fixed places, and then record the same launches."""
    bound, brought = places.bound(inputs)

    def launched() -> dict[str, Tensor]:
        try:
            frame.begin(bound, brought)
            frame.actions.run_steps(range(plan.steps))
            return frame.alive()
        finally:
            frame.end()

    results = frame.replayed_results(inputs, launched())
    recorder.start()
    try:
        held, launch = recorder.record(launched)
    except (RuntimeError, RuntimeFailure) as error:
        frame.settle(failed=True)
        return Attempt(results, None, _first_line(error))
    return Attempt(results, WholeRecording(frame, held, launch, frame.settle()))


@final
@dataclass(slots=True)
class SegmentedRecording:
    """Recorded segments of a step; the other segments run between them. ``launches``: by segment,
    if it was recorded; ``held``: buffers that later segments or results take at later calls;
    ``tables``: the tables that the launches read."""

    frame: CallFrame
    plan: RecordingPlan
    places: FixedPlaces
    launches: list[Callable[[], None] | None] = field(
        default_factory=list[Callable[[], None] | None]
    )
    held: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tables: list[Tensor] = field(default_factory=list[Tensor])

    def __str__(self) -> str:
        count = sum(segment.recorded for segment in self.plan.segments)
        apart = sum(len(segment.steps) for segment in self.plan.segments if not segment.recorded)
        return f"{count} CUDA graphs, {apart} operations apart"

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the recorded segments, and run the others."""
        frame = self.frame
        try:
            frame.begin(*self.places.bound(inputs))
            for segment, launch in zip(self.plan.segments, self.launches, strict=True):
                if launch is not None:
                    launch()
                    continue
                frame.define({name: self.held[name] for name in segment.reads})
                frame.actions.run_steps(segment.steps)
                alive = frame.alive()
                for name in segment.copied:
                    self.held[name].copy_(alive[name])
            return self.results(inputs, self.held | frame.alive())
        finally:
            frame.end()

    def record(self, segment: Segment, recorder: Recorder) -> str:
        """Record a segment and do its work; the reason if it could not be recorded. Its work is
        done then as well."""
        frame = self.frame
        before = frame.alive()

        def launched() -> dict[str, Tensor]:
            frame.actions.run_steps(segment.steps)
            return frame.alive()

        try:
            _, launch = recorder.record(launched)
        except (RuntimeError, RuntimeFailure, NotExpected) as error:
            frame.settle(failed=True)
            frame.define(before)
            frame.actions.run_steps(segment.steps)
            return _first_line(error)
        self.tables += frame.settle()
        launch()
        self.launches.append(launch)
        return ""

    def run(self, segment: Segment) -> None:
        """Run a segment that is not recorded."""
        self.frame.actions.run_steps(segment.steps)
        self.launches.append(None)

    def hold(self, segment: Segment) -> None:
        """Keep those buffers of a segment that other segments take at later calls, or that are
        results."""
        alive = self.frame.alive()
        wanted = set(segment.copied)
        if segment.recorded:
            wanted = self.plan.results.union(*(part.reads for part in self.plan.segments))
            wanted &= set(segment.makes)
        self.held |= {name: alive[name] for name in wanted & alive.keys()}

    def results(
        self, inputs: Sequence[Tensor], values: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """The results; those that no recorded segment made belong to this call."""
        apart = self.plan.made_apart()
        held = {name: values[name] for name in self.plan.results - apart}
        fresh = {
            name: values[name].clone() if values[name] is self.held.get(name) else values[name]
            for name in self.plan.results & apart
        }  # what recorded segments read at later calls is not given away
        return self.frame.replayed_results(inputs, held, fresh)


def record_segments(
    frame: CallFrame,
    recorder: Recorder,
    plan: RecordingPlan,
    places: FixedPlaces,
    inputs: Sequence[Tensor],
) -> Attempt:
    """Run this call segment by segment: each segment that can be recorded is recorded and replayed
    at once."""
    recording = SegmentedRecording(frame, plan, places)
    failure = ""
    recorder.start()
    try:
        frame.begin(*places.bound(inputs))
        for segment in plan.segments:
            if segment.recorded and not failure:
                failure = recording.record(segment, recorder)
            else:
                recording.run(segment)
            recording.hold(segment)
        results = recording.results(inputs, frame.alive())
    finally:
        frame.end()
    return Attempt(results, None if failure else recording, failure)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
