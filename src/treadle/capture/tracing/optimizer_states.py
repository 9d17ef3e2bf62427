"""``optimizer.state`` as the step finds it, and the changes that it makes there."""

import functools
from collections.abc import Callable, Iterator
from typing import TypeGuard, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.eager import why_eager
from treadle.capture.optimizers.eight_bits import scales_in
from treadle.capture.optimizers.optimizer_state import StateLocation, TracedState, refused_state
from treadle.capture.optimizers.param_groups import ParamGroup
from treadle.capture.optimizers.registry import update_rule
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.sources import StateKey
from treadle.capture.symbolic.changing_numbers import ChangingNumbers
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tracing.graph_updates import GraphUpdates
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.fake import is_traced
from treadle.compat.tensors import are_alike


@final
class OptimizerStates:
    """Those of one run. ``uses``: of numbers that stand in, if any do."""

    def __init__(
        self,
        request: TraceRequest,
        bindings: InputBindings,
        updates: GraphUpdates,
        recorder: TraceRecorder,
        uses: Uses | None,
    ) -> None:
        self._request, self._bindings = request, bindings
        self._updates, self._recorder, self._uses = updates, recorder, uses
        self._traced: list[TracedState] = []
        self._looked_at: dict[int, Optimizer] = {}  # whose state was there, or not, for the step
        self._before: dict[StateKey, Tensor] = {}  # what the step replaced

    def traced(self, optimizer: Optimizer) -> TracedState | None:
        """The replacement of ``optimizer.state``; empty for an optimizer outside the graph."""
        if not self._request.own_steps.takes(optimizer) and why_eager(optimizer) is not None:
            return None
        param_groups = {
            id(parameter): group
            for group in self._request.param_groups
            if group.optimizer is optimizer
            for parameter in group.parameters
        }

        def entries(parameter: nn.Parameter) -> dict[str, Tensor]:
            param_group = param_groups.get(id(parameter))
            return {} if param_group is None else self._now(parameter, param_group)

        def names(parameter: nn.Parameter) -> frozenset[str]:
            param_group = param_groups.get(id(parameter))
            return frozenset() if param_group is None else param_group.state_names(parameter)

        def replace(parameter: nn.Parameter, name: object, value: object) -> None:
            self._replace((id(optimizer), id(parameter), str(name)), value)

        pairs = self._pairs(optimizer)
        state = TracedState(optimizer, pairs, entries, names, replace, self._uses)
        self._traced.append(state)
        return state

    def _pairs(self, optimizer: Optimizer) -> dict[int, tuple[nn.Parameter, Tensor]]:
        """By the ids of both, its parameters with what is traced for them."""
        owners = {
            id(self._bindings.of(parameter)): parameter for parameter in self._request.parameters
        }
        pairs = [
            (owners[id(leaf)], leaf)
            for group in optimizer.param_groups  # which have what stands in by now
            for leaf in group["params"]
        ]
        return {id(key): pair for pair in pairs for key in pair}

    def _now(self, parameter: nn.Parameter, param_group: ParamGroup) -> dict[str, Tensor]:
        """The state of a parameter at this point of the step."""
        optimizer, rule = param_group.optimizer, update_rule(param_group.optimizer)
        taken = param_group.taken.get(parameter, 0)
        if not taken:
            self._looked_at[id(optimizer)] = optimizer
            if not param_group.state_names(parameter) & optimizer.state.get(parameter, {}).keys():
                return {}
        in_parts = layout_of(self._bindings.of(parameter)) is not None
        if in_parts or self._updates.is_divided(parameter):
            raise refused_state(
                "reads optimizer.state of parameters that are sharded between ranks"
            )
        skips = id(optimizer) in self._recorder.scaling.skips
        if skips or rule.counters.keys() - {"step"}:
            raise refused_state(f"reads the counters of {type(optimizer).__name__}")
        tensors: dict[str, Tensor] = {}
        if rule.counters:
            step = self._updates.scalar(param_group, "step", max(taken - 1, 0))
            kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            tensors["step"] = (step if taken else step - 1).to(kind)
        names = rule.states(parameter, self._updates.group_of(param_group))
        state = self._bindings.state_of(optimizer, parameter, names)
        if scales_in(state):
            raise refused_state("reads optimizer.state that is kept in 8 bits")
        return tensors | state

    def _replace(self, place: StateKey, value: object) -> None:
        """From now on ``value`` is that state of an update rule, as in eager: the next update reads
        it and writes to it."""
        states = self._bindings.states
        now = states.get(place)  # counters are none of them
        if now is None or not are_alike(now, value) or not _is_plain(value):
            raise refused_state(f"replaces {place[2]!r} in optimizer.state[p]")
        self._before.setdefault(place, now)
        states[place] = value

    def replaced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """State of update rules that was there, and the tensors that took its place."""
        for place, before in self._before.items():
            if self._bindings.states[place] is not before:
                yield before, self._bindings.states[place]

    def changes(self, numbers: ChangingNumbers) -> Iterator[tuple[StateLocation, object]]:
        """The changes of the step to the user's own entries."""
        for state in self._traced:
            for place, value in state.changes():
                if numbers.depends_on(place.before, value):
                    raise refused_state(f"counts in {place.label}, and depends on the number")
                yield place, value

    def places(self) -> dict[int, StateLocation]:
        """By its id, where a tensor of the user's is found in a state at a call."""
        return {key: place for state in self._traced for key, place in state.places().items()}

    def read(self, walk: ReadsWalk, needed: frozenset[object]) -> None:
        """The properties of the state on which the step depends. ``needed``: numbers whose values
        are in the graph."""
        for value in self._looked_at.values():
            has_state = functools.partial(_has_state, value)
            walk.add_computed(f"the state of {type(value).__name__}", has_state)
        for state in self._traced:
            if not state.has_own():
                continue
            walk.add_computed(state.name, functools.partial(state.layout, needed))
            elsewhere, label = walk.graph.tensors.places(), f"a tensor in {state.name}"
            for key, place in state.places().items():
                if key in elsewhere:
                    walk.add_computed(label, _compared(place, elsewhere[key]))


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return type(value) is not nn.Parameter and is_traced(value) and not value.requires_grad


def _has_state(optimizer: Optimizer) -> tuple[bool, ...]:
    """Which parameters have state."""
    of = (p for group in optimizer.param_groups for p in group["params"])
    return tuple(bool(optimizer.state.get(parameter)) for parameter in of)


def _compared(one: StateLocation, other: Location) -> Callable[[], bool]:
    """Whether both places have the very same object."""
    return lambda: one.get() is other.get()
