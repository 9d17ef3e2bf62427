"""The result of a capture: a graph, and how its inputs and outputs map to the user's objects."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from treadle.algebra.guards import GuardSet
from treadle.capture.argument_containers import ServedCall
from treadle.capture.eager import EagerStep
from treadle.capture.optimizers.param_groups import ParamGroup, ParamGroups
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.sources import Inputs, Pending, RunTimeNumber, Scalars, Source
from treadle.capture.stored.reads import StoredReads
from treadle.capture.symbolic.branches.decisions import Path
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.deferred import NumbersOfCall
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.tensors.gradient_effects import GradientEffects
from treadle.capture.tensors.own_tensors import own_tensor
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.pytree import TreeSpec
from treadle.graph.core.signature import StepGraph
from treadle.guards.watching import Watches

if TYPE_CHECKING:  # few steps leave anything, or have such dims
    from treadle.capture.input_sources import Dims
    from treadle.capture.tracing.side_effects import SideEffect


@final
@dataclass(frozen=True, slots=True, eq=False)
class CallInputs:
    """Where each input of the graph is found at a call, in the signature's order.

    ``call``: where the arguments of a call are found. ``scalars`` and ``values`` read them.
    ``pending``: state that did not exist yet when a call began.
    """

    sources: tuple[Source, ...]
    call: ServedCall
    scalars: Scalars
    values: Inputs
    pending: Pending

    def run_time_numbers(self) -> int:
        """The number of Python numbers that it takes."""
        return sum(isinstance(source, RunTimeNumber) for source in self.sources)


@final
@dataclass(frozen=True, slots=True, eq=False)
class CapturedResult:
    """What a call returns and stores outside: ``leaves``, with slots for tensors of the graph, and
    their ``tree``; side effects; and the ``numbers`` that Python needs for them."""

    tree: TreeSpec
    leaves: tuple[object, ...]
    left: "tuple[SideEffect, ...]"
    numbers: NumbersOfCall

    def handed_out(self) -> list[Tensor]:
        """The user's own parameters and buffers that a call returns, or leaves somewhere."""
        places = (self.leaves, *(change.leaves for change in self.left))
        tensors = [own_tensor(leaf) for leaves in places for leaf in leaves]
        return [tensor for tensor in tensors if tensor is not None]


@final
@dataclass(frozen=True, slots=True, eq=False)
class OptimizerEffects:
    """Optimizers that step after the graph (``eager``); the groups in the graph, and the numbers of
    those whose counters advance."""

    eager: tuple[EagerStep, ...]
    param_groups: ParamGroups
    stepped: frozenset[int]

    def stepping(self) -> list[ParamGroup]:
        """The groups whose counters advance."""
        return [self.param_groups[at] for at in self.stepped]

    def agrees(self) -> bool:
        """Whether parameters that share a step counter in the graph still share it."""
        return all(group.agrees() for group in self.stepping())


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepDependencies:
    """What the step depends on beside the types of its inputs.

    ``reads``: its reads of external state. ``free``: leaves of the arguments whose values decide
    nothing. ``counters``: places whose numbers are read at every call. ``decisions``: decisions on
    numbers that are not in the graph; ``host_draws``: random numbers of Python's and NumPy's
    generators. ``unread_modes``: modules, by their numbers, that may be in any mode.
    ``conditions``: lines with conditions that only decide whether to raise. ``path``: its decisions
    on values of tensors.
    """

    reads: ReadsGuard
    free: frozenset[int]
    counters: tuple[Location, ...]
    decisions: tuple[NumberDecision, ...]
    host_draws: HostDraws
    unread_modes: frozenset[int]
    conditions: tuple[str, ...]
    path: Path

    def hold(self) -> bool:
        """Whether everything that it read outside is unchanged and its decisions come out as
        before."""
        return self.reads.hold() and self._decide_alike()

    def _decide_alike(self) -> bool:
        if not self.decisions:
            return True
        with self.host_draws.foreseen():
            return all(decision.holds() for decision in self.decisions)

    def changed(self) -> list[str]:
        """The differences, in words."""
        with self.host_draws.foreseen():
            return self.reads.changed() or [e.words for e in self.decisions if not e.holds()]

    def distance(self) -> tuple[int, int]:
        """How far all that is from what it was, smaller is nearer: first by what was read, then by
        how early the first decision comes out otherwise."""
        with self.host_draws.foreseen():
            others = (at for at, each in enumerate(self.decisions) if not each.holds())
            return len(self.reads.changed()), -next(others, len(self.decisions))

    def join(self, watches: Watches) -> bool:
        """Add it to ``watches``, which tell whether it is unchanged; false if that cannot be
        watched."""
        watches.polled += [self._decide_alike] if self.decisions else []
        return self.reads.join(watches)


@final
@dataclass(slots=True)
class Captured:
    """A step's graph and how its inputs and outputs meet the user's objects.

    Outputs are first the tensor leaves of the user's result, then those of what is left outside,
    then the numbers that Python needs, then gradients the user's code leaves in ``.grad``, then
    those for optimizers that step eagerly, then write-backs. ``generators``: the user's generators,
    which the graph names by number. ``failed``: the error after a guess; then the step is captured
    up to that point. ``guards``: guards on sizes that calls change, including sizes of no input;
    ``dims``: those of the arguments' leaves; ``sized``: the user's lines that need such sizes as
    numbers. ``stored``: its reads, for other processes.
    """

    step: StepGraph
    device: str
    inputs: CallInputs
    result: CapturedResult
    gradients: GradientEffects
    optimizers: OptimizerEffects
    dependencies: StepDependencies
    generators: tuple[torch.Generator, ...]
    stored: StoredReads
    failed: Exception | None = None
    guards: GuardSet = field(default_factory=GuardSet)
    dims: "Dims | None" = None
    sized: tuple[str, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the previous call's gradients that stay while the step runs, in addition to its
        own peak."""
        return sum(local_of(parameter).nbytes for parameter in self.gradients.kept)

    def between_calls(self, step: StepGraph) -> "Captured":
        """The part ``step`` of it, which runs when no call does: it clears no gradients, asks no
        conditions, and no optimizer steps after it."""
        return replace(
            self,
            step=step,
            gradients=replace(self.gradients, fresh=(), kept=()),
            optimizers=replace(self.optimizers, eager=()),
            dependencies=replace(self.dependencies, conditions=()),
        )

    def join(self, watches: Watches) -> bool:
        """Add its reads and counters to ``watches``, which tell whether they are unchanged; false
        if that cannot be watched."""
        groups = self.optimizers.stepping()
        return self.dependencies.join(watches) and all(group.join(watches) for group in groups)
