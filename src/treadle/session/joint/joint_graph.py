"""AOTAutograd's joint graph as one graph of a forward and a backward, which stops in between.

::

    joint:    p, x, dy  ->  y, dp
    one:      p, x      ->  y, dp        with  dy = incoming_gradient([y], ...)

So a forward and a backward are planned, lowered, scheduled and packed into one arena like a whole
step. ``graph/custom_ops/incoming.py`` explains why the forward comes first, and
``runtime/execute/joint_calls.py`` how it runs.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import SymInt, Tensor, fx

from treadle.capture.tensors.written import expand_written
from treadle.compat.dynamo import checkpoint_of, primal_kind, stack_of
from treadle.compat.fake import VALUES_DECIDE
from treadle.compat.known_sizes import KnownLayout, known_layout
from treadle.compat.tracing import retraced
from treadle.compat.unsized import is_unsized
from treadle.graph.analysis.alias import storages
from treadle.graph.core.effects import remove_tokens
from treadle.graph.core.node_info import (
    NodeInfo,
    copy_notes,
    describe,
    known_value,
    set_value,
    value_of,
)
from treadle.graph.core.operators import has_effect
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.values import inherit
from treadle.graph.custom_ops.incoming import incoming_gradient
from treadle.passes.memory.split import copy_overwritten, split
from treadle.util.errors import LoweringError
from treadle.util.reach import reached

_FRAME = re.compile(r'File "(.*)", line (\d+)')
Result = fx.Node | int | None
"""What a graph returns in one place: sizes are numbers where they are known."""


@final
@dataclass(frozen=True, slots=True)
class JointGraph:
    """``graph``: AOTAutograd's, whose nodes have phases. ``inputs`` and ``gradients``: its
    placeholders; ``results`` and ``wanted``: what the forward and the backward return; ``written``:
    inputs that get new values when the forward has run; ``roles``: of the inputs."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    results: tuple[Result, ...]
    wanted: tuple[Result, ...]
    written: tuple[fx.Node, ...]
    roles: tuple[Role, ...]

    @staticmethod
    def of(
        graph: fx.Graph,
        inputs: Sequence[fx.Node],
        gradients: Sequence[fx.Node],
        results: int,
        written: Sequence[int],
        roles: Sequence[Role],
    ) -> "JointGraph":
        """Of a graph whose first ``results`` outputs are the forward's."""
        (output,) = graph.find_nodes(op="output")
        returned: Sequence[Result] = output.args[0]  # type: ignore[assignment]
        output.args = (tuple(returned),)
        return JointGraph(
            graph,
            tuple(inputs),
            tuple(gradients),
            tuple(returned[:results]),
            tuple(returned[results:]),
            tuple(inputs[at] for at in written),
            tuple(roles),
        )

    def of_sizes(
        self, module: fx.GraphModule, args: Sequence[object]
    ) -> "tuple[JointGraph, fx.GraphModule]":
        """The same for inputs of known sizes, traced again, and its module. ``module``: of this
        graph, which still has AOTAutograd's notes."""
        pairs = list(zip(map(known_value, self.inputs), args, strict=True))
        later = [known_layout(value_of(node), pairs) for node in self.gradients]
        traced = of_known_sizes(module, args, later)
        places = traced.graph.find_nodes(op="placeholder")
        count = len(self.inputs)
        written = [self.inputs.index(node) for node in self.written]
        parts = traced.graph, places[:count], places[count:], len(self.results), written
        return JointGraph.of(*parts, self.roles), traced

    def tell_phases(self) -> None:
        """Note of each node whether it is forward or backward, its line, and what checkpoints ask
        of it, in the place of AOTAutograd's notes."""
        phases(self.graph, [node for node in self.results if isinstance(node, fx.Node)])

    def step(self) -> StepGraph:
        """For a memory plan: forward and backward with all their inputs."""
        remove_tokens(self.graph)
        expand_written(self.graph)
        places = self.graph.find_nodes(op="placeholder")
        known = dict(zip(self.inputs, self.roles, strict=True))
        roles = [known.get(node, Role.TANGENT) for node in places]
        return _step_of(self.graph, roles, len(self.results) + len(self.wanted))

    def saved(self) -> tuple[fx.Node, ...]:
        """Inputs and results that the backward reads, so that autograd knows when one of them was
        written to in between."""
        kept = split(self.graph, self.inputs, self.gradients, len(self.results)).kept
        looked_after = {*(self.inputs[at] for at in self.tensors), *self.computed_results}
        return tuple(node for node in kept if node in looked_after)

    @property
    def boundary(self) -> tuple[Result, ...]:
        """The inputs, then the results of the forward."""
        return (*self.inputs, *self.results)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the inputs that are tensors. Sizes are inputs where they are symbols."""
        values = map(known_value, self.inputs)
        return tuple(at for at, value in enumerate(values) if isinstance(value, Tensor))

    @property
    def computed_results(self) -> tuple[fx.Node, ...]:
        """Those of the forward that are no inputs, each once."""
        return computed_of(self.results)

    @property
    def computed_gradients(self) -> tuple[fx.Node, ...]:
        """Likewise of the backward, without the gradients that come in."""
        return computed_of(self.wanted)

    def why_apart(self) -> str:
        """Why forward and backward have to be graphs of their own; empty if they need not."""
        if not all(isinstance(known_value(node), Tensor | SymInt | int) for node in self.inputs):
            return "an input is neither a tensor nor a size"
        computed = self.computed_results
        if not computed:
            return "the forward computes nothing"
        tensors = (*self.gradients, *computed, *self.computed_gradients)
        if not all(isinstance(known_value(node), Tensor) for node in tensors):
            return "a result is not a tensor"
        if any(node.op == "call_function" and has_effect(node) for node in self.graph.nodes):
            return "an operation has a side effect"
        device = _device(computed[0])
        if any(_device(node) != device for node in self.gradients if node.users):
            return "a gradient comes from another device"
        places = {node: at for at, node in enumerate(self.graph.nodes)}
        last = max(places[node] for node in computed)
        early = any(places[user] < last for node in self.gradients for user in node.users)
        return "the backward begins before the forward is over" if early else ""

    def joined(self, module: fx.GraphModule) -> StepGraph:
        """The one graph, a copy, where no size is a symbol: of the inputs that are tensors, to the
        computed results and then the computed gradients. ``module``: that of the graph, which has
        its constants."""
        old = copy_overwritten(self.graph, self.written, self.gradients)
        graph = fx.Graph(module)
        copies: dict[fx.Node, fx.Node] = {}
        sizes = {node for node in self.inputs if not isinstance(known_value(node), Tensor)}
        ahead = {*self.computed_results, *old}
        for node in self.graph.nodes:
            if node.op == "output" or node in self.gradients or node in sizes:
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            ahead.discard(node)
            if not ahead and self.gradients[0] not in copies:
                for result in self.computed_results:
                    if _is_view(result):  # a copy of the caller's own, made in time
                        copies[result] = _cloned(graph, copies[result])
                meet = [copies[each] for each in (*self.computed_results, *old)]
                for number, gradient in enumerate(self.gradients):
                    copies[gradient] = _incoming(graph, meet, number, gradient)
        outputs = (*self.computed_results, *self.computed_gradients)
        graph.output(tuple(copies[node] for node in outputs))
        remove_tokens(graph)
        expand_written(graph)
        return _step_of(graph, [self.roles[at] for at in self.tensors], len(outputs))


def roles_of(places: Sequence[fx.Node], kinds: Sequence[str]) -> tuple[Role, ...]:
    """What placeholders of AOTAutograd's are to the user; ``kinds``: as of ``input_kinds``."""
    return tuple(
        Role(primal_kind(place, kinds) or Role.BATCH)
        if isinstance(known_value(place), Tensor)
        else Role.SCALAR
        for place in places
    )


