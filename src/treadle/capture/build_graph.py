"""From a traced run to a captured step: functional, annotated, with a role for every input."""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from treadle.capture.annotate import annotate, draw_once
from treadle.capture.captured import (
    CallInputs,
    Captured,
    CapturedResult,
    OptimizerEffects,
    StepDependencies,
)
from treadle.capture.control_flow.loop_functions import refuse_loop_values
from treadle.capture.eager import drop_lost, refuse_lost
from treadle.capture.explain_errors import looks_at_value
from treadle.capture.functionalize import Functionalizer
from treadle.capture.input_sources import SourcedInput
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.plain_values import is_whole
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.reads.reads_guard import ReadsGuard
from treadle.capture.run_reads import RunReads
from treadle.capture.sources import (
    ClosedOverTensor,
    Grad,
    Held,
    Inputs,
    Parameter,
    RunTimeArray,
    RunTimeNumber,
    Scalars,
    Source,
)
from treadle.capture.symbolic.branches.decisions import path_of
from treadle.capture.symbolic.branches.expected import join_conditions
from treadle.capture.symbolic.branches.sizes import refuse_unsized, wrap_unsized
from treadle.capture.symbolic.branches.value_checks import require_values
from treadle.capture.symbolic.literals import literals_made_numbers
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tensors.foreign import (
    refuse_foreign_writes,
    refuse_undense,
    refuse_without_memory,
)
from treadle.capture.tensors.result_slots import slots_in
from treadle.capture.tracing.run import Run
from treadle.compat.operators.operator_facts import is_profiler_mark
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import hold_constants
from treadle.graph.core.node_info import copy_notes, info, tensor_of, with_info
from treadle.graph.core.operators import may_drop
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph


def build_graph(module: fx.GraphModule, run: Run, reads: RunReads, *, symbolic: bool) -> Captured:
    """The traced module as a functional graph with roles, and how to call it. ``symbolic``: some
    of its inputs have sizes that were declared."""
    sources = list(run.request.sources)
    _clean(module, run, reads.places, sources)
    step, kept, decided = _functional(module, run, reads.guard.graph, sources)
    if symbolic:
        refuse_unsized(step.graph)
    else:
        wrap_unsized(step.graph)
    request, returned = run.request, run.returned
    return Captured(
        step=step,
        device=str(request.device),
        inputs=CallInputs(
            tuple(kept), request.call, Scalars(kept), Inputs(kept), run.tensors.pending
        ),
        result=CapturedResult(
            returned.tree, returned.leaves, run.left, run.recorder.numbers.of_call()
        ),
        gradients=returned.gradients,
        optimizers=OptimizerEffects(
            tuple(run.steps.eager), request.param_groups, frozenset(run.updates.stepped)
        ),
        dependencies=_dependencies(step, run, reads.guard, decided),
        generators=tuple(run.recorder.rng.drawn),
        stored=reads.stored(run),
        failed=run.failed,
    )


def _dependencies(
    step: StepGraph, run: Run, reads: ReadsGuard, decided: list[fx.Node]
) -> StepDependencies:
    numbers, conditions = run.numbers, run.recorder.conditions
    alone = not run.recorder.rng.drawn
    return StepDependencies(
        reads=reads,
        free=numbers.free_arguments(),
        counters=numbers.changing.places(),
        decisions=numbers.decisions(),
        host_draws=numbers.draws,
        unread_modes=run.unread_modes(),
        conditions=tuple(conditions.where),
        path=path_of(step, conditions.decisions, decided, alone=alone),
    )


def _clean(
    module: fx.GraphModule,
    run: Run,
    held: Mapping[int, Location | StateLocation],
    sources: list[SourcedInput],
) -> None:
    """Annotate each node with its origin, make every tensor from outside an input, and remove
    everything that is not a computation with dense tensors. ``sources`` gets the sources of the new
    inputs; ``held``: where each tensor was found, by its id."""
    graph = module.graph
    annotate(graph, run)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._local_scalar_dense.default
    ):
        raise looks_at_value(info(node).where)
    uses = run.numbers.uses
    known = (run.updates.constants, uses.inputs, uses.arrays, held)
    literals_made_numbers(
        module, lambda tensor: not any(id(tensor) in constant for constant in known)
    )
    _constants_to_inputs(module, sources, held, run)
    for node, (entry, _) in zip(graph.find_nodes(op="placeholder"), sources, strict=True):
        with_info(node, name=entry.name)
    _strip(graph)
    _numbers_made_tensors(graph)
    refuse_undense(graph)


