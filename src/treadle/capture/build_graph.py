"""From a traced run to a captured step: functional, annotated, with a role for every input."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx, nn

from treadle.algebra.guards import GuardSet
from treadle.capture.control_flow.while_loops import refuse_loop_values
from treadle.capture.eager import EagerStep, drop_lost, refuse_lost
from treadle.capture.explain_errors import looks_at_value, show_line
from treadle.capture.functionalize import Functionalizer
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.object_graph import Location
from treadle.capture.python_state.reads import Reads
from treadle.capture.run import Run, ServedCall, SideEffect, Toggle, Trace, own_tensor
from treadle.capture.sources import (
    ClosedOverTensor,
    Grad,
    Held,
    Inputs,
    Parameter,
    ParamGroups,
    Pending,
    RunTimeArray,
    RunTimeNumber,
    Scalars,
    Source,
)
from treadle.capture.symbolic.branches.decisions import Path, path_of
from treadle.capture.symbolic.branches.expected import join_conditions
from treadle.capture.symbolic.branches.sizes import refuse_unsized, wrap_unsized
from treadle.capture.symbolic.branches.value_checks import require_values
from treadle.capture.symbolic.computations import NumberDecision
from treadle.capture.symbolic.deferred import NumbersOfCall
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.literals import literals_made_numbers
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tensors.foreign import (
    refuse_foreign_writes,
    refuse_undense,
    refuse_without_memory,
)
from treadle.capture.tensors.result_slots import slot_of, slots_in
from treadle.capture.tensors.rng_guard import seeds
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.pytree import TreeSpec
from treadle.compat.tracing import hold_constants
from treadle.graph.core.node_info import (
    NodeInfo,
    copy_notes,
    describe,
    info,
    known_value,
    tensor_of,
    value_of,
    with_info,
)
from treadle.graph.core.operators import (
    arguments,
    draw_reads_values,
    is_in_order,
    is_known,
    is_random,
    may_drop,
    set_argument,
)
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.types import tensors_in
from treadle.graph.core.values import gather_results, refresh
from treadle.graph.custom_ops.expect import expect
from treadle.guards.watching import Watches
from treadle.util.generators import GeneratorRef

T = TypeVar("T")


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
    stepped: frozenset[int]  # groups whose counters advance
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


def build_graph(
    module: fx.GraphModule,
    run: Run,
    reads: Reads,
    call: ServedCall,
    device: torch.device,
    *,
    symbolic: bool = False,
) -> Captured:
    """The traced module as a functional graph with roles, and how to call it. ``symbolic``: some
    of its inputs have sizes that were declared."""
    sources = list(run.sources)
    _clean(module, run.trace, run.places_of_tensors(reads), sources)
    step, kept, decided = _functional(module, run.trace, reads, sources)
    conditions = run.trace.watch.conditions
    if symbolic:
        refuse_unsized(step.graph)
    else:
        wrap_unsized(step.graph)
    return Captured(
        step=step,
        device=str(device),
        sources=tuple(kept),
        result_tree=run.trace.tree,  # type: ignore[arg-type]
        result_leaves=tuple(run.trace.leaves),
        reads=reads,
        call=call,
        free=run.free_arguments(),
        counters=run.numbers.places(),
        decisions=(
            *run.trace.uses.decisions.beside(run.trace.uses.needed),
            *run.draws.decisions(),
        ),
        left=tuple(run.trace.left),
        numbers=run.trace.watch.numbers.of_call(),
        toggled=tuple(run.trace.toggled),
        fresh=tuple(run.trace.fresh),
        untouched=tuple(run.trace.untouched),
        unread_modes=run.unread_modes(),
        kept=tuple(run.trace.kept),
        conditions=tuple(conditions.where),
        path=path_of(step, conditions.decisions, decided, alone=not run.trace.watch.rng.drawn),
        left_grads=tuple(p for p, _ in run.trace.grads),
        grad_slots=tuple(slot_of(grad) for _, grad in run.trace.grads),
        cleared_grads=tuple(run.trace.cleared),
        eager=tuple(run.trace.eager),
        generators=tuple(run.trace.watch.rng.drawn),
        param_groups=run.param_groups,
        stepped=frozenset(run.trace.stepped),
        scalars=Scalars(kept),
        inputs=Inputs(kept),
        host_draws=run.draws,
        failed=run.failed,
        pending=run.pending,
    )


def _clean(
    module: fx.GraphModule,
    seen: Trace,
    held: Mapping[int, Location | StateLocation],
    sources: list[tuple[Input, Source]],
) -> None:
    """Each node knows who made it, every tensor from outside is an input, and nothing is in the
    graph that is no computation with dense tensors. ``sources`` gets those of the new inputs;
    ``held``: by its id, where a tensor was found."""
    graph = module.graph
    _annotate(graph, seen)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._local_scalar_dense.default
    ):
        raise looks_at_value(info(node).where)
    known = (seen.scalars, seen.uses.inputs, seen.uses.arrays, held)
    literals_made_numbers(module, lambda tensor: not any(id(tensor) in each for each in known))
    _constants_to_inputs(module, sources, held, seen)
    for node, (entry, _) in zip(graph.find_nodes(op="placeholder"), sources, strict=True):
        with_info(node, name=entry.name)
    _strip(graph)
    _numbers_made_tensors(graph)
    refuse_undense(graph)


def _functional(
    module: fx.GraphModule, seen: Trace, reads: Reads, sources: list[tuple[Input, Source]]
) -> tuple[StepGraph, list[Source], list[fx.Node]]:
    """The graph without mutation, what it writes listed at the end; the sources of those of its
    inputs that are left; and what it decides by."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    functionalizer = Functionalizer(graph)
    new, results, writes = functionalizer.run(list(returned))
    refuse_foreign_writes(graph, functionalizer, sources, reads, seen.uses.looked_at)
    outputs = _outputs(seen, sources)
    dropped = set(map(id, seen.fresh))
    for at, value in drop_lost(writes).items():
        source = sources[at][1]
        if isinstance(source, Grad) and id(source.parameter) in dropped:
            continue  # what a backward has added to it, nobody sees
        outputs.append(Output(sources[at][0].name, writes=at))
        results.append(value)
    new.output(tuple(results))
    hold_constants(new, module)
    _draw_once(new)
    _drop_dead(new)  # of loops' bodies as well
    require_values(new)
    decided = join_conditions(new)
    _drop_dead(new)
    refuse_loop_values(new)
    refuse_lost(new, seen.eager)
    return *_drop_unused(new, sources, outputs), decided


