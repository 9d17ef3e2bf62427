"""``torch.compile(model, backend="treadle")``: a reduced version, without the optimizer.

Dynamo produces a graph, and AOTAutograd a joint forward and backward, which goes through the
pipeline of whole steps as one graph (``session/joint/``). A graph with side effects is split in
two, and each half goes through the pipeline; the values saved for the backward are then separate
tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import SymInt, Tensor, fx

from treadle.capture.tensors.written import expand_written
from treadle.compat.dynamo import (
    boxed,
    input_kinds,
    mutated_inputs,
    note_on,
    noted_on,
    through_autograd,
)
from treadle.compat.tracing import outside_modes
from treadle.compiler.pipeline import plan_graph
from treadle.graph.core.effects import remove_tokens
from treadle.graph.core.node_info import info, known_value, value_of
from treadle.graph.core.operators import has_effect
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options, from_environment
from treadle.passes.memory.split import copy_overwritten, reordered, split
from treadle.session.joint.attention_masks import lay_out_masks
from treadle.session.joint.compiled_graph import (
    FIRST,
    CompiledGraph,
    compiled,
    device_of_graph,
    profiling,
    watched,
)
from treadle.session.joint.joint_function import JointFunction
from treadle.session.joint.joint_graph import (
    JointGraph,
    annotate,
    computed_of,
    of_known_sizes,
    roles_of,
)
from treadle.session.joint.returns import Returns, resolved
from treadle.session.joint.sizes import OfSizes
from treadle.util.errors import TreadleError
from treadle.util.expected import NotExpected

_KNOWN = ("memory", "strict")


def treadle(
    module: fx.GraphModule,
    inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """The backend. ``options``: ``memory`` (a budget for forward and backward together, as for
    ``treadle.compile``) and ``strict``. ``TreadleError`` TR-001 for any other, and for ``mode``."""
    chosen = _options(mode, options or {})
    lay_out_masks(module)
    kinds = input_kinds(module, inputs)
    forward, backward = _Half(chosen, "forward", kinds), _Half(chosen, "backward", kinds)
    return through_autograd(module, inputs, forward, backward, _Partition(chosen, kinds))


@dataclass
class _Tally:
    graphs: int = 0


_TALLY = _Tally()


def compiled_graphs() -> int:
    """The number of graphs that the backend compiled in this process; a forward and a backward are
    two.

    ``torch.compile`` may skip a model silently. Compare this number before and after to see whether
    a model ran compiled or as it is."""
    return _TALLY.graphs


def _options(mode: str | None, user_options: Mapping[str, object]) -> Options:
    unknown = sorted(set(user_options) - set(_KNOWN))
    if unknown or mode not in (None, "default"):
        what = f"mode={mode!r}" if not unknown else f"option {unknown[0]!r}"
        raise TreadleError(
            f"the backend has no {what}",
            code="TR-001",
            remedy=f"its options are {', '.join(_KNOWN)}; treadle.compile has all others",
        )
    return replace(from_environment(), **user_options)


@dataclass(frozen=True)
class _Partition:
    """AOTAutograd's partition function. ``kinds``: what Dynamo says of the inputs."""

    options: Options
    kinds: tuple[str, ...]

    def __call__(
        self,
        joint: fx.GraphModule,
        inputs: tuple[Sequence[object], Sequence[object]],
        *,
        num_fwd_outputs: int,
        **_rest: object,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        primals, _ = inputs
        graph = joint.graph
        places = _inputs_first(graph)
        first, last = places[: len(primals)], places[len(primals) :]
        written = mutated_inputs(graph)
        roles = roles_of(first, self.kinds)
        parts = JointGraph.of(graph, first, last, num_fwd_outputs, written, roles)
        has_symbols = _has_symbols(graph)
        with outside_modes():
            if not parts.why_apart():
                return JointFunction(parts, joint, self.options, has_symbols=has_symbols).modules(
                    parts, joint
                )
            if has_symbols and self.options.memory is not None:
                raise _unplanned(parts.why_apart())
            if not has_symbols:
                parts.tell_phases()
                step = _planned(parts.step(), self.options)
                graph, places = step.graph, step.placeholders
        first, last = places[: len(first)], places[len(first) :]
        old = copy_overwritten(graph, [first[at] for at in written], last)
        return _in_two(joint, first, last, num_fwd_outputs, old, roles)


def _unplanned(why: str) -> TreadleError:
    return TreadleError(
        f"a forward and a backward with dynamic sizes cannot be planned for a budget: {why}",
        code="TR-207",
        remedy="leave out options={'memory': ...}, or compile with dynamic=False",
    )


def _in_two(
    joint: fx.GraphModule,
    first: Sequence[fx.Node],
    last: Sequence[fx.Node],
    results: int,
    old: Sequence[fx.Node],
    roles: Sequence[Role],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Two graphs, each compiled by itself, with the roles of their inputs."""
    graph = first[0].graph if first else joint.graph
    halves = split(graph, first, last, results, old)
    sizes = [node for node in halves.kept if isinstance(value_of(node), SymInt)]
    if sizes:  # AOTAutograd takes them after the tensors, and gives them before
        order = [*(n for n in halves.kept if n not in sizes), *sizes]
        halves = reordered(graph, first, last, results, order, sizes)
    modules = fx.GraphModule(joint, halves.forward), fx.GraphModule(joint, halves.backward)
    known = dict(zip(first, roles, strict=True))
    kept = {node: known.get(node, Role.SAVED) for node in halves.kept}
    order = [node for node in halves.kept if node in sizes] if sizes else []
    order += [node for node in halves.kept if node not in sizes]
    note_on(modules[0], tuple(roles))
    note_on(modules[1], (*map(kept.__getitem__, order), *(Role.TANGENT for _ in last)))
    return modules


def _has_symbols(graph: fx.Graph) -> bool:
    vals = [known_value(node) for node in graph.nodes]
    return any(isinstance(val, SymInt) for val in vals) or any(
        isinstance(size, SymInt) for val in vals if isinstance(val, Tensor) for size in val.shape
    )


def _inputs_first(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders, in their order, moved before all else: a backward pass that has effects
    takes its tokens after the work of the forward."""
    places = graph.find_nodes(op="placeholder")
    work = next(node for node in graph.nodes if node.op != "placeholder")
    for place in places:
        work.prepend(place)
    return places


def _places(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="placeholder")


def _planned(step: StepGraph, options: Options) -> StepGraph:
    """What is kept and what is computed again, by the planner of whole steps."""
    with watched("joint", options) as clock:
        run_passes(step, FIRST, clock.watcher)
        return plan_graph(step, device_of_graph(step.graph), options, clock)


@dataclass(frozen=True)
class _Half:
    """AOTAutograd's compiler of one graph: forward (or inference), or backward. ``kinds``: what
    Dynamo says of the inputs of both."""

    options: Options
    phase: str
    kinds: tuple[str, ...]

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        with outside_modes():
            return self._compiled(module)

    def _compiled(self, module: fx.GraphModule) -> Callable[..., object]:
        _TALLY.graphs += 1
        joined = noted_on(module)
        run: Callable[[list[Any]], list[object]]
        if isinstance(joined, JointFunction):
            run = joined.forward if self.phase == "forward" else joined.backward
        else:
            kind = _Sized if _has_symbols(module.graph) else _FixedSizes
            run = kind(module, self.options, self.phase, self._roles(module, joined))

        def call(args: list[object]) -> list[object]:
            """Runs the graph, and lets go of its arguments, which belong to it."""
            inputs = list(args)
            args.clear()  # what is not needed any more may go
            try:
                return run(inputs)
            except NotExpected as error:
                raise error.__cause__ or error from None  # as eager would raise it

        return boxed(call)

    def _roles(self, module: fx.GraphModule, noted: object) -> tuple[Role, ...]:
        """Of a half, noted when the two were cut; of inference as AOTAutograd says."""
        if isinstance(noted, tuple):
            return cast("tuple[Role, ...]", noted)
        return roles_of(_places(module.graph), self.kinds)


class _FixedSizes:
    """One graph of known shapes, compiled at once."""

    def __init__(
        self, module: fx.GraphModule, options: Options, phase: str, roles: Sequence[Role]
    ) -> None:
        graph = module.graph
        remove_tokens(graph)
        expand_written(graph)
        (output,) = graph.find_nodes(op="output")
        returned = list(output.args[0])  # type: ignore[call-overload]
        places = _places(graph)
        self._returns = Returns.of(returned, places, computed_of(returned))
        known = dict(zip(places, roles, strict=True))
        self._graph = _built(module, known, self._returns.computed, options, phase)
        self._used = [isinstance(known_value(node), Tensor) for node in places]

    def release(self) -> None:
        """Give its arena back until the next call."""
        if self._graph is not None:
            self._graph.release()

    def __call__(self, args: list[Any]) -> list[object]:
        values: Sequence[object] = ()
        if self._graph is not None:
            used = zip(args, self._used, strict=True)
            values = self._graph.run(resolved(tensor for tensor, is_used in used if is_used))
        return self._returns.of_call(dict(enumerate(args)), values)


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and has_effect(node)


def _built(
    module: fx.GraphModule,
    roles: Mapping[fx.Node, Role],
    results: Sequence[fx.Node],
    options: Options,
    phase: str,
) -> CompiledGraph | None:
    if not results and not any(map(_has_effect, module.graph.nodes)):
        return None
    graph = fx.Graph(module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and not isinstance(known_value(node), Tensor):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    for node in graph.nodes:
        if node.op != "output" and not info(node).phase:
            annotate(node, phase)
    signature = Signature(
        tuple(Input(role, node.name) for node, role in roles.items() if node in copies),
        tuple(Output(f"result {at}") for at in range(len(results))),
    )
    return CompiledGraph.of(phase, phase, StepGraph(graph, signature), options, is_planned=True)


class _Sized:
    """One graph with symbols: compiled for each set of sizes when it comes."""

    def __init__(
        self, module: fx.GraphModule, options: Options, phase: str, roles: Sequence[Role]
    ) -> None:
        self._module, self._options, self._phase = module, options, phase
        self._roles = roles
        self._of_sizes = OfSizes(self._compiled)

    def __call__(self, args: list[object]) -> list[object]:
        return self._of_sizes.get(args)(args)

    def _compiled(self, args: list[object]) -> _FixedSizes:
        known = of_known_sizes(self._module, args)
        return _FixedSizes(known, self._options, self._phase, self._roles)


__all__ = ["CompiledGraph", "compiled", "compiled_graphs", "profiling", "treadle"]
