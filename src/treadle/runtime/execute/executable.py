"""Runs an artifact: tensors in, launches and library calls in order, tensors out.

Everything that does not change between calls is done once: the arena, the views into it, the
pointer arrays, the operators. A call checks the inputs, updates the places of those that moved,
and walks a flat list of actions (``call_frame.py``).
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.arena import Arena, constant_bytes
from treadle.runtime.execute.call_frame import CallFrame, FirstLaunches, nothing
from treadle.runtime.execute.undisturbed import Undisturbed
from treadle.runtime.kernels.build import Build
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.replay.cuda_graph import CudaRecorder
from treadle.runtime.replay.replay import Replay
from treadle.runtime.replay.replay_policy import Recorder, ReplayPolicy
from treadle.runtime.replay.unchanged_inputs import (
    SteadyInputs,
    UntouchedTensors,
    Vouched,
    WatchedInputs,
)
from treadle.runtime.store.artifact import Artifact, Launch
from treadle.targets.registry import target_for
from treadle.util.rounds import Function


@final
class Executable:
    """A built artifact. Calls from several threads take turns.

    ``like``: an executable of the same sources, maybe for other sizes, whose code and generators it
    shares, and its arena unless it is given another. ``generators``: those of the user's that the
    artifact's calls draw from, by number. ``policy``: decides whether a launch-bound step is
    recorded by ``recorder`` (CUDA graphs on a GPU) and replayed. ``arena``: memory for its
    temporaries that it uses in turn with others.
    """

    def __init__(
        self,
        artifact: Artifact,
        build: Build,
        *,
        like: "Executable | None" = None,
        generators: Sequence[torch.Generator] = (),
        first: FirstLaunches = nothing,
        policy: ReplayPolicy | None = None,
        recorder: Recorder | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.artifact = artifact
        self._build = build
        self.device = torch.device(artifact.device)
        self.target = target_for(self.device)
        self.generators = generators if like is None else like.generators
        self._functions = _loaded(artifact, build) if like is None else like._functions
        self._programs = _programs_of(artifact, build) if like is None else like._programs
        self._arena = arena or (Arena() if like is None else like._arena)
        self.frame = CallFrame(
            artifact,
            self._functions,
            self._arena,
            programs=self._programs,
            generators=self.generators,
            first=first,
            steady=policy and policy.steady_inputs(len(artifact.inputs), policy.moving),
            moving=frozenset() if policy is None else policy.moving,
        )
        self.policy = policy
        self.recorder = recorder
        self.replay: Replay | None = None
        if policy is None or not policy.records or artifact.is_pattern:
            return
        if recorder is None and not self.target.on_host:
            shared = self._arena.recordings
            if shared.recorder is None:
                shared.recorder = CudaRecorder(self.device, policy.clear)
            self.recorder = recorder = shared.recorder
        if recorder is not None and not self.generators:
            self.replay = Replay(artifact, self.frame, recorder, policy)

    def run(
        self,
        inputs: Sequence[Tensor],
        seconds: list[float] | None = None,
        begins: Callable[[], None] = nothing,
        vouched: Vouched = (),
    ) -> list[Tensor | None]:
        """One call. The result tensors are the caller's: no later call changes them.

        ``seconds``: if given, one entry per step of the artifact, to which its time is added; the
        host waits for each step. ``begins`` is called once the inputs are found to fit.
        ``RuntimeFailure`` TR-401 when an input is not what the step was compiled for; TR-403,
        naming the step's origin, when a step fails.
        """
        frame = self.frame
        replay = self.replay if seconds is None else None

        def starts() -> None:
            begins()
            frame.memory.allocate()  # after what that frees

        with self._arena.lock, self.undisturbed():
            self._arena.keep_promise()
            if replay is not None:
                results = replay.run(inputs, starts, vouched)
                if results is not None:
                    return results
            try:
                frame.begin(inputs, starts=starts, vouched=vouched)
                if replay is not None:
                    replay.watch(frame.actions.run)
                else:
                    frame.actions.run(seconds)
                return frame.results()
            finally:
                frame.end()

    @property
    def watched(self) -> WatchedInputs | None:
        """What the next call checks about inputs that stay, unless the caller vouches for them."""
        if self.is_recorded and self.replay is not None:
            return self.replay.watched
        steady = self.frame.inputs.steady
        return None if steady is None else steady.watched

    def another(self) -> "Executable":
        """An executable of the same code with its own arena, for a call that begins before this
        one's has ended."""
        return Executable(self.artifact, self._build, like=self, arena=Arena(), policy=self.policy)

    def undisturbed(self) -> Undisturbed:
        """What runs inside is not changed by modes around it."""
        return Undisturbed(self.device.type)

    @contextmanager
    def repeated(self) -> Generator[Function]:
        """For the consecutive calls of a loop: work that does not change between them is done once.
        The arena exists until the last call is over."""
        frame = self.frame
        with self._arena.lock, self.undisturbed():
            frame.memory.allocate()
            frame.use_threads()
            count = len(self.artifact.inputs)
            frame.inputs.steady = SteadyInputs(count, frozenset(), UntouchedTensors)
            rounds = itertools.count()
            try:
                yield lambda inputs: self._round(inputs, trusted=next(rounds) > 0)
            finally:
                frame.inputs.steady = None
                frame.give_back()

    def _round(self, inputs: Sequence[Tensor], *, trusted: bool) -> list[Tensor]:
        """One of these calls. After the first, the programs of the loop made its inputs."""
        try:
            self.frame.begin_round(inputs, trusted=trusted)
            self.frame.actions.run()
            return [result for result in self.frame.results() if result is not None]
        finally:
            self.frame.end()

    def held(self) -> list[Tensor]:
        """What stays allocated between calls: the arena and the constants."""
        return self.frame.memory.held()

    @property
    def promised_bytes(self) -> int:
        """An upper bound of the bytes that any call of the executables in its arena holds,
        including recordings."""
        return self._arena.promised_bytes + self._arena.recordings.nbytes

    @property
    def is_recorded(self) -> bool:
        """Whether its calls replay a recording."""
        return self.replay is not None and self.replay.is_recorded

    @property
    def own_bytes(self) -> int:
        """Bytes that stay allocated for it alone, apart from what all executables in its arena
        share."""
        replay = self.replay
        kept = 0 if replay is None else self._arena.recordings.result_bytes(replay)
        return constant_bytes(self.artifact) + kept

    @property
    def place_bytes(self) -> int:
        """Bytes that the recordings of its arena share for their inputs."""
        return self._arena.recordings.block_bytes

    def takes_turns_with(self, other: "Executable") -> bool:
        """Whether the temporaries of both lie in the same arena."""
        return self._arena is other._arena

    def release(self) -> None:
        """Free the memory that no other executable in its arena needs; the next call allocates it
        again."""
        with self._arena.lock:
            if self.replay is not None:
                self.replay.drop()
            self.frame.leave()


def _loaded(artifact: Artifact, build: Build) -> Functions:
    launches = [step for step in artifact.steps if isinstance(step, Launch)]
    return build.load(artifact.sources, launches)


def _programs_of(artifact: Artifact, build: Build) -> Mapping[str, Executable]:
    """The programs that its loops run in each iteration. They share one arena, in which one runs
    while others are in the middle of a call."""
    turns = Arena(grows_only=True)
    bodies = artifact.bodies.items()
    return {name: Executable(body, build, arena=turns) for name, body in bodies}