def _outputs(seen: Trace, sources: Sequence[tuple[Input, Source]]) -> list[Output]:
    """What the run returns, in its order: results, what it leaves outside, numbers that Python
    needs, gradients."""
    found = [Output(f"result {at}") for at in range(slots_in(seen.leaves))]
    for each in seen.left:
        found += [Output(each.place.label)] * slots_in(each.leaves)
    found += [Output(f"number {at}") for at in range(len(seen.watch.numbers.fetched))]
    names = {id(s.parameter): i.name for i, s in sources if isinstance(s, Parameter)}
    given = [(parameter, slot_of(grad)) for parameter, grad in seen.grads]
    for each in seen.eager:
        given += zip(each.parameters, each.slots, strict=True)
    for parameter, slot in given:
        found += [Output(f"grad of {names[id(parameter)]}")] * slots_in([slot])
    return found


def _annotate(graph: fx.Graph, seen: Trace) -> None:
    """Who made each node: its ``phase``, ``module``, user's line, and which draw it is; of
    checkpointed regions that run again the ``region``, and a selective policy's word
    (``asked``): ``must_save``, ``prefer_save``, ``must_recompute`` or ``prefer_recompute``."""
    watch = seen.watch
    last = max((end for _, end in watch.backward), default=1 << 60)
    module, line, draw = _Following(watch.modules), _Following(watch.lines), _Draws(watch.draws)
    regions = {at: n for n, span in enumerate(watch.again) for at in range(*span)}
    _name_generators(graph, watch.generators)
    asked = iter(watch.conditions.asked)
    marks = {at: policy.name.lower() for span, policy in watch.marks for at in range(*span)}
    gathers = {at: number for span, number in watch.gathers for at in range(*span)}
    for at, node in enumerate(graph.nodes):
        if any(start <= at < end for start, end in watch.backward):
            phase = "backward"
        elif at >= last or any(start <= at < end for start, end in seen.update):
            phase = "optimizer"
        else:
            phase = "forward"
        known = NodeInfo(
            phase=phase,
            where=show_line(line.at(at)),
            module="" if phase == "optimizer" else module.at(at),
            region=regions.get(at),
            asked=marks.get(at, ""),
            asked_at=next(asked) if node.target is expect else None,
            draw=draw.of(at, node),
            lost=at in seen.lost,
            gathered=gathers.get(at),
            own_rows=seen.own_rows.get(at),
        )
        describe(node, known_value(node), known)
    draw.finish()


