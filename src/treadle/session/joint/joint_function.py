"""A forward and a backward in one graph, as AOTAutograd calls them: two modules that exchange only
the values that autograd must track."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from treadle.compat.dynamo import has_saved_tensor_hooks, keeps_graph, note_on
from treadle.graph.core.node_info import copy_notes, set_value, value_of
from treadle.options import Options
from treadle.runtime.execute.joint_calls import JointCalls, OpenCall
from treadle.session.joint.compiled_graph import CompiledGraph
from treadle.session.joint.joint_graph import JointGraph
from treadle.session.joint.returns import Returns, resolved
from treadle.session.joint.sizes import OfSizes


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
        parts.tell_phases()
        places = (*parts.inputs, *parts.gradients)
        kept = parts.saved() if saved is None else [parts.boundary[at] for at in saved]
        self._results = Returns.of(parts.results, places, parts.computed_results)
        self._wanted = Returns.of(parts.wanted, places, parts.computed_gradients)
        self._saved = Returns.of(kept, places, self._results.computed)
        self._tensors, self._inputs = parts.tensors, len(parts.inputs)
        wanted = {plan.place for plan in self._wanted.plan}
        saved_places = [(at, plan.place) for at, plan in enumerate(self._saved.plan)]
        self._of_saved = [
            (at, place) for at, place in saved_places if place is not None and place in wanted
        ]
        count = len(parts.gradients)
        self._of_gradients = [at for at in range(count) if self._inputs + at in wanted]
        step = parts.joined(module)
        self._graph = CompiledGraph.of(
            "forward and backward", "joint", step, options, lambda: self._calls.note
        )
        self._calls = JointCalls(self._graph.executable, len(self._results.computed))

    def forward(self, args: Sequence[Any]) -> tuple[list[object], OpenCall]:
        """The results, what autograd has to look after, and the call, which is open now."""
        with self._graph.timed() as seconds:
            tensors = self._graph.checked(resolved(args[at] for at in self._tensors))
            values, call = self._calls.forward(tensors, seconds)
        given = dict(enumerate(args))
        results, saved = self._results.of_call(given, values), self._saved.of_call(given, values)
        return [*results, *saved], call

    def backward(self, call: OpenCall, args: list[Any], *, again: bool) -> list[object]:
        """The gradients of the inputs, of what autograd looked after, the call's number and the
        gradients of the results."""
        count = len(self._saved.plan)
        given = self._given(args[:count], args[count + 1 :])
        gradients = resolved(args[count + 1 :])
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
        given = {place: saved[at] for at, place in self._of_saved}
        for at in self._of_gradients:
            given[self._inputs + at] = gradients[at]
        return given


class JointFunction:
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
        self._saved = [parts.boundary.index(node) for node in parts.saved()]
        self._program_for: Callable[[list[Any]], _JointProgram]
        if has_symbols:
            compiled = partial(_of_sizes, parts, module, options, self._saved)
            self._program_for = OfSizes(compiled).get
        else:
            program = _JointProgram(parts, module, options)
            self._program_for = lambda _: program
        self._open: dict[int, tuple[_JointProgram, OpenCall]] = {}
        self._numbers = itertools.count()

    def __deepcopy__(self, _: object) -> "JointFunction":
        """AOTAutograd copies modules, each with what is noted of it."""
        return self

    def modules(
        self, parts: JointGraph, joint: fx.GraphModule
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What AOTAutograd takes for the two graphs: their inputs and results, and nothing
        between. The forward gives what autograd has to look after, and the number of its call."""
        forward, backward = fx.Graph(joint), fx.Graph(joint)
        boundary = parts.boundary
        saved = [n for n in map(boundary.__getitem__, self._saved) if isinstance(n, fx.Node)]
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
