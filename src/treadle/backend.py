"""``torch.compile(model, backend="treadle")``: the reduced form, without the optimizer.

Dynamo gives a graph, AOTAutograd a joint forward and backward, which goes through the pipeline of
whole steps as one graph (``session/joint.py``). A graph with symbols, or with effects, is cut in
two, and each half goes through the pipeline; what is kept for the backward is tensors of their own
then.
"""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import SymInt, Tensor, fx

from treadle.capture.tensors.written import expand_written
from treadle.compat.dynamo import (
    boxed,
    has_saved_tensor_hooks,
    keeps_graph,
    mutated_inputs,
    note_on,
    noted_on,
    through_autograd,
)
from treadle.compat.tracing import outside_modes, retraced
from treadle.compiler.compiled import Built
from treadle.compiler.pipeline import compile_step, plan_graph
from treadle.graph.core.effects import remove_tokens
from treadle.graph.core.node_info import copy_notes, info, known_value, set_value, value_of
from treadle.graph.core.operators import has_effect
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options, from_environment
from treadle.passes.cleanup.memory_order import DrawInMemoryOrder
from treadle.passes.memory.split import copy_overwritten, reordered, split
from treadle.report.explain import explain, explain_stages
from treadle.report.html import page
from treadle.report.stages import Clock
from treadle.report.step_report import Observed, StepReport, report_of
from treadle.report.summary import Summary, summary_of
from treadle.report.trace import trace_of
from treadle.report.watch import watcher_for
from treadle.runtime.execute.joint_calls import JointCalls, OpenCall
from treadle.runtime.store.cache import Cache
from treadle.session.attention_masks import lay_out_masks
from treadle.session.joint import JointGraph, annotate, computed_of
from treadle.targets.registry import device_of_kinds
from treadle.util.errors import LoweringError, TreadleError
from treadle.util.files import write_output

_NUMBERS = itertools.count()
_PROFILING = threading.Event()
"""Set while kernels are to be timed: autograd runs backward graphs in threads of its own."""
_KNOWN = ("memory", "strict")
_FIRST = (DrawInMemoryOrder(),)
_MOST = 64
"""Sizes kept per graph where shapes are dynamic."""


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
    forward, backward = _Half(chosen, "forward"), _Half(chosen, "backward")
    return through_autograd(module, inputs, forward, backward, _Partition(chosen))


