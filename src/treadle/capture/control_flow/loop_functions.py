"""The functions of a loop while a step is traced: each runs once, on stand-ins for the values of
any iteration, and becomes a graph of its own.

::

    before:  f = lambda h: tanh(h @ w)                 w is from outside
    after:   carried_0, other_0 -> tanh(mm(carried_0, other_0))

Each tensor from outside that a function uses is replaced by one of the same type, in order of first
use, and becomes an operand of the loop. The traced nodes are extracted as a graph; nothing in the
step's own graph reads them, so they are removed there. The gradient of a body is traced with it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import grad as gradients_of  # the watched one is the step's own backward
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import handle_torch_function, has_torch_function

from treadle.capture.control_flow.bodies import OperandsFromOutside, Pure, require_closed, unfit
from treadle.capture.functionalize import Functionalizer
from treadle.capture.python_state.flatten import flatten_containers
from treadle.capture.tracing.patches import put_attribute
from treadle.compat.checkpointing import in_checkpoint
from treadle.compat.fake import FakeTensor, fake_like
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.pytree import TreeSpec
from treadle.compat.tracing import TraceInProgress, outside_modes, without_functions, works_for
from treadle.compat.transforms import in_transform
from treadle.graph.analysis.data_dependent import fresh
from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.node_info import NodeInfo, copy_notes, describe, info, known_value
from treadle.graph.core.operators import may_drop
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.custom_ops.while_loops import function_of, loop_value
from treadle.graph.text.printing import show


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """What one of the functions returned, and the first node and one past the last of its trace."""

    leaves: Sequence[Any]
    spec: TreeSpec | None  # of what the user's function returned
    first: int
    end: int


class LoopFunctions:
    """The functions of a loop, traced on values of any iteration.

    ``name``: the function of ``torch`` that loops. ``like``: for each value that a round is given,
    a tensor of its type; ``names``: what the graphs call them; ``flags``: which have gradients.
    """

    def __init__(
        self, name: str, like: Sequence[Tensor], names: Sequence[str], flags: Sequence[bool]
    ) -> None:
        self._name = name
        self._names = list(names)
        self._trace = TraceInProgress()
        self._outside = set(self._trace.graph.nodes)
        self._gradients = torch.is_grad_enabled()  # also where a part of a body turns them off
        self._places: list[fx.Node] = []  # of the values and then of those inside
        self.values = list(map(self._standing_in, like, flags))
        self._others: list[Tensor] = []  # from outside, as they are used
        self._inside: list[Tensor] = []  # beside each what stands for it
        self._by_id: dict[int, Tensor] = {}

    def traced(self, part: str, function: Callable[[Sequence[Tensor]], object]) -> TracedFunction:
        """One run of the function on stand-ins for the values of an iteration. ``part``: its name.
        TR-151 if it does more than compute."""
        first = self._trace.count
        with contextlib.ExitStack() as inside:
            inside.enter_context(Pure(self._name, part, always=True))
            inside.enter_context(saved_tensors_hooks(_same, _same))  # none of a checkpoint's
            inside.enter_context(_without_conditions(self._name, part))
            with _Lifting(self, self._name, part):
                result = function(self.values)
            leaves, structure = flatten_containers(result)
            leaves = [self.inside(leaf) for leaf in leaves]
        self._require_closed(part, leaves)
        return TracedFunction(leaves, structure, first, self._trace.count)

    def inside(self, leaf: object) -> object:
        """The stand-in for ``leaf`` in the loop, if that is a tensor from outside."""
        if not isinstance(leaf, Tensor) or id(leaf) in self._by_id:
            return self._by_id.get(id(leaf), leaf)
        if any(leaf is known for known in (*self.values, *self._inside)):
            return leaf
        node = self._trace.find(leaf)
        if node is not None and node not in self._outside and node.op == "call_function":
            return leaf
        if in_transform():
            raise unfit(self._name, "a torch.func transform in it uses a tensor from outside")
        require_dense(self._name, leaf, "it uses")
        stand_in = self._standing_in(leaf, leaf.requires_grad and self._gradients)
        self._others.append(leaf)
        self._inside.append(stand_in)
        self._by_id[id(leaf)] = stand_in
        return stand_in

    def _standing_in(self, tensor: Tensor, flag: bool) -> Tensor:
        with torch.no_grad():
            stand_in = _any_value(tensor, self._name)
        self._places.append(self._trace.node_of(stand_in))  # now: what writes to it is another node
        return stand_in.requires_grad_(flag)

    def _require_closed(self, part: str, results: Sequence[object]) -> None:
        """TR-151 if a gradient reaches a tensor from outside without a stand-in, because a function
        of the user's got it without being intercepted."""
        known = (*self.values, *self._inside)
        ours = {get_gradient_edge(tensor).node for tensor in known if tensor.requires_grad}
        why = f"{part} uses a tensor from outside that is not an operand"
        require_closed(results, ours, lambda: unfit(self._name, why))

    @property
    def flags(self) -> list[bool]:
        """Which of the values of an iteration, and then of the tensors from outside that were used
        so far, have gradients."""
        return [tensor.requires_grad for tensor in (*self.values, *self._inside)]

    def texts(
        self, runs: Sequence[tuple[TracedFunction, Sequence[Tensor]]]
    ) -> tuple[list[Tensor], list[str]]:
        """What the functions read besides the values of an iteration, and each function as the text
        of a graph, with the stand-ins of its gradients."""
        for tensor in (*self.values, *self._inside):
            if not all(type(size) is int for size in tensor.shape):
                raise unfit(self._name, "it uses a tensor with declared or unknown sizes")
        constants, texts = without_functions(self._texts)(runs)
        return [*self._others, *map(self._tensor_of, constants)], texts

    def _tensor_of(self, node: fx.Node) -> Tensor:
        """A constant of a function's, or a number of Python's that it read, for the step's own
        graph."""
        value = known_value(node)
        assert isinstance(value, FakeTensor), node
        with outside_modes():
            fake = fake_like(value)
        self._trace.track(fake, node)
        return fake

    def _texts(
        self, runs: Sequence[tuple[TracedFunction, Sequence[Tensor]]]
    ) -> tuple[list[fx.Node], list[str]]:
        """What the functions read besides what they were given, and each as text."""
        with outside_modes():
            graphs = [self._graph(run, grads) for run, grads in runs]
            constants = list(
                dict.fromkeys(constant for graph in graphs for constant in graph.constants)
            )
            others = [f"other_{at}" for at in range(len(self._inside) + len(constants))]
            names = [*self._names, *others]
            name_of = dict(zip((*self._places, *constants), names, strict=True))
            texts = [graph.text(name_of) for graph in graphs]
            for text in texts:
                function_of(text)  # now, and not while the step runs for the first time
            return constants, texts

    def backward(
        self, body: TracedFunction, results: Sequence[Tensor]
    ) -> tuple[TracedFunction, list[Tensor]]:
        """The body with the gradients of all its inputs that have some, computed from stand-ins for
        the gradients of ``results``; and these stand-ins."""
        inputs = list(compress((*self.values, *self._inside), self.flags))
        with torch.no_grad():
            grads = [_any_value(result, self._name) for result in results]
        pairs = zip(results, grads, strict=True)
        used = [(result, grad) for result, grad in pairs if result.requires_grad]
        tensors: Sequence[Tensor | None] = [None] * len(inputs)
        if used:
            outputs, theirs = zip(*used, strict=True)
            with Pure(self._name, "a gradient of its body", always=True):
                # retained: a value that a body left outside has its gradient asked for later, and
                # is refused by its own code then
                tensors = without_functions(gradients_of)(
                    outputs, inputs, theirs, allow_unused=True, retain_graph=True
                )
        with torch.no_grad():
            incoming = [
                torch.zeros_like(value) if grad is None else grad
                for value, grad in zip(inputs, tensors, strict=True)
            ]
        return TracedFunction(incoming, None, body.first, self._trace.count), grads

    def _graph(self, run: TracedFunction, grads: Sequence[Tensor]) -> "_LoopGraph":
        """The graph that was traced in the run, without mutation and without unused values."""
        place = self._trace.node_of
        known = {*self._places, *map(place, grads)}
        traced = fx.Graph()
        inputs: dict[fx.Node, fx.Node] = {}
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # from outside, or a constant
                copies[node] = inputs[node] = traced.placeholder(node.name)
                copy_notes(copies[node], node)
            return copies[node]

        nodes = list(self._trace.graph.nodes)[run.first : run.end]
        returned = [place(leaf) for leaf in run.leaves]
        for node in (
            *known,
            *(returned_node for returned_node in returned if returned_node not in nodes),
        ):
            copied(node)
        for node in nodes:
            if node not in known and node.op == "call_function":
                copies[node] = traced.node_copy(node, copied)
        functional = Functionalizer(traced)
        graph, results, writes = functional.run([copied(leaf_node) for leaf_node in returned])
        if writes:
            raise unfit(self._name, "its body writes to a tensor from outside")
        ours = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
        graph.output(tuple(results))
        for node in reversed(list(graph.nodes)):
            if not node.users and may_drop(node):
                graph.erase_node(node)
        return _LoopGraph(graph, ours, [place(grad) for grad in grads], known)