def _is_view(node: fx.Node) -> bool:
    memory = storages(value_of(node))
    return any(memory & storages(value_of(operand)) for operand in node.all_input_nodes)


def _cloned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    inherit(copy, node)
    return copy


def _incoming(
    graph: fx.Graph, results: Sequence[fx.Node], number: int, gradient: fx.Node
) -> fx.Node:
    value = value_of(gradient)
    layout = list(value.shape), list(value.stride()), value.dtype
    node = graph.call_function(incoming_gradient, (list(results), number, *layout))
    copy_notes(node, gradient)
    set_value(node, value)
    return node


def _step_of(graph: fx.Graph, roles: Sequence[Role], results: int) -> StepGraph:
    places = graph.find_nodes(op="placeholder")
    inputs = (Input(role, node.name) for role, node in zip(roles, places, strict=True))
    outputs = (Output(f"result {at}") for at in range(results))
    return StepGraph(graph, Signature(tuple(inputs), tuple(outputs)))


def computed_of(results: Sequence[object]) -> tuple[fx.Node, ...]:
    """Those that are neither inputs nor constants, each once."""
    nodes = (node for node in results if isinstance(node, fx.Node) and node.op != "placeholder")
    return tuple(dict.fromkeys(nodes))


def _device(node: fx.Node) -> torch.device:
    return value_of(node).device