def _name_generators(graph: fx.Graph, drawn: Sequence[tuple[tuple[int, int], int]]) -> None:
    """Draws from a generator of the user's, which were traced without it, get its number.

    before:  r = rand.generator([3], generator=None)
    after:   r = rand.generator([3], generator=generator 0)
    """
    nodes = list(graph.nodes)
    for (start, end), number in drawn:
        for node in nodes[start:end]:
            if is_random(node):
                set_argument(node, "generator", GeneratorRef(number))


class _Following(Generic[T]):
    """The value of the last event at or before a node; nodes are asked for in order."""

    def __init__(self, events: Sequence[tuple[int, T]]) -> None:
        self._events = events
        self._next = 1

    def at(self, node: int) -> T:
        while self._next < len(self._events) and self._events[self._next][0] <= node:
            self._next += 1
        return self._events[self._next - 1][1]


class _Draws:
    """Numbers the random operations; after a state is put back the same numbers come again."""

    def __init__(self, events: Sequence[tuple[int, bool, int]]) -> None:
        self._events = events
        self._next = 0
        self._kept: dict[int, int] = {}
        self._draw = 0
        self._most = 0

    def of(self, at: int, node: fx.Node) -> int:
        """The number of the draw of ``node``; -1 if it draws nothing."""
        while self._next < len(self._events) and self._events[self._next][0] <= at:
            _, put_back, state = self._events[self._next]
            if put_back:
                self._draw = self._kept.get(state, self._draw)
            else:
                self._kept[state] = self._draw
            self._next += 1
        if not is_random(node) or isinstance(arguments(node).get("generator"), GeneratorRef):
            return -1  # a generator of the user's has a state of its own
        self._draw += 1
        self._most = max(self._most, self._draw)
        return self._draw - 1

    def finish(self) -> None:
        """After the last node. ``CaptureError`` TR-120 if a state was put back for good."""
        for _, put_back, state in self._events[self._next :]:
            if put_back:
                self._draw = self._kept.get(state, self._draw)
            else:
                self._kept[state] = self._draw
        if self._draw != self._most:
            raise seeds("PyTorch's random generator", "")


def _draw_once(graph: fx.Graph) -> None:
    """A checkpointed region that runs again gets the random numbers of its first run.

    before:  m = bernoulli(e, 0.9); ...; m2 = bernoulli(e2, 0.9)   | the same draw
    after:   m = bernoulli(e, 0.9); ...; m is read instead of m2
    """
    first: dict[int, tuple[fx.Node, tuple[object, ...]]] = {}
    again: list[fx.Node] = []
    for node in list(graph.nodes):
        draw = info(node).draw
        if draw < 0 or not is_random(node):
            continue
        numbers = repr([a for a in node.args if not isinstance(a, fx.Node)])
        shapes = repr([each.shape for each in tensors_in(value_of(node))])
        key = node.target, shapes, numbers
        original, drawn = first.setdefault(draw, (node, key))
        if original is node:
            continue
        alike = not draw_reads_values(node) or _is_second_run(original, node)
        if key != drawn or not alike:  # other numbers from the same state
            raise seeds("PyTorch's random generator", info(node).where)
        node.replace_all_uses_with(original)
        graph.erase_node(node)
        again.append(original)
    gather_results(again)
    refresh(graph, again)