def _functional(
    module: fx.GraphModule, run: Run, found: ReadsGraph, sources: list[SourcedInput]
) -> tuple[StepGraph, list[Source], list[fx.Node]]:
    """The graph without mutation, with its writes listed at the end; the sources of the inputs that
    remain; and the values that it decides by."""
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    functionalizer = Functionalizer(graph)
    new, results, writes = functionalizer.run(list(returned))
    refuse_foreign_writes(graph, functionalizer, sources, found, run.numbers.uses.looked_at)
    outputs = _outputs(run, sources)
    dropped = set(map(id, run.returned.gradients.fresh))
    for at, value in drop_lost(writes).items():
        source = sources[at][1]
        if isinstance(source, Grad) and id(source.parameter) in dropped:
            continue  # what a backward has added to it, nobody sees
        outputs.append(Output(sources[at][0].name, writes=at))
        results.append(value)
    new.output(tuple(results))
    hold_constants(new, module)
    draw_once(new)
    _drop_dead(new)  # of loops' bodies as well
    require_values(new)
    decided = join_conditions(new)
    _drop_dead(new)
    refuse_loop_values(new)
    refuse_lost(new, run.steps.eager)
    return *_drop_unused(new, sources, outputs), decided


def _outputs(run: Run, sources: Sequence[SourcedInput]) -> list[Output]:
    """What the run returns, in its order: results, what it leaves outside, numbers that Python
    needs, gradients."""
    outputs = [Output(f"result {at}") for at in range(slots_in(run.returned.leaves))]
    for change in run.left:
        outputs += [Output(change.place.label)] * slots_in(change.leaves)
    outputs += [Output(f"number {at}") for at in range(len(run.recorder.numbers.fetched))]
    names = {id(s.parameter): i.name for i, s in sources if isinstance(s, Parameter)}
    gradients = run.returned.gradients
    pairs = [*zip(gradients.left, gradients.slots, strict=True)]
    for step in run.steps.eager:
        pairs += zip(step.parameters, step.slots, strict=True)
    for parameter, slot in pairs:
        outputs += [Output(f"grad of {names[id(parameter)]}")] * slots_in([slot])
    return outputs


def _constants_to_inputs(
    module: fx.GraphModule,
    sources: list[SourcedInput],
    held: Mapping[int, Location | StateLocation],
    run: Run,
) -> None:
    """Tensors that the step reads from outside the model become inputs, read at every call."""
    graph = module.graph
    placeholders: dict[int, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1] if sources else None
    for node in graph.find_nodes(op="get_attr"):
        tensor: Tensor = operator.attrgetter(str(node.target))(module)
        if id(tensor) not in placeholders:
            with graph.inserting_after(last) if last else graph.inserting_before():
                place = graph.placeholder(f"constant_{len(placeholders)}")
            copy_notes(place, node)
            last = placeholders[id(tensor)] = place
            name = f"constant {len(placeholders) - 1}"
            run.recorder.rng.refuse_state(tensor, info(node).where)
            known = run.updates.constants.get(id(tensor))
            source = known or _outside(tensor, held, run.numbers.uses, name)
            if isinstance(source[1], ClosedOverTensor):
                refuse_without_memory(tensor, info(node).where)
            sources.append(source)
        node.replace_all_uses_with(placeholders[id(tensor)])
        graph.erase_node(node)


def _outside(
    tensor: Tensor, held: Mapping[int, Location | StateLocation], uses: Uses, name: str
) -> SourcedInput:
    """``held``: where each tensor was found when the step was captured, by its id."""
    if id(tensor) in uses.inputs:
        number = uses.inputs[id(tensor)]
        source = RunTimeNumber(number.compute, is_whole(number.value), tensor.device)
        return Input(Role.SCALAR, name), source
    if id(tensor) in uses.arrays:
        return Input(Role.BATCH, name.replace("constant", "array")), RunTimeArray(
            uses.arrays[id(tensor)]
        )
    if id(tensor) not in held:
        return Input(Role.BUFFER, name), ClosedOverTensor(tensor)
    place = held[id(tensor)]
    return Input(Role.BUFFER, place.label), Held(place)


def _strip(graph: fx.Graph) -> None:
    """Remove profiler ranges and other calls without values from the graph."""
    for node in reversed(list(graph.nodes)):
        op = node.target
        if isinstance(op, OpOverload) and is_profiler_mark(op) and not node.users:
            graph.erase_node(node)


def _numbers_made_tensors(graph: fx.Graph) -> None:
    """``vmap`` makes a tensor of a number by converting it. Replace that by a tensor filled with
    the number."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if isinstance(node.args[0], int | float):
            value: Tensor = tensor_of(node)
            node.target = torch.ops.aten.full.default
            node.args = [], node.args[0]
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def _drop_dead(graph: fx.Graph) -> None:
    """Remove unused values, except random ones, which advance eager's stream, and effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and may_drop(node):
            graph.erase_node(node)


def _drop_unused(
    graph: fx.Graph, sources: list[SourcedInput], outputs: list[Output]
) -> tuple[StepGraph, list[Source]]:
    """Remove inputs that nothing reads from the signature (state of parameters without
    gradients)."""
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
