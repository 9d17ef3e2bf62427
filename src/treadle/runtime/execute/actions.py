"""The actions of an artifact's steps, as one flat list that a call walks."""

import contextlib
import functools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import length_hint
from typing import final

import torch

from treadle.compat.switches import profiler_listens
from treadle.runtime.execute.in_flight import IN_FLIGHT
from treadle.runtime.kernels.launch_table import JoinedLaunchError, LaunchJoiner
from treadle.runtime.store.artifact import Artifact, CallStep, Launch
from treadle.targets.registry import target_for
from treadle.util.errors import GroupFailure, RuntimeFailure, joined_with
from treadle.util.expected import NotExpected

Action = Callable[[], object]


@final
@dataclass(frozen=True, slots=True)
class ActionSequence:
    """Actions that run one after another, and the position of each among all of a step."""

    actions: list[Action]
    positions: Sequence[int]

    def position(self, left: Iterator[Action]) -> int:
        """The position of the action that runs now; the actions after it are ``left``."""
        return self.positions[len(self.actions) - length_hint(left) - 1]


@final
class Actions:
    """The actions of an artifact in order, and which step each belongs to. ``joiners``: make one
    action of consecutive launches."""

    def __init__(self, artifact: Artifact, joiners: Sequence[LaunchJoiner] = ()) -> None:
        self.flat: list[Action] = []
        self.owners: list[int] = []
        self._artifact = artifact
        self._joiners = joiners
        self._programs: dict[tuple[int, int, bool], ActionSequence] = {}
        self._of: list[Action] = []  # what they were made of
        self._handles: Sequence[str] = ()
        self._driver = target_for(artifact.device).driver
        self._device = torch.device(artifact.device)

    def add(self, step: int, actions: Sequence[Action]) -> None:
        """Append what a step does."""
        self.flat += actions
        self.owners += [step] * len(actions)

    def name_steps(self, names: Sequence[str]) -> None:
        """From now on profiles show each step of the artifact inside a range of this name; steps
        whose name is empty get none."""
        self._handles = names
        self._programs = {}

    def run(
        self, seconds: list[float] | None = None, *, first: int = 0, end: int | None = None
    ) -> None:
        """Run all actions, or those of the steps ``first`` to ``end - 1``. ``seconds``: gets the
        time of each step; the host waits for each. TR-403, with the step's origin, when one
        fails."""
        start_at = bisect_left(self.owners, first) if first else 0
        stop_at = len(self.flat) if end is None else bisect_left(self.owners, end)
        if seconds is None:
            program = self.program(start_at, stop_at)
        else:
            program = self._apart(start_at, stop_at, seconds)
        self._run(program)

    def _run(self, program: ActionSequence) -> None:
        left = iter(program.actions)
        try:
            for action in left:
                action()
        except NotExpected:
            IN_FLIGHT.finish()
            raise
        except JoinedLaunchError as joined:
            raise self._ended(program.position(left) + joined.at, joined.error) from joined.error
        except Exception as error:
            raise self._ended(program.position(left), error) from error

    def program(self, start_at: int, stop_at: int) -> ActionSequence:
        """These actions, with consecutive launches as one; while a profiler listens, each step
        inside ranges with its names."""
        if self._of is not self.flat:
            self._programs, self._of = {}, self.flat
        profiled = profiler_listens()
        known = self._programs.get((start_at, stop_at, profiled))
        if known is None:
            places = range(start_at, stop_at)
            known = self._named(places) if profiled else self._joined(places)
            self._programs[start_at, stop_at, profiled] = known
        return known

    def _joined(self, places: Sequence[int]) -> ActionSequence:
        return _together([(at, self.flat[at]) for at in places], self._joiners)

    def _named(self, places: Sequence[int]) -> ActionSequence:
        """One action of each step."""
        groups = [list(group) for _, group in groupby(places, self.owners.__getitem__)]
        actions: list[Action] = [
            _Named([self.flat[at] for at in group], self._names(self.owners[group[0]]))
            for group in groups
        ]
        return ActionSequence(actions, [group[0] for group in groups])

    def _names(self, number: int) -> list[str]:
        """The names of a step's ranges, from outside to inside. PyTorch names its own operators."""
        step = self._artifact.steps[number]
        if isinstance(step, Launch):
            own = step.shown or step.function
        else:
            own = step.op if step.bodies else ""
        handle = self._handles[number] if self._handles else ""
        return [name for name in (handle, own) if name]

    def _apart(self, start_at: int, stop_at: int, seconds: list[float]) -> ActionSequence:
        """These actions; the host waits for each and adds its time to that of its step."""

        def timed(action: Action, owner: int) -> None:
            start = self._now()
            action()
            seconds[owner] += self._now() - start

        places = range(start_at, stop_at)
        return ActionSequence(
            [functools.partial(timed, self.flat[at], self.owners[at]) for at in places], places
        )

    def run_steps(self, steps: Sequence[int]) -> None:
        """Run the actions of some steps."""
        for step in steps:
            first, end = bisect_left(self.owners, step), bisect_right(self.owners, step)
            self._run(self.program(first, end))

    def _ended(self, position: int, error: Exception) -> RuntimeFailure | NotExpected:
        """The error to raise for a failure: one after which the call may be made again, or one
        after which no rank continues."""
        failure = self._failure(position, error)
        if isinstance(failure, NotExpected):
            IN_FLIGHT.finish()
        else:
            IN_FLIGHT.abandon()
        return failure

    def _failure(self, position: int, error: Exception) -> RuntimeFailure | NotExpected:
        number = self.owners[position]
        step = self._artifact.steps[number]
        if isinstance(error, GroupFailure):
            return error.at(step.origin)
        ours = isinstance(error, RuntimeFailure)
        checked = not ours and not isinstance(error, torch.OutOfMemoryError)
        is_torchs = isinstance(step, CallStep) and not step.bodies
        if number < self._artifact.untouched and is_torchs and checked:
            return NotExpected(str(error))  # nothing has happened yet: eager meets it as well
        name = step.function if isinstance(step, Launch) else step.op
        said, remedy = (error.message, error.remedy) if ours else (str(error), _REMEDY[is_torchs])
        kind = joined_with(type(error), RuntimeFailure) if is_torchs and checked else RuntimeFailure
        return kind(f"{name} failed: {said}", code="TR-403", where=step.origin, remedy=remedy)

    def _now(self) -> float:
        self._driver.synchronize(self._device)
        return time.perf_counter()


