"""Steps that are bound by launching: recorded once as a CUDA graph, and replayed.

A step of hundreds of small kernels takes as long as the host needs to launch them. Its launches
are the same at every call: the arena, parameters and state stay where they are. So the third call
is timed, and if launching was a good part of it, the launches are recorded and later calls give
the GPU all of them at once::

    call 1, 2     launch by launch: kernels are compiled, libraries choose their algorithms
    call 3        the same, timed
    call 4 ...    moving inputs are copied to fixed places; replay; results are copied out

Draws advance the generator as they do when launched one by one. What may wait for the host while
it runs cannot be recorded, so only operations known not to are; the others run between recordings
of the rest (``segments``). A call whose parameters moved is launched as usual, and then recorded
again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.compat.operators.operator_facts import may_wait
from treadle.runtime.execute.bindings import same_strides, spec_bytes
from treadle.runtime.execute.incoming import imported
from treadle.runtime.replay.segments import MOST, Segment, split
from treadle.runtime.replay.unchanged_inputs import LayoutsOf, SteadyInputs
from treadle.runtime.store.artifact import Artifact, CallStep, Launch, Storage, View, views_in
from treadle.util.errors import RuntimeFailure
from treadle.util.expected import NotExpected

_TIMED_CALL = 3
_SHARE = 0.3
"""Recording pays if launching takes at least this share of a call."""
_ATTEMPTS = 4


Launches = Callable[[], dict[str, Tensor]]
"""Launches everything; gives the results that calls allocated, by the names of their buffers."""


class Recorder(Protocol):
    """What records launches; on a GPU CUDA does."""

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """Run; seconds until everything was launched, and until everything was done."""
        ...

    def start(self) -> None:
        """A new recording: of all launches, or of several parts that share their memory."""
        ...

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Run without doing the work. What it gave, and what does the work, into those tensors.
        ``RuntimeError`` if that cannot be."""
        ...


