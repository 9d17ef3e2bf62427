"""What a capture gives: a graph, and how its inputs and outputs meet the user's objects."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from treadle.algebra.guards import GuardSet
from treadle.capture.argument_containers import ServedCall
from treadle.capture.eager import EagerStep
from treadle.capture.python_state.object_graph import Location
from treadle.capture.python_state.reads import Reads
from treadle.capture.sources import Inputs, ParamGroups, Pending, Scalars, Source
from treadle.capture.symbolic.branches.decisions import Path
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.deferred import NumbersOfCall
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.tracing.gradients import Toggle
from treadle.capture.tracing.side_effects import SideEffect
from treadle.capture.tracing.user_tensors import own_tensor
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.pytree import TreeSpec
from treadle.graph.core.operators import is_in_order, is_known
from treadle.graph.core.signature import StepGraph
from treadle.guards.watching import Watches


@dataclass(slots=True)
class Captured:
    """A step's graph and how its inputs and outputs meet the user's objects.

    ``sources`` say where each input is found at a call, in the signature's order. Outputs are
    first the tensor leaves of the user's result, then those of what is ``left`` outside, then the
    ``numbers`` that Python needs, then gradients the user's code leaves in ``.grad``, then those
    for optimizers that step eagerly, then write-backs. ``reads``: what the step depends on outside
    of it.
    """

    step: StepGraph
    device: str
    sources: tuple[Source, ...]
    result_tree: TreeSpec
    result_leaves: tuple[object, ...]  # slots where result tensors go
    reads: Reads
    call: ServedCall  # where the arguments of a call are found
    free: frozenset[int]  # leaves of the arguments whose values decide nothing
    counters: tuple[Location, ...]  # whose numbers are read at every call
    decisions: tuple[NumberDecision, ...]  # on numbers that are not in the graph
    left: tuple[SideEffect, ...]
    numbers: NumbersOfCall
    toggled: tuple[Toggle, ...]
    fresh: tuple[nn.Parameter, ...]  # what is in ``.grad`` at first does not matter
    untouched: tuple[nn.Parameter, ...]  # what is in ``.grad`` stays, and nobody looks at it
    unread_modes: frozenset[int]  # modules, by their numbers, that are in any mode
    kept: tuple[nn.Parameter, ...]  # of these it does, until the conditions are known to hold
    conditions: tuple[str, ...]  # lines that ask what only raises
    path: Path  # its decisions on values of tensors
    left_grads: tuple[nn.Parameter, ...]
    grad_slots: tuple[object, ...]  # beside them, how these are made of what the graph gives
    cleared_grads: tuple[nn.Parameter, ...]
    eager: tuple[EagerStep, ...]  # optimizers that step after the graph
    generators: tuple[torch.Generator, ...]  # of the user's, that the graph names by number
    param_groups: ParamGroups
    stepped: frozenset[int]  # param_groups whose counters advance
    scalars: Scalars
    inputs: Inputs
    host_draws: HostDraws
    pending: Pending  # state that there was not yet when a call began
    failed: Exception | None = None  # after a guess: then it is captured up to there
    guards: GuardSet = field(default_factory=GuardSet)  # of declared sizes, also of no input's

    @property
    def kept_bytes(self) -> int:
        """Gradients of the call before that stay while the step runs, beside what it counts."""
        return sum(local_of(each).nbytes for each in self.kept)

    @property
    def draws(self) -> bool:
        """Whether a call may take random numbers of the process': operators of others may."""
        return bool(self.eager) or any(
            is_in_order(node) or not is_known(node) for node in self.step.graph.nodes
        )

    def handed_out(self) -> list[Tensor]:
        """The user's own parameters and buffers that a call returns, or leaves somewhere."""
        places = (self.result_leaves, *(each.leaves for each in self.left))
        found = [own_tensor(leaf) for leaves in places for leaf in leaves]
        return [each for each in found if each is not None]

    def holds(self) -> bool:
        """Whether what it read outside is as it was, and its decisions come out as they did."""
        return self.reads.hold() and self._decides_alike()

    def _decides_alike(self) -> bool:
        if not self.decisions:
            return True
        with self.host_draws.foreseen():
            return all(each.holds() for each in self.decisions)

    def changed(self) -> list[str]:
        """What of that is different now, in words."""
        with self.host_draws.foreseen():
            return self.reads.changed() or [e.words for e in self.decisions if not e.holds()]

    def agrees(self) -> bool:
        """Whether parameters that share a step counter in the graph still share it."""
        return all(self.param_groups[at].agrees() for at in self.stepped)

    def join(self, watches: Watches) -> bool:
        """What it reads outside and its counters, while all is as it was; whether that can be
        said."""
        stepped = [self.param_groups[at] for at in self.stepped]
        watches.polled += [self._decides_alike] if self.decisions else []
        return self.reads.join(watches) and all(each.join(watches) for each in stepped)