_REMEDY = {
    True: "correct the shapes, dtypes or arguments at that line; calling the function without "
    "treadle shows it as well",
    False: "Options(codegen=False) runs PyTorch's kernels; please report it, with the step",
}
"""The remedy, by whether the kernel is PyTorch's."""


def _together(
    pairs: Sequence[tuple[int, Action]], joiners: Sequence[LaunchJoiner]
) -> ActionSequence:
    def joiner_of(pair: tuple[int, Action]) -> LaunchJoiner | None:
        return next((joiner for joiner in joiners if joiner.takes(pair[1])), None)

    program: list[tuple[int, Action]] = []
    for joiner, group in groupby(pairs, joiner_of):
        members = list(group)
        if joiner is not None:
            program.append((members[0][0], joiner.together([action for _, action in members])))
        else:
            program += members
    return ActionSequence([action for _, action in program], [at for at, _ in program])


@final
@dataclass(frozen=True, slots=True)
class _Named:
    """The actions of a step inside ranges that profiles show, the first around the others."""

    actions: Sequence[Action]
    names: Sequence[str]

    def __call__(self) -> None:
        with contextlib.ExitStack() as ranges:
            for name in self.names:
                ranges.enter_context(torch.profiler.record_function(name))
            for action in self.actions:
                action()