class Recordable(Protocol):
    """A step that can be replayed; see ``Executable``."""

    def launch(self, inputs: Sequence[Tensor], imported: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Launch everything on ``inputs`` with these copies of those on the host; the buffers of
        results that calls allocated."""
        ...

    def bring(self, inputs: Sequence[Tensor], at: int) -> Tensor:
        """A copy on the device of an input that is on the host."""
        ...

    def begin(self, inputs: Sequence[Tensor], imported: Mapping[int, Tensor]) -> None:
        """Bind the inputs of a call in parts, as ``launch`` does."""
        ...

    def perform(self, steps: Sequence[int]) -> None:
        """Some steps of that call."""
        ...

    def alive(self) -> dict[str, Tensor]:
        """The buffers that calls have allocated and that are still to be read, by name."""
        ...

    def define(self, buffers: Mapping[str, Tensor]) -> None:
        """From now on these are buffers that calls allocate."""
        ...

    def end(self) -> None:
        """After the last step, and after an error."""
        ...

    def settle(self, *, failed: bool = False) -> list[Tensor]:
        """Write what launches that were recorded could not; what must be kept with them. None of
        it if the recording ``failed``."""
        ...

    def results(
        self,
        inputs: Sequence[Tensor],
        held: Mapping[str, Tensor],
        fresh: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor | None]:
        """The results, none of which shares memory with ``held``; ``fresh``: of this call alone."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """What a recording has to know of a step. ``moving``: inputs that are elsewhere at each call;
    ``written``: those that change in place; ``room``: bytes it may cost beside the plan's own;
    ``clear``: gives the workspaces of libraries back; ``layouts``: watches layouts."""

    moving: frozenset[int]
    written: frozenset[int]
    room: int
    clear: Callable[[], None]
    layouts: LayoutsOf | None = None


class Replay:
    """Whether a step is worth recording, and its recording."""

    def __init__(
        self,
        artifact: Artifact,
        step: Recordable,
        recorder: Recorder,
        policy: "ReplayPolicy",
    ) -> None:
        self._specs = [artifact.buffers[name] for name in artifact.inputs]
        why = [_why_not(artifact, step, policy.written) for step in artifact.steps]
        self.note = next(filter(None, why), "")
        self._segments = _segments(artifact, why)
        if self._segments:
            self.note = ""
        self._off = bool(self.note)
        brought = (imported(artifact, step) for step in artifact.steps)
        self._placeable = {at for at, spec in enumerate(self._specs) if not spec.device} | {
            each[0] for each, word in zip(brought, why, strict=True) if each and not word
        }
        hosted = {at for at, spec in enumerate(self._specs) if spec.device}
        self._moving = (set(policy.moving) | hosted) & self._placeable
        names = {view.buffer for view in artifact.results if view is not None}
        self._results = {each for each in names if artifact.buffers[each].place is Storage.CALL}
        kept = [artifact.buffers[name] for name in names]
        kept += [
            artifact.buffers[name]
            for each in self._segments
            for name in (*each.reads, *each.copied)
            if not artifact.buffers[name].unsized
        ]
        self._extra = sum(spec_bytes(spec) for spec in kept if spec.place is Storage.CALL)
        self._device = torch.device(artifact.device)
        self._written, self._room, self._layouts = policy.written, policy.room, policy.layouts
        self._step, self._recorder = step, recorder
        self._calls = self._attempts = 0
        self._due = False
        self._again: Callable[[], None] | None = None
        self._places: dict[int, Tensor] = {}
        self._held: dict[str, Tensor] = {}
        self._tables: list[Tensor] = []
        self._parts: list[Callable[[], None] | None] = []  # by segment, where it was recorded
        self._addresses: list[int] = []
        self._stays: list[bool] = []  # by input, whether it was recorded where it is
        self._steady: SteadyInputs | None = None  # of these, those that are the same tensors

    @property
    def is_recorded(self) -> bool:
        """Whether calls replay a recording."""
        return self._again is not None

    def watch(self, run: Callable[[], None]) -> None:
        """Run a call as usual; one of the first is timed."""
        self._calls += not self._off
        if self._off or self._calls != _TIMED_CALL:
            run()
            return
        try:
            launching, total = self._recorder.timed(run)
        except NotExpected:
            self._calls -= 1  # another call is timed
            raise
        times = f"launching took {1e3 * launching:.2f} of {1e3 * total:.2f} ms"
        self._due = launching >= _SHARE * total
        self._off = not self._due
        self.note = times if self._due else f"not recorded: {times}"

    def run(
        self, inputs: Sequence[Tensor], begins: Callable[[], None]
    ) -> list[Tensor | None] | None:
        """The results of a replayed call; ``None`` if this one is to run as usual. ``begins`` is
        called before anything runs."""
        if self._off:
            return None
        if self._again is not None and not self._fits(inputs):
            self.drop()
            self._due = True
            return None
        if self._due:
            if not self._may_record(inputs):
                return None
            begins()
            return self._record_parts(inputs) if self._segments else self._record(inputs)
        if self._again is None:
            self._observe(inputs)
            return None
        begins()
        self._fill(inputs)
        if self._segments:
            return self._perform_parts(inputs)
        self._again()
        return self._step.results(inputs, self._held)

    def drop(self) -> None:
        """Forget the recording, and give its memory back."""
        self._again, self._due, self._steady = None, False, None
        self._places, self._held, self._tables, self._parts = {}, {}, [], []

    def _observe(self, inputs: Sequence[Tensor]) -> None:
        """What is elsewhere than in the call before moves, unless the step writes to it."""
        addresses = [each.data_ptr() for each in inputs]
        if self._addresses:
            pairs = zip(addresses, self._addresses, strict=True)
            moved = {at for at, (a, b) in enumerate(pairs) if a != b}
            self._moving |= (moved & self._placeable) - self._written
        self._addresses = addresses

    def _fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether what was recorded is right for these: what moved has its layout, nothing else
        moved."""
        if not all(self._is_alike(inputs[at], at) for at in self._places):
            return False
        others = range(len(inputs)) if self._steady is None else self._steady.others(inputs)
        moved = {
            at
            for at in others
            if self._stays[at]
            and (
                inputs[at].data_ptr() != self._addresses[at]
                or inputs[at].dtype is not self._specs[at].dtype
            )
        }
        self._moving |= moved - self._written
        if not moved and self._steady is not None:
            self._steady.learn(inputs, self._stays)
        return not moved

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        for at, place in self._places.items():
            place.copy_(self._step.bring(inputs, at) if self._specs[at].device else inputs[at])

    def _may_record(self, inputs: Sequence[Tensor]) -> bool:
        self._due = False
        self._attempts += 1
        moving = sorted(self._moving)
        extra = self._extra + sum(spec_bytes(self._specs[at]) for at in moving)
        why = ""
        if self._moving & self._written:
            why = "an argument is written to"
        elif extra > self._room:
            why = f"copies of {extra} bytes have no room beside the plan"
        elif self._attempts > _ATTEMPTS:
            why = "its tensors move from call to call"
        self._off, self.note = bool(why), f"not recorded: {why}" if why else self.note
        return not why and all(self._is_alike(inputs[at], at) for at in moving)

    def _record(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """This call, launched on the fixed places, and then the same launches recorded."""
        self._settle_places(inputs)
        bound, imported = self._bound(inputs)
        results = self._step.results(inputs, self._step.launch(bound, imported))
        self._recorder.start()
        try:
            made = self._recorder.record(lambda: self._step.launch(bound, imported))
        except (RuntimeError, RuntimeFailure) as error:
            self.drop()
            self._step.settle(failed=True)
            self._off = True
            self.note = f"not recorded: {str(error).splitlines()[0]}"
            return results
        self._held, self._again = made
        self._tables = self._step.settle()
        self.note = f"{self.note.split(';')[0]}; replayed as one CUDA graph"
        return results

    def _settle_places(self, inputs: Sequence[Tensor]) -> None:
        """From now on what moves has a place, which has these numbers, and the rest stays."""
        self._places = {at: self._place(at) for at in sorted(self._moving)}
        self._addresses = [each.data_ptr() for each in inputs]
        fixed = self._placeable - self._places.keys()
        self._stays = [at in fixed for at in range(len(inputs))]
        if self._layouts is not None:
            self._steady = SteadyInputs(len(inputs), frozenset(self._places), self._layouts)
        self._fill(inputs)

    def _bound(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The inputs with places for those that move, and the places of those from the host."""
        imported = {at: each for at, each in self._places.items() if self._specs[at].device}
        bound = [
            each if at in imported else self._places.get(at, each) for at, each in enumerate(inputs)
        ]
        return bound, imported

    def _record_parts(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """This call, segment by segment: what can be recorded is, and is replayed at once."""
        self._settle_places(inputs)
        failure = ""
        self._recorder.start()
        try:
            self._step.begin(*self._bound(inputs))
            for segment in self._segments:
                if segment.recorded and not failure:
                    failure = self._record_part(segment)
                else:
                    self._step.perform(segment.steps)
                    self._parts.append(None)
                self._hold(segment)
            results = self._results_of(inputs, self._step.alive())
        except NotExpected:
            self.drop()
            self._step.settle(failed=True)
            self._due = True  # another call is recorded
            raise
        finally:
            self._step.end()
        if failure:
            self.drop()
            self._off, self.note = True, f"not recorded: {failure}"
            return results
        self._again = _nothing
        count = sum(each.recorded for each in self._segments)
        others = sum(len(each.steps) for each in self._segments if not each.recorded)
        self.note = (
            f"{self.note.split(';')[0]}; replayed as {count} CUDA graphs, {others} operations apart"
        )
        return results

    def _record_part(self, segment: Segment) -> str:
        """Record a segment and do its work; why it could not be recorded, if so: its work is done
        then as well."""
        before = self._step.alive()

        def run() -> dict[str, Tensor]:
            self._step.perform(segment.steps)
            return self._step.alive()

        try:
            _, again = self._recorder.record(run)
        except (RuntimeError, RuntimeFailure, NotExpected) as error:
            self._step.settle(failed=True)
            self._step.define(before)
            self._step.perform(segment.steps)
            return str(error).partition("\n")[0]
        self._tables += self._step.settle()
        again()
        self._parts.append(again)
        return ""

    def _hold(self, segment: Segment) -> None:
        """Of what a segment has made, what other segments take at later calls, and results."""
        alive = self._step.alive()
        wanted = set(segment.copied)
        if segment.recorded:
            wanted = self._results.union(*(each.reads for each in self._segments))
            wanted &= set(segment.makes)
        self._held |= {name: alive[name] for name in wanted & alive.keys()}

    def _perform_parts(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """A later call: what was recorded is replayed, the rest runs."""
        try:
            self._step.begin(*self._bound(inputs))
            for segment, again in zip(self._segments, self._parts, strict=True):
                if again is not None:
                    again()
                    continue
                self._step.define({name: self._held[name] for name in segment.reads})
                self._step.perform(segment.steps)
                alive = self._step.alive()
                for name in segment.copied:
                    self._held[name].copy_(alive[name])
            return self._results_of(inputs, self._held | self._step.alive())
        finally:
            self._step.end()

    def _results_of(
        self, inputs: Sequence[Tensor], found: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """Of a call in parts: what no recorded segment made is this call's own."""
        apart = {name for each in self._segments if not each.recorded for name in each.makes}
        held = {name: found[name] for name in self._results - apart}
        fresh = {
            name: found[name].clone() if found[name] is self._held.get(name) else found[name]
            for name in self._results & apart
        }  # what recorded segments read at later calls is not given away
        return self._step.results(inputs, held, fresh)

    def _is_alike(self, tensor: Tensor, at: int) -> bool:
        spec = self._specs[at]
        return (
            tensor.shape == spec.shape
            and tensor.dtype is spec.dtype
            and tensor.device.type == (spec.device or self._device.type)
            and same_strides(tensor, spec)
        )

    def _place(self, at: int) -> Tensor:
        spec = self._specs[at]
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self._device)


def why_not(artifact: Artifact) -> str:
    """Why the launches of an artifact cannot all be recorded; empty if they can."""
    return next(filter(None, (_why_not(artifact, step) for step in artifact.steps)), "")


def _why_not(
    artifact: Artifact, step: Launch | CallStep, written: frozenset[int] = frozenset()
) -> str:
    """Why a step cannot be recorded; empty if it can. ``written``: inputs that the step writes: one
    of them that is on the host is brought when its turn comes."""
    if isinstance(step, Launch):
        hosted = any(artifact.buffers[each].device for row in step.buffers for each in row)
        return "not recorded: a part of the step is on the host" if hosted else ""
    brought = imported(artifact, step)
    if brought is not None and brought[0] not in written:
        return ""
    masks = any(map(_is_mask, views_in(step.args)))
    if may_wait(step.op, masks=masks):
        return f"not recorded: {step.op} may wait for the host"
    if any(artifact.buffers[each].device for each in touched(step)):
        return "not recorded: a part of the step is on the host"
    if any(artifact.buffers[each].unsized for each in touched(step)):
        return "not recorded: sizes are known at run time only"
    return ""


def _segments(artifact: Artifact, why: Sequence[str]) -> tuple[Segment, ...]:
    """The parts of a step that is recorded in parts; none if all of it is, or too little."""
    pairs = list(zip(artifact.steps, why, strict=True))
    if not any(why) or any(word and isinstance(step, Launch) for step, word in pairs):
        return ()
    can = [not word for word in why]
    for each in split(artifact, can):
        if each.recorded and all(imported(artifact, artifact.steps[at]) for at in each.steps):
            for at in each.steps:
                can[at] = False  # there would be nothing in the recording
    found = split(artifact, can)
    recorded = [each for each in found if each.recorded]
    steps = sum(len(each.steps) for each in recorded)
    pays = recorded and len(found) <= MOST and steps >= _A_RECORDING * len(recorded)
    names = [name for each in found for name in each.copied]
    names += [view.buffer for view in artifact.results if view is not None]
    sized = not any(artifact.buffers[name].unsized for name in names)
    return found if pays and sized else ()


_A_RECORDING = 2
"""Steps that a recording should have to be worth its own launch."""


def _nothing() -> None:
    return


def _is_mask(view: View) -> bool:
    """``x[mask]`` counts the mask's elements on the host."""
    return view.dtype in (torch.bool, torch.uint8)


def touched(step: CallStep) -> Iterator[str]:
    """The buffers that a call reads or writes."""
    yield from (each for each in step.outputs if each is not None)
    for view in step.views:
        yield view.buffer