class CompiledGraph:
    """One graph that the backend has compiled, for one set of sizes: a forward and its backward, or
    one of them.

    ``name``: the order of compiles and the phases, ``"0 forward and backward"``. Times are known
    once it has run inside ``profiling()``; its measured peak is not, since it is part of a step
    that is not ours.
    """

    def __init__(
        self,
        phase: str,
        step: StepGraph,
        built: Built,
        options: Options,
        note: Callable[[], str] = str,
    ) -> None:
        self.number = next(_NUMBERS)
        self.name = f"{self.number} {phase}"
        self._step = step
        self._built = built
        self._options = options
        self._note = note
        self._seconds: tuple[float, ...] = ()
        self._has_run = False
        _GRAPHS.add(self)

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The graph's results, as the backend calls it."""
        with self.timed() as seconds:
            return self._built.executable.run(self.checked(tensors), seconds)

    def release(self) -> None:
        """Give its memory back until the next call."""
        self._built.executable.release()

    def checked(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Inputs of a call, in which every index is one."""
        self._built.checks.require(tensors)
        return tensors

    @contextmanager
    def timed(self) -> Iterator[list[float] | None]:
        """Around a call, or a part of one: where times of its steps go, if they are wanted."""
        self._has_run = True
        if not _PROFILING.is_set():
            yield None
            return
        seconds = [0.0] * len(self._built.artifact.steps)
        yield seconds
        known = self._seconds or [0.0] * len(seconds)
        self._seconds = tuple(new or old for new, old in zip(seconds, known, strict=True))

    def explain(self) -> str:
        """As ``Step.explain``: why the graph takes what it takes."""
        return explain(self._step_report())

    def stages(self) -> str:
        """The stages of the compile in their order: seconds, what each was given and made, why it
        stands there, and what each pass made of the nodes of the graph."""
        return explain_stages(self._step_report())

    def summary(self) -> Summary:
        """As ``Step.summary``: the numbers of ``explain`` as an object."""
        return summary_of(self._step_report())

    def report(self, path: str | Path) -> Path:
        """As ``Step.report``, without other budgets: one HTML file. TR-004 if it cannot be."""
        write_output(Path(path), page(self._step_report()))
        return Path(path)

    def trace(self, path: str | Path) -> Path:
        """As ``Step.trace``: a trace for ``chrome://tracing`` or Perfetto."""
        write_output(Path(path), trace_of(self._step_report()))
        return Path(path)

    def _step_report(self) -> StepReport:
        observed = Observed(
            name=f"graph {self.name}",
            step=self._step,
            build=self._built,
            options=self._options,
            kernel_seconds=self._seconds,
            has_run=self._has_run,
            whole=False,
            launching=self._note(),
        )
        return report_of(observed)


_GRAPHS: "weakref.WeakSet[CompiledGraph]" = weakref.WeakSet()
"""``torch.compile`` keeps what it compiled and hands nothing back: this is how users reach it."""


def compiled() -> tuple[CompiledGraph, ...]:
    """What the backend has compiled in this process and is still in use, in the order of compiles.

    A model whose gradients are asked for is one graph of a forward and a backward, or one of each;
    each graph break and each set of sizes adds its own. ``torch._dynamo.reset()`` forgets them.
    """
    return tuple(sorted(_GRAPHS, key=lambda graph: graph.number))


@contextmanager
def profiling() -> Iterator[None]:
    """Every graph that runs inside has its kernels timed one by one; ``explain`` shows it."""
    _PROFILING.set()
    try:
        yield
    finally:
        _PROFILING.clear()


@dataclass
class _Tally:
    graphs: int = 0


_TALLY = _Tally()


def compiled_graphs() -> int:
    """How many graphs this backend has compiled in this process: a forward and a backward are two.

    ``torch.compile`` may leave a model alone without a word; a loop that asks this before and
    after knows whether it ran as it is, or compiled."""
    return _TALLY.graphs


def _options(mode: str | None, user_options: Mapping[str, object]) -> Options:
    unknown = sorted(set(user_options) - set(_KNOWN))
    if unknown or mode not in (None, "default"):
        what = f"mode={mode!r}" if not unknown else f"option {unknown[0]!r}"
        raise TreadleError(
            f"the backend has no {what}", code="TR-001", remedy=f"options: {', '.join(_KNOWN)}"
        )
    return replace(from_environment(), **user_options)


@dataclass(frozen=True)
class _Partition:
    """AOTAutograd's partition function."""

    options: Options

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
        parts = JointGraph.of(graph, first, last, num_fwd_outputs, written)
        has_symbols = _has_symbols(graph)
        with outside_modes():
            if not parts.why_apart():
                return _Joined(parts, joint, self.options, has_symbols=has_symbols).modules(
                    parts, joint
                )
            if has_symbols and self.options.memory is not None:
                raise _unplanned(parts.why_apart())
            if not has_symbols:
                step = _planned(parts.step(), self.options)
                graph, places = step.graph, step.placeholders
        first, last = places[: len(first)], places[len(first) :]
        old = copy_overwritten(graph, [first[at] for at in written], last)
        return _in_two(joint, first, last, num_fwd_outputs, old)


def _unplanned(why: str) -> TreadleError:
    return TreadleError(
        f"no plan for a forward and a backward of sizes that change: {why}",
        code="TR-207",
        remedy="leave out options={'memory': ...}, or compile with dynamic=False",
    )


def _in_two(
    joint: fx.GraphModule,
    first: Sequence[fx.Node],
    last: Sequence[fx.Node],
    results: int,
    old: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Two graphs, each compiled by itself."""
    graph = first[0].graph if first else joint.graph
    halves = split(graph, first, last, results, old)
    sizes = [node for node in halves.kept if isinstance(value_of(node), SymInt)]
    if sizes:  # AOTAutograd takes them after the tensors, and gives them before
        order = [*(n for n in halves.kept if n not in sizes), *sizes]
        halves = reordered(graph, first, last, results, order, sizes)
    return fx.GraphModule(joint, halves.forward), fx.GraphModule(joint, halves.backward)


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
    with _watched("joint", options) as clock:
        run_passes(step, _FIRST, clock.watcher)
        return plan_graph(step, _device(step.graph), options, clock)


@contextmanager
def _watched(name: str, options: Options) -> Iterator[Clock]:
    """A clock for the compile of one graph. Graphs are many: none has a line of progress."""
    watcher = watcher_for(name, replace(options, progress=False))
    try:
        yield Clock(watcher)
    finally:
        watcher.closes()


def _device(graph: fx.Graph) -> str:
    kinds = {
        val.device.type
        for node in _places(graph)
        if isinstance(val := known_value(node), Tensor) and val.ndim
    }
    return device_of_kinds(frozenset(kinds))


@dataclass(frozen=True)
class _Half:
    """AOTAutograd's compiler of one graph: forward (or inference), or backward."""

    options: Options
    phase: str

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        with outside_modes():
            return self._compiled(module)

    def _compiled(self, module: fx.GraphModule) -> Callable[..., object]:
        _TALLY.graphs += 1
        joined = noted_on(module)
        run: Callable[[list[Any]], list[object]]
        if isinstance(joined, _Joined):
            run = joined.forward if self.phase == "forward" else joined.backward
        elif _has_symbols(module.graph):
            run = _Sized(module, self.options, self.phase)
        else:
            run = _FixedSizes(module, self.options, self.phase)

        def call(args: list[object]) -> list[object]:
            """Runs the graph, and lets go of its arguments, which belong to it."""
            inputs = list(args)
            args.clear()  # what is not needed any more may go
            return run(inputs)

        return boxed(call)


class _JointProgram:
    """A forward and a backward of known sizes that are one graph, compiled at once. ``saved``: what
    autograd looks after, by its place among the inputs and results, if not as ``parts`` says."""

    def __init__(
        self,
        parts: JointGraph,
        module: fx.GraphModule,
        options: Options,
        saved: Sequence[int] | None = None,
    ) -> None:
        places = (*parts.inputs, *parts.gradients)
        kept = parts.saved() if saved is None else [parts.ends[at] for at in saved]
        self._results = _Returns.of(parts.results, places, parts.computed_results)
        self._wanted = _Returns.of(parts.wanted, places, parts.computed_gradients)
        self._saved = _Returns.of(kept, places, self._results.computed)
        self._tensors, self._inputs = parts.tensors, len(parts.inputs)
        step = parts.joined(module)
        cache = Cache(options.cache_dir)
        with _watched("joint", options) as clock:
            run_passes(step, _FIRST, clock.watcher)
            built = compile_step(step, _device(step.graph), options, cache=cache, clock=clock)
        _require_strict(built, options)
        calls = self._calls = JointCalls(built.executable, len(self._results.computed))
        about = "forward and backward", step, built, options
        self._graph = CompiledGraph(*about, note=lambda: calls.note)

    def forward(self, args: Sequence[Any]) -> tuple[list[object], OpenCall]:
        """The results, what autograd has to look after, and the call, which is open now."""
        with self._graph.timed() as seconds:
            tensors = self._graph.checked(_resolved(args[at] for at in self._tensors))
            values, call = self._calls.forward(tensors, seconds)
        given = dict(enumerate(args))
        results, saved = self._results.of_call(given, values), self._saved.of_call(given, values)
        return [*results, *saved], call

    def backward(self, call: OpenCall, args: list[Any], *, again: bool) -> list[object]:
        """The gradients of the inputs, of what autograd looked after, the call's number and the
        gradients of the results."""
        count = len(self._saved.plan)
        given = self._given(args[:count], args[count + 1 :])
        gradients = _resolved(args[count + 1 :])
        args.clear()  # what autograd saved, and with it the number, is gone unless it keeps it
        with self._graph.timed() as seconds:
            values = call.backward(gradients, again=again, seconds=seconds)
        return self._wanted.of_call(given, values)

    def release(self) -> None:
        """Give back the memory of calls that are over."""
        self._calls.release()

    def _given(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> Mapping[int, Tensor]:
        """By their places, the inputs and incoming gradients that are results as they are: no
        others are to stay for as long as the backward runs."""
        places = (plan.place for plan in self._saved.plan)
        given = {at: tensor for at, tensor in zip(places, saved, strict=True) if at is not None}
        given |= {self._inputs + at: tensor for at, tensor in enumerate(gradients)}
        wanted = {plan.place for plan in self._wanted.plan}
        return {at: tensor for at, tensor in given.items() if at in wanted}


class _Joined:
    """What AOTAutograd has of a forward and a backward that are one graph, compiled at once, or if
    a size is a symbol for each set of sizes when it comes."""

    def __init__(
        self,
        parts: JointGraph,
        module: fx.GraphModule,
        options: Options,
        *,
        has_symbols: bool,
    ) -> None:
        self._saved = [parts.ends.index(node) for node in parts.saved()]
        self._program_for: Callable[[list[Any]], _JointProgram]
        if has_symbols:
            compiled = partial(_of_sizes, parts, module, options, self._saved)
            self._program_for = _OfSizes(compiled).get
        else:
            program = _JointProgram(parts, module, options)
            self._program_for = lambda _: program
        self._open: dict[int, tuple[_JointProgram, OpenCall]] = {}
        self._numbers = itertools.count()

    def __deepcopy__(self, _: object) -> "_Joined":
        """AOTAutograd copies modules, each with what is noted of it."""
        return self

    def modules(
        self, parts: JointGraph, joint: fx.GraphModule
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What AOTAutograd takes for the two graphs: their inputs and results, and nothing
        between. The forward gives what autograd has to look after, and the number of its call."""
        forward, backward = fx.Graph(joint), fx.Graph(joint)
        saved = [n for n in map(parts.ends.__getitem__, self._saved) if isinstance(n, fx.Node)]
        known = {node: _placeholder(forward, node) for node in parts.inputs}
        operands = tuple(known.values())
        number = forward.call_function(_result, operands)
        # What is saved and shares no memory AOTAutograd takes for a buffer to be given away, and
        # refuses ``retain_graph``: so the number has, as far as it can see, that of an input.
        set_value(number, value_of(parts.inputs[parts.tensors[0]]).detach())
        known |= {node: _stand_in(forward, operands, node) for node in parts.computed_results}
        returned = [known[n] if isinstance(n, fx.Node) else n for n in parts.results]
        forward.output((*returned, *(known[node] for node in saved), number))
        taken = {node: _placeholder(backward, node) for node in (*saved, number)}
        taken |= {node: _placeholder(backward, node) for node in parts.gradients}
        operands = tuple(taken.values())
        others = [node for node in parts.computed_gradients if node not in taken]
        taken |= {node: _stand_in(backward, operands, node) for node in others}
        wanted = (taken[n] if isinstance(n, fx.Node) else n for n in parts.wanted)
        backward.output(tuple(wanted))
        modules = fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)
        for module in modules:
            note_on(module, self)
        return modules

    def forward(self, args: list[Any]) -> list[object]:
        """The results, what autograd has to look after, and the number of the call."""
        program = self._program_for(args)
        values, call = program.forward(args)
        key = next(self._numbers)
        number = torch.tensor(key)
        self._open[key] = program, call
        if not has_saved_tensor_hooks():  # which may keep a copy of the number alone
            weakref.finalize(number, self._end, key).atexit = False
        return [*values, number]

    def backward(self, args: list[Any]) -> list[object]:
        """The gradients of the inputs, of what the forward gave and those of its results."""
        number, again = args[len(self._saved)].item(), keeps_graph()
        program, call = self._open[number] if again else self._open.pop(number)
        return program.backward(call, args, again=again)

    def _end(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is not None:
            opened[1].close()


def _of_sizes(
    parts: JointGraph,
    module: fx.GraphModule,
    options: Options,
    saved: Sequence[int],
    args: Sequence[object],
) -> _JointProgram:
    """A graph with symbols, for the sizes of ``args``."""
    with torch.no_grad():
        known, traced = parts.of_sizes(module, args)
        return _JointProgram(known, traced, options, saved)


def _result(*operands: object) -> Any:
    """Stands in a graph that only says what comes in and goes out."""
    raise AssertionError(operands)


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    place = graph.placeholder(node.name)
    copy_notes(place, node)
    return place


def _stand_in(graph: fx.Graph, operands: Iterable[fx.Node], node: fx.Node) -> fx.Node:
    result = graph.call_function(_result, tuple(operands))
    copy_notes(result, node)
    return result


def _resolved(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Their numbers as memory has them: no conjugate or negative is left to be taken."""
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors]


class _FixedSizes:
    """One graph of known shapes, compiled at once."""

    def __init__(self, module: fx.GraphModule, options: Options, phase: str) -> None:
        graph = module.graph
        remove_tokens(graph)
        expand_written(graph)
        (output,) = graph.find_nodes(op="output")
        returned = list(output.args[0])  # type: ignore[call-overload]
        places = _places(graph)
        self._returns = _Returns.of(returned, places, computed_of(returned))
        self._graph = _built(module, places, self._returns.computed, options, phase)
        self._used = [isinstance(known_value(node), Tensor) for node in places]

    def release(self) -> None:
        """Give its arena back until the next call."""
        if self._graph is not None:
            self._graph.release()

    def __call__(self, args: list[Any]) -> list[object]:
        values: Sequence[object] = ()
        if self._graph is not None:
            used = zip(args, self._used, strict=True)
            values = self._graph.run(_resolved(tensor for tensor, is_used in used if is_used))
        return self._returns.of_call(dict(enumerate(args)), values)


@dataclass(frozen=True, slots=True)
class _Return:
    """A result: one of those computed, one of the arguments, or a constant."""

    computed: int | None
    place: int | None
    constant: object

    def value(self, args: Mapping[int, object], values: Sequence[object]) -> object:
        """With these arguments, by their places, and these computed values."""
        if self.computed is not None:
            return values[self.computed]
        return self.constant if self.place is None else args[self.place]


@dataclass(frozen=True, slots=True)
class _Returns:
    """What a graph returns; ``computed``: the nodes that a call computes, in their order."""

    plan: tuple[_Return, ...]
    computed: tuple[fx.Node, ...]

    @staticmethod
    def of(
        returned: Sequence[object], places: Sequence[fx.Node], computed: tuple[fx.Node, ...]
    ) -> "_Returns":
        """Of nodes and constants; ``places``: the nodes of its arguments."""
        number = {node: at for at, node in enumerate(places)}
        position = {node: at for at, node in enumerate(computed)}
        plan = (
            _Return(position.get(result), number.get(result), None)
            if isinstance(result, fx.Node)
            else _Return(None, None, result)
            for result in returned
        )
        return _Returns(tuple(plan), computed)

    def of_call(self, args: Mapping[int, object], values: Sequence[object]) -> list[object]:
        """As ``_Return.value``, of each."""
        return [result.value(args, values) for result in self.plan]


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and has_effect(node)


def _built(
    module: fx.GraphModule,
    places: Sequence[fx.Node],
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
        tuple(Input(Role.BATCH, node.name) for node in places if node in copies),
        tuple(Output(f"result {at}") for at in range(len(results))),
    )
    cache = Cache(options.cache_dir)
    step = StepGraph(graph, signature)
    with _watched(phase, options) as clock:
        run_passes(step, _FIRST, clock.watcher)
        plain = replace(options, memory=None)
        built = compile_step(step, _device(graph), plain, cache=cache, clock=clock)
    _require_strict(built, options)
    return CompiledGraph(phase, step, built, options)


def _require_strict(built: Built, options: Options) -> None:
    if options.strict and built.artifact.fallbacks:
        first = built.artifact.fallbacks[0]
        raise LoweringError(
            f"strict: {first.op} falls back to PyTorch's kernels: {first.reason}", code="TR-302"
        )


class _Releasable(Protocol):
    def release(self) -> None:
        """Give back the memory of calls that are over."""


Program = TypeVar("Program", bound=_Releasable)


class _OfSizes(Generic[Program]):
    """What was compiled of one graph with symbols, for each set of sizes that came. Those that do
    not run keep no memory: what a call may take is promised once, whatever sizes come."""

    def __init__(self, compiled: Callable[[list[Any]], Program]) -> None:
        self._compiled = compiled
        self._known: OrderedDict[object, Program] = OrderedDict()

    def get(self, args: list[Any]) -> Program:
        """That for the sizes of ``args``, compiled if there is none."""
        key = tuple(
            (argument.shape, argument.stride(), argument.dtype)
            if isinstance(argument, Tensor)
            else argument
            for argument in args
        )
        known = self._known
        if known and next(reversed(known)) != key:
            known[next(reversed(known))].release()
        if key not in known:
            known[key] = self._compiled(args)
            if len(known) > _MOST:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


class _Sized:
    """One graph with symbols: compiled for each set of sizes when it comes."""

    def __init__(self, module: fx.GraphModule, options: Options, phase: str) -> None:
        self._module, self._options, self._phase = module, options, phase
        self._of_sizes = _OfSizes(self._compiled)

    def __call__(self, args: list[object]) -> list[object]:
        return self._of_sizes.get(args)(args)

    def _compiled(self, args: list[object]) -> _FixedSizes:
        with torch.no_grad():
            return _FixedSizes(retraced(self._module, args), self._options, self._phase)


__all__ = ["CompiledGraph", "compiled", "compiled_graphs", "profiling", "treadle"]