def _is_second_run(original: fx.Node, node: fx.Node) -> bool:
    """Whether the backward pass runs a region of the forward pass again."""
    return info(original).phase == "forward" and info(node).phase == "backward"


def _constants_to_inputs(
    module: fx.GraphModule,
    sources: list[tuple[Input, Source]],
    held: Mapping[int, Location | StateLocation],
    seen: Trace,
) -> None:
    """Tensors that the step reads from outside the model become inputs, read at every call."""
    graph = module.graph
    found: dict[int, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1] if sources else None
    for node in graph.find_nodes(op="get_attr"):
        tensor: Tensor = operator.attrgetter(str(node.target))(module)
        if id(tensor) not in found:
            with graph.inserting_after(last) if last else graph.inserting_before():
                place = graph.placeholder(f"constant_{len(found)}")
            copy_notes(place, node)
            last = found[id(tensor)] = place
            name = f"constant {len(found) - 1}"
            seen.watch.rng.refuse_state(tensor, info(node).where)
            known = seen.scalars.get(id(tensor))
            source = known or _outside(tensor, held, seen.uses, name)
            if isinstance(source[1], ClosedOverTensor):
                refuse_without_memory(tensor, info(node).where)
            sources.append(source)
        node.replace_all_uses_with(found[id(tensor)])
        graph.erase_node(node)


def _outside(
    tensor: Tensor, held: Mapping[int, Location | StateLocation], uses: Uses, name: str
) -> tuple[Input, Source]:
    """``held``: by its id, where a tensor was found when the step was captured."""
    if id(tensor) in uses.inputs:
        return Input(Role.SCALAR, name), RunTimeNumber(uses.inputs[id(tensor)], tensor.device)
    if id(tensor) in uses.arrays:
        return Input(Role.BATCH, name.replace("constant", "array")), RunTimeArray(
            uses.arrays[id(tensor)]
        )
    if id(tensor) not in held:
        return Input(Role.BUFFER, name), ClosedOverTensor(tensor)
    place = held[id(tensor)]
    return Input(Role.BUFFER, place.label), Held(place)


def _strip(graph: fx.Graph) -> None:
    """Profiler ranges and other calls without values leave the graph."""
    for node in reversed(list(graph.nodes)):
        op = node.target
        if isinstance(op, OpOverload) and op.namespace == "profiler" and not node.users:
            graph.erase_node(node)


def _numbers_made_tensors(graph: fx.Graph) -> None:
    """``vmap`` makes a tensor of a number by converting it: that is a tensor filled with it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if isinstance(node.args[0], int | float):
            value: Tensor = tensor_of(node)
            node.target = torch.ops.aten.full.default
            node.args = [], node.args[0]
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def _drop_dead(graph: fx.Graph) -> None:
    """Unused values go; random ones stay, since they advance eager's stream, and so do effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and may_drop(node):
            graph.erase_node(node)


def _drop_unused(
    graph: fx.Graph, sources: list[tuple[Input, Source]], outputs: list[Output]
) -> tuple[StepGraph, list[Source]]:
    """Inputs that nothing reads leave the signature (state of parameters without gradients)."""
    places = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    unchanged = {
        at
        for at, out in enumerate(outputs)
        if out.writes is not None and output.args[0][at] is places[out.writes]
    }
    results = [v for at, v in enumerate(output.args[0]) if at not in unchanged]
    changed = [out for at, out in enumerate(outputs) if at not in unchanged]
    output.args = (tuple(results),)  # before users are asked for
    written = {out.writes for out in changed}
    keep = [at for at, node in enumerate(places) if node.users or at in written]
    new_index = {old: new for new, old in enumerate(keep)}
    kept = [
        Output(out.name, None if out.writes is None else new_index[out.writes]) for out in changed
    ]
    for at, node in enumerate(places):
        if at not in new_index:
            graph.erase_node(node)
    graph.lint()
    signature = Signature(tuple(sources[at][0] for at in keep), tuple(kept))
    return StepGraph(graph, signature), [sources[at][1] for at in keep]
