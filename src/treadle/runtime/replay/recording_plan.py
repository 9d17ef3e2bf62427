"""Which part of an artifact can be recorded: all steps, some segments, or nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch

from treadle.compat.operators.operator_facts import may_wait
from treadle.runtime.execute.bindings import spec_bytes
from treadle.runtime.execute.host_copies import NAMES as COPIES
from treadle.runtime.execute.incoming import imported
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.replay.segments import MOST, Segment, split
from treadle.runtime.store.artifact import Artifact, CallStep, Launch, Storage, View, views_in

_A_RECORDING = 2
"""Steps that a recording should have to be worth its own launch."""


@final
@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """``refusal``: why nothing can be recorded. ``segments``: empty where all is one recording;
    ``steps``: how many there are. ``placeable``: the inputs that may be replaced by copies at fixed
    places. ``results``: those that library calls allocate; ``nbytes``: the bytes of calls that a
    recording keeps."""

    refusal: str
    segments: tuple[Segment, ...]
    steps: int
    placeable: frozenset[int]
    results: frozenset[str]
    nbytes: int

    @classmethod
    def of(cls, artifact: Artifact, policy: ReplayPolicy) -> Self:
        """The plan for calls under ``policy``."""
        reasons = [why_not(artifact, step, policy.written) for step in artifact.steps]
        segments = _segments(artifact, reasons)
        refusal = "" if segments else next(filter(None, reasons), "")
        names = {view.buffer for view in artifact.results if view is not None}
        kept = [artifact.buffers[name] for name in names]
        kept += [
            artifact.buffers[name]
            for segment in segments
            for name in (*segment.reads, *segment.copied)
            if not artifact.buffers[name].unsized
        ]
        return cls(
            refusal,
            segments,
            len(artifact.steps),
            _placeable(artifact, reasons),
            frozenset(name for name in names if artifact.buffers[name].place is Storage.CALL),
            sum(spec_bytes(spec) for spec in kept if spec.place is Storage.CALL),
        )

    def made_apart(self) -> set[str]:
        """The results that no recorded segment makes: each call makes its own."""
        return {name for segment in self.segments if not segment.recorded for name in segment.makes}


def _placeable(artifact: Artifact, reasons: Sequence[str]) -> frozenset[int]:
    """The inputs on the device, and those on the host that a recorded step brings."""
    specs = [artifact.buffers[name] for name in artifact.inputs]
    on_device = {at for at, spec in enumerate(specs) if not spec.device}
    brought = (imported(artifact, step) for step in artifact.steps)
    pairs = zip(brought, reasons, strict=True)
    return frozenset(on_device | {slot.position for slot, why in pairs if slot and not why})


def why_not(artifact: Artifact, step: Launch | CallStep, written: frozenset[int]) -> str:
    """Why a step cannot be recorded; empty if it can. ``written``: inputs that the step writes;
    those of them on the host are copied in order, when the step needs them."""
    if isinstance(step, Launch):
        hosted = any(artifact.buffers[buffer].device for row in step.buffers for buffer in row)
        return "not recorded: part of the step runs on the host" if hosted else ""
    brought = imported(artifact, step)
    if brought is not None and brought.position not in written:
        return ""
    if step.op in COPIES:
        return ""
    masks = any(map(_is_mask, views_in(step.args)))
    if may_wait(step.op, masks=masks):
        return f"not recorded: {step.op} may wait for the host"
    if any(artifact.buffers[buffer].device for buffer in _touched(step)):
        return "not recorded: part of the step runs on the host"
    if any(artifact.buffers[buffer].unsized for buffer in _touched(step)):
        return "not recorded: sizes are known only at run time"
    return ""


def _segments(artifact: Artifact, why: Sequence[str]) -> tuple[Segment, ...]:
    """The segments of a step that is recorded in parts; none if all of it can be recorded, or too
    little."""
    pairs = list(zip(artifact.steps, why, strict=True))
    if not any(why) or any(word and isinstance(step, Launch) for step, word in pairs):
        return ()
    if any(isinstance(step, CallStep) and step.op in COPIES for step in artifact.steps):
        return ()  # a copy and its wait would be in two recordings
    can = [not word for word in why]
    for segment in split(artifact, can):
        if segment.recorded and all(imported(artifact, artifact.steps[at]) for at in segment.steps):
            for at in segment.steps:
                can[at] = False  # there would be nothing in the recording
    segments = split(artifact, can)
    recorded = [segment for segment in segments if segment.recorded]
    steps = sum(len(segment.steps) for segment in recorded)
    pays = recorded and len(segments) <= MOST and steps >= _A_RECORDING * len(recorded)
    names = [name for segment in segments for name in segment.copied]
    names += [view.buffer for view in artifact.results if view is not None]
    sized = not any(artifact.buffers[name].unsized for name in names)
    return segments if pays and sized else ()


def _is_mask(view: View) -> bool:
    """``x[mask]`` counts the mask's elements on the host."""
    return view.dtype in (torch.bool, torch.uint8)


def _touched(step: CallStep) -> Iterator[str]:
    """The buffers that a call reads or writes."""
    yield from (output for output in step.outputs if output is not None)
    for view in step.views:
        yield view.buffer
