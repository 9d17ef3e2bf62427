"""Sets of nodes that run in the next call.

::

    a step:      h = relu(mm(x, w)); ...; g = mm(..); s = reduce(g); w' = sub(w, s)    w <- w'

    first:       h = relu(mm(x, w)); ...; g = mm(..)                            return g
    steady:      s = reduce(c); w' = sub(w, s); h = relu(mm(x, w')); ...; g = mm(..)
                                                                         w <- w';  c <- g
    flush:       s = reduce(c); w' = sub(w, s)                                  w <- w'

``c`` is carried: what the set would have read. Each call computes what the step computes, in the
same order of writes and reads: parameters and states after a flush are those of the step, and so is
what each call returns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import fx

from treadle.graph.analysis.alias import Aliases, analyse, storages
from treadle.graph.analysis.update_blocks import made_of_scalars
from treadle.graph.core.node_info import (
    NodeInfo,
    describe,
    info,
    set_value,
    tensor_of,
    value_of,
    with_info,
)
from treadle.graph.core.operators import may_recompute
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.types import is_tensor
from treadle.graph.core.values import compute, inherit, like, refresh
from treadle.graph.core.verify import verify
from treadle.passes.comm.carry.moves import Move, MovedSet, moved_sets
from treadle.util.errors import VerifyError

aten = torch.ops.aten
_Env = dict[fx.Node, fx.Node]


@final
@dataclass(frozen=True, slots=True)
class CarriedSteps:
    """A step as three, over its own inputs and those that are carried.

    ``first``: the step's inputs; the carried values stand among its outputs from ``results`` on.
    ``steady``: the step's inputs, then the carried ones, which it writes anew. ``flush``: those of
    the step's inputs that ``flushed`` numbers, then the carried ones; it returns nothing.
    ``carried``: names of the carried values.
    """

    first: StepGraph
    steady: StepGraph
    flush: StepGraph
    results: int
    flushed: tuple[int, ...]
    carried: tuple[str, ...]


def carried(step: StepGraph, moves: Sequence[Move]) -> CarriedSteps:
    """``step`` with sets of its nodes in the next call. Changes nothing. ``TreadleError`` TR-530 to
    TR-537, which names what is in the way of a move."""
    sets = moved_sets(step, moves)
    plan = _Plan(step, sets)
    steps = CarriedSteps(
        _first(plan),
        _steady(plan),
        _flush(plan),
        sum(output.writes is None for output in step.signature.outputs),
        plan.flushed,
        tuple(map(_name, plan.values)),
    )
    for step in (steps.first, steps.steady, steps.flush):
        verify(step)
    return steps


def _name(value: fx.Node) -> str:
    return f"{info(value).name or value.name} of the previous call"


@final
@dataclass(frozen=True, slots=True)
class _Moved:
    """What runs for one set in the next call: its nodes and those that are computed again for it,
    in order."""

    nodes: tuple[fx.Node, ...]
    writes: Mapping[int, fx.Node]
    before: fx.Node


class _Plan:
    """What is carried, and what is computed again from it: views, and what is made of scalars
    alone. ``values``: each once, whichever sets read it."""

    def __init__(self, step: StepGraph, sets: Sequence[MovedSet]) -> None:
        self.step = step
        self.places = step.placeholders
        self.removed = {node for moved_set in sets for node in moved_set.nodes}
        self.written = {at for moved_set in sets for at in moved_set.writes}
        self.values: dict[fx.Node, None] = {}
        self._index = {node: at for at, node in enumerate(self.places)}
        self._aliases: Aliases = analyse(step)
        self._position = {node: at for at, node in enumerate(step.graph.nodes)}
        self._of_scalars = made_of_scalars(step)
        self.sets = tuple(self._planned(moved_set) for moved_set in sets)
        inputs = {
            at
            for moved in self.sets
            for node in moved.nodes
            for operand in node.all_input_nodes
            if (at := self._index.get(operand)) is not None and at in moved.writes
        }
        self.flushed = tuple(sorted(inputs | self.written))

    def _planned(self, moved_set: MovedSet) -> _Moved:
        nodes: dict[fx.Node, None] = dict.fromkeys(moved_set.nodes)
        worklist = [operand for node in moved_set.nodes for operand in node.all_input_nodes]
        while worklist:
            node = worklist.pop()
            if node in nodes or node in self.values or self._index.get(node) in moved_set.writes:
                continue
            if self._is_computed_again(node, moved_set):
                nodes[node] = None
                worklist += node.all_input_nodes
            else:
                if not is_tensor(node):
                    raise VerifyError(f"{node} is carried, and is not one tensor")
                self.values[node] = None
        ordered = sorted(nodes, key=self._position.__getitem__)
        return _Moved(tuple(ordered), moved_set.writes, moved_set.before)

    def _is_computed_again(self, node: fx.Node, moved_set: MovedSet) -> bool:
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or not may_recompute(node):
            return False
        if node in self._of_scalars or not node.all_input_nodes:
            return True
        operand = node.all_input_nodes[0]
        if len(node.all_input_nodes) > 1 or not is_tensor(node) or not is_tensor(operand):
            return False
        if not self._aliases.share(operand, node):
            return False
        base = self._aliases.base(node)
        if base is not None and self._index.get(base) in moved_set.writes:
            return True
        return tensor_of(operand).numel() <= tensor_of(node).numel()


@dataclass(slots=True)
class _Copy:
    """A graph in the making, of nodes of the step's. ``env``: by node of the step what stands for
    it."""

    step: StepGraph
    graph: fx.Graph
    inputs: list[Input] = field(default_factory=list[Input])
    env: _Env = field(default_factory=_Env)
    fresh: list[fx.Node] = field(default_factory=list[fx.Node])  # new values of inputs

    @staticmethod
    def of(step: StepGraph, inputs: Iterable[int]) -> "_Copy":
        """With some of the step's inputs."""
        copy = _Copy(step, fx.Graph(owning_module=step.graph.owning_module))
        places = step.placeholders
        for at in inputs:
            copy.env[places[at]] = copy.graph.node_copy(places[at])
            copy.inputs.append(step.signature.inputs[at])
        return copy

    def carried_inputs(self, values: Iterable[fx.Node]) -> _Env:
        """Inputs for carried values."""
        new_inputs: _Env = {}
        for value in values:
            place = self.graph.placeholder(f"{value.name}_carried")
            name = _name(value)
            describe(place, like(_laid_out(value)), NodeInfo(name=name))
            new_inputs[value] = place
            self.inputs.append(Input(Role.CARRIED, name))
        return new_inputs

    def node(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A copy of ``node``."""
        return self.graph.node_copy(node, env.__getitem__)

    def run(self, moved: _Moved, carried_: Mapping[fx.Node, fx.Node]) -> dict[int, fx.Node]:
        """The set, on what was carried; by input its new value."""
        places = self.step.placeholders
        env = {places[at]: self.env[places[at]] for at in moved.writes} | dict(carried_)
        phase = info(moved.before).phase or "optimizer"
        for node in moved.nodes:
            env[node] = new = self.node(node, env)
            set_value(new, compute(new) if node.op == "call_function" else value_of(node))
            with_info(new, phase=phase)
        return {at: env[value] for at, value in moved.writes.items()}

    def returns(self, values: Sequence[fx.Node | None], outputs: Sequence[Output]) -> StepGraph:
        """The finished step."""
        self.graph.output(tuple(values))
        refresh(self.graph, self.fresh)
        self.graph.lint()
        signature = Signature(tuple(self.inputs), tuple(outputs))
        return StepGraph(self.graph, signature, list(self.step.history))


def _laid_out(value: fx.Node) -> torch.Tensor:
    """The type that a carried value is kept in: its own, or plain where its elements overlap or
    have gaps between them."""
    tensor = tensor_of(value)
    with torch.no_grad():
        return (
            tensor
            if _is_dense(tensor)
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.empty_like(tensor).stride() == tensor.stride()


def _first(plan: _Plan) -> StepGraph:
    """The step without the moved sets; what these would have read is returned."""
    copy = _Copy.of(plan.step, range(len(plan.places)))
    for node in plan.step.graph.nodes:
        if node.op in ("call_function", "get_attr") and node not in plan.removed:
            copy.env[node] = copy.node(node, copy.env)
    values, outputs = _kept_outputs(plan, copy.env)
    at = sum(output.writes is None for output in outputs)
    kept = _kept_values(plan, copy, values)
    names = [Output(_name(value)) for value in plan.values]
    return copy.returns([*values[:at], *kept, *values[at:]], [*outputs[:at], *names, *outputs[at:]])


def _steady(plan: _Plan) -> StepGraph:
    """The moved sets of the call before, each in front of its node, and the rest of the step."""
    copy = _Copy.of(plan.step, range(len(plan.places)))
    base = dict(copy.env)
    carried_ = copy.carried_inputs(plan.values)
    writes: dict[int, fx.Node] = {}
    for node in plan.step.graph.nodes:
        for moved in plan.sets:
            if moved.before is node:
                env = _run_on(copy, base, moved, carried_)
                copy.env |= {plan.places[at]: value for at, value in env.items()}
                writes |= env
        if node.op in ("call_function", "get_attr") and node not in plan.removed:
            copy.env[node] = copy.node(node, copy.env)
    copy.fresh += writes.values()
    values, outputs = _kept_outputs(plan, copy.env)
    kept = [copy.env[value] for value in plan.values]
    first = len(plan.places)
    names = [Output(_name(value), first + at) for at, value in enumerate(plan.values)]
    updates = [Output(plan.step.signature.inputs[at].name, at) for at in writes]
    return copy.returns([*values, *writes.values(), *kept], [*outputs, *updates, *names])


def _run_on(
    copy: _Copy, base: _Env, moved: _Moved, carried_: Mapping[fx.Node, fx.Node]
) -> dict[int, fx.Node]:
    """Let the set read its inputs as they were at the beginning of the call."""
    env, copy.env = copy.env, base
    try:
        return copy.run(moved, carried_)
    finally:
        copy.env = env


def _flush(plan: _Plan) -> StepGraph:
    """The moved sets alone."""
    copy = _Copy.of(plan.step, plan.flushed)
    carried_ = copy.carried_inputs(plan.values)
    places = {at: new for new, at in enumerate(plan.flushed)}
    values: list[fx.Node] = []
    outputs: list[Output] = []
    for moved in plan.sets:
        for at, value in copy.run(moved, carried_).items():
            values.append(value)
            outputs.append(Output(plan.step.signature.inputs[at].name, places[at]))
    for node in copy.graph.nodes:
        if node.op == "call_function":
            with_info(node, phase="optimizer")
    return copy.returns(values, outputs)


def _kept_outputs(plan: _Plan, env: _Env) -> tuple[list[fx.Node | None], list[Output]]:
    """Those of the step's outputs that are no write-backs of moved sets."""
    pairs = [
        (None if node is None else env[node], output)
        for node, output in plan.step.outputs()
        if output.writes is None or output.writes not in plan.written
    ]
    return [node for node, _ in pairs], [output for _, output in pairs]


def _kept_values(plan: _Plan, copy: _Copy, returned: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The values that the first call returns to be carried: copies of those whose memory another
    returned value shares, or that have no plain layout."""
    held = {
        storage for node in returned if node is not None for storage in storages(value_of(node))
    }
    kept: list[fx.Node] = []
    for value in plan.values:
        node = copy.env[value]
        dense, own = _is_dense(tensor_of(node)), storages(value_of(node))
        if not dense or not held.isdisjoint(own):
            node = _copied(copy.graph, node, plain=not dense)
        held |= storages(value_of(node))
        kept.append(node)
    return kept


def _copied(graph: fx.Graph, node: fx.Node, *, plain: bool) -> fx.Node:
    form = torch.contiguous_format if plain else torch.preserve_format
    new = graph.call_function(aten.clone.default, (node,), {"memory_format": form})
    inherit(new, node)
    with_info(new, phase="optimizer")
    return new