@dataclass(frozen=True, slots=True)
class _LoopGraph:
    """A functional graph; ``inputs``: its inputs, by the nodes of the step that they stand for.
    ``known``: those of these nodes that stand for values of an iteration, including ``grads``."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, fx.Node]
    grads: Sequence[fx.Node]
    known: AbstractSet[fx.Node]

    @property
    def constants(self) -> list[fx.Node]:
        """The other inputs that it reads."""
        return [node for node, own in self.inputs.items() if own.users and node not in self.known]

    def text(self, name_of: Mapping[fx.Node, str]) -> str:
        """As a step whose inputs are the keys of ``name_of``, and then the gradients of results."""
        names = [*name_of.items(), *((node, f"grad_{at}") for at, node in enumerate(self.grads))]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node, name in names:
            placeholder = graph.placeholder(name)
            describe(placeholder, fresh(known_value(node)), NodeInfo())
            if node in self.inputs:
                copies[self.inputs[node]] = placeholder
        for node in self.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                describe(copies[node], known_value(node), NodeInfo(phase="forward"))
        (output,) = self.graph.find_nodes(op="output")
        graph.output(map_nodes(copies.__getitem__, output.args[0]))
        inputs = tuple(Input(Role.BATCH, name) for _, name in names)
        outputs = tuple(Output(f"result {at}") for at in range(len(output.args[0])))
        return show(StepGraph(graph, Signature(inputs, outputs)), exact=True)


class _Lifting(OperandsFromOutside):
    """Gives a function stand-ins for tensors from outside.

    before:  y = mm(h, w)                                  w is from outside
    after:   v = loop_value(w); y = mm(h, v)
    """

    def __init__(self, functions: LoopFunctions, name: str, part: str) -> None:
        super().__init__(name, part, values=False)
        self._functions = functions

    def inside(self, leaf: object) -> object:
        return self._functions.inside(leaf)

    def made(self, result: object) -> None:
        if in_checkpoint():  # it would run again where nobody hears of tensors from outside
            raise unfit(self._name, f"{self._part} has a checkpoint")


@contextlib.contextmanager
def _without_conditions(name: str, part: str) -> Iterator[None]:
    """Inside, TR-151 if Python asks whether a tensor is true, which modes do not intercept."""
    thread, asked = threading.get_ident(), Tensor.__bool__

    def refused(tensor: Tensor) -> bool:
        if works_for(thread):
            raise unfit(name, f"{part} asks for the value of a tensor")
        return asked(tensor)

    with contextlib.ExitStack() as undo:
        put_attribute(undo, Tensor, "__bool__", refused)
        yield


# Operators are called behind modes, which must hear of them where a loop stands in a loop.


def _any_value(tensor: Tensor, name: str) -> Tensor:
    if has_torch_function((tensor,)):
        return handle_torch_function(_any_value, (tensor,), tensor, name)
    return loop_value(tensor, name)


def in_graph(operation: OpOverload, *args: Any) -> list[Tensor]:
    """The results of a loop; ``args``: of its operation, tensors in lists."""
    tensors = [
        leaf for arg in args if isinstance(arg, list) for leaf in arg if torch.is_tensor(leaf)
    ]
    if has_torch_function(tensors):
        return handle_torch_function(in_graph, tensors, operation, *args)
    return operation(*args)


def _same(value: Tensor) -> Tensor:
    return value


def require_dense(name: str, tensor: Tensor, what: str) -> None:
    """TR-151 for a sparse tensor. ``what`` a loop does with it: "it uses"."""
    if tensor.layout is not torch.strided:
        raise unfit(name, f"{what} a tensor that is not dense ({tensor.layout})")


def require_same(name: str, carried: Sequence[Tensor], results: Sequence[object]) -> None:
    """TR-151 unless a body returns the types that it takes."""
    for old, new in zip(carried, results, strict=True):
        if not isinstance(new, Tensor):
            raise unfit(name, f"its body returns {new!r} for {shown_type(old)}")
        if shown_type(old) != shown_type(new):
            raise unfit(name, f"its body returns {shown_type(new)} for {shown_type(old)}")


def refuse_loop_values(graph: fx.Graph) -> None:
    """TR-151 if a value of one iteration is used after the loop, because a body stored it
    somewhere."""
    for node in graph.find_nodes(op="call_function", target=loop_value):
        raise unfit(
            str(node.args[1]),
            "a value of one iteration is used outside that iteration",
            info(node).where,
        )


def shown_type(tensor: Tensor) -> str:
    """The dtype, sizes and device, for messages."""
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