def phases(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """What ``results`` need is forward; what depends on a gradient is backward, and so is what the
    forward does not need."""
    needed = {*reached(results, lambda node: node.all_input_nodes)}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in needed:
            needed.add(node)  # one result of a forward operation is made with the others
        annotate(node, "forward" if node in needed else "backward")


def of_known_sizes(
    module: fx.GraphModule, args: Sequence[object], later: Sequence[KnownLayout] = ()
) -> fx.GraphModule:
    """A graph of symbols for the sizes of ``args``. ``later``: as of ``retraced``. TR-150 where
    values decide sizes, which those do not tell."""
    try:
        return retraced(module, args, later)
    except VALUES_DECIDE as error:
        decides = next(filter(_has_sizes_of_values, module.graph.nodes), None)
        operation, *_ = str(error).splitlines()
        raise LoweringError(
            f"a size depends on values ({operation}), but a graph from Dynamo is compiled for "
            "the sizes of its inputs",
            code="TR-150",
            where="" if decides is None else _user_line(stack_of(decides)),
            remedy=(
                "leave torch._dynamo.config.capture_dynamic_output_shape_ops and "
                "capture_scalar_outputs off: Dynamo then runs that operation between two graphs; "
                "or compile the whole step with treadle.compile, which supports such operations"
            ),
        ) from error


def _has_sizes_of_values(node: fx.Node) -> bool:
    """Whether a size of what the node makes, or the number that it is, is known from values."""
    value = known_value(node)
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(map(is_unsized, sizes))


def annotate(node: fx.Node, phase: str) -> None:
    """Tell what is known of a node of AOTAutograd's."""
    notes = NodeInfo(phase, _user_line(stack_of(node)))
    marked = checkpoint_of(node)
    if marked is not None:
        policy, region = marked
        notes = replace(notes, asked=policy.name.lower(), checkpoint=region)
    describe(node, known_value(node), notes)


def _user_line(stack: str) -> str:
    """The innermost line of a stack as text, as ``file:line: text``."""
    lines = stack.splitlines()
    frames = [at for at, line in enumerate(lines) if _FRAME.search(line)]
    frame = _FRAME.search(lines[frames[-1]]) if frames else None
    if frame is None:
        return ""
    text = lines[frames[-1] + 1].strip() if frames[-1] + 1 < len(lines) else ""
    return f"{frame[1]}:{frame[2]}: {text}"
