"""``torch.while_loop`` while a step is traced: one operation, with its functions as separate
graphs.

::

    before:  i, h = while_loop(lambda i, h: i < n, lambda i, h: (i + 1, tanh(h @ w)), (i0, h0))
    after:   i, h = treadle::while_loop([i0, h0], [n, w], ...,
                 condition = "carried_0, carried_1, other_0, other_1 -> lt(carried_0, other_0)",
                 body      = "carried_0, ...  -> add(carried_0, 1), tanh(mm(carried_1, other_1))")

Both functions run once, on tensors that stand for the carried tensors of any iteration. Each tensor
that they use from outside is replaced by one of the same type, in order of first use, and becomes
an operand. The traced nodes are extracted as a graph; nothing in the step's own graph reads them,
so they are removed there. A gradient of the body is traced with it. Which carried tensors need a
gradient may depend on the body, so it is traced again until the same tensors need a gradient before
and after an iteration.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
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
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.fake import FakeTensor, fake_like
from treadle.compat.pytree import TreeSpec
from treadle.compat.tracing import TraceInProgress, outside_modes, without_functions
from treadle.compat.transforms import in_transform
from treadle.graph.analysis.data_dependent import fresh
from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.node_info import NodeInfo, copy_notes, describe, info, known_value
from treadle.graph.core.operators import may_drop
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.custom_ops.while_loops import function_of, loop_value
from treadle.graph.custom_ops.while_loops import while_loop as loop_operation
from treadle.graph.text.printing import show
from treadle.util.errors import with_article

_NAME = "while_loop"


def while_loop(
    cond_fn: Callable[..., object], body_fn: Callable[..., object], carried_inputs: Sequence[object]
) -> object:
    """``body_fn(*carried)`` as long as ``cond_fn(*carried)``, in the graph of a step."""
    if in_transform():
        raise unfit(_NAME, "it is inside a torch.func transform")
    leaves, spec = flatten_containers(tuple(carried_inputs))
    carried = [_carried(leaf) for leaf in leaves]
    if not carried:
        raise unfit(_NAME, "it carries no tensor")
    flags = [tensor.requires_grad and torch.is_grad_enabled() for tensor in carried]
    while True:
        functions = _Functions(carried, flags)
        condition = functions.traced("its condition", cond_fn, spec)
        body = functions.traced("its body", body_fn, spec)
        _require_same(carried, spec, body)
        after = [flag or leaf.requires_grad for flag, leaf in zip(flags, body.leaves, strict=True)]
        if after == flags:
            break
        flags = after
    _require_condition(condition)
    return unflatten(functions.operation(condition, body), spec)


def _carried(leaf: object) -> Tensor:
    if not isinstance(leaf, Tensor):
        words = (
            f"it carries {with_article(type(leaf).__name__)}, whose value is known only after the "
            "last iteration"
        )
        raise unfit(_NAME, f"{words}: carry it as torch.tensor(value)")
    _require_plain(leaf, "it carries")
    return leaf


def _require_plain(tensor: Tensor, what: str) -> None:
    if tensor.layout is not torch.strided:
        raise unfit(_NAME, f"{what} a tensor that is not dense ({tensor.layout})")
    if not all(type(size) is int for size in tensor.shape):
        raise unfit(_NAME, f"{what} a tensor with declared or unknown sizes")


@dataclass(frozen=True, slots=True)
class _Run:
    """What one of the functions returned, and the first node and one past the last of its trace."""

    leaves: Sequence[Any]
    spec: TreeSpec | None  # of what the user's function returned
    first: int
    end: int


class _Functions:
    """The functions of a loop, traced on values of any round. ``flags``: which have gradients."""

    def __init__(self, carried: Sequence[Tensor], flags: Sequence[bool]) -> None:
        self._trace = TraceInProgress()
        self._outside = set(self._trace.graph.nodes)
        self._gradients = torch.is_grad_enabled()  # also where a part of a body turns them off
        self._given = list(carried)
        self._flags = list(flags)
        self._places: list[fx.Node] = []  # of the carried and then of those inside
        self._carried = list(map(self._standing_in, carried, flags))
        self._others: list[Tensor] = []  # from outside, as they are used
        self._inside: list[Tensor] = []  # beside each what stands for it
        self._by_id: dict[int, Tensor] = {}

    def traced(self, part: str, function: Callable[..., object], spec: TreeSpec) -> _Run:
        """One run of the function."""
        first = self._trace.count
        with contextlib.ExitStack() as inside:
            inside.enter_context(Pure(_NAME, part, always=True))
            inside.enter_context(saved_tensors_hooks(_same, _same))  # none of a checkpoint's
            with _Lifting(self, part):
                result = function(*unflatten(self._carried, spec))
            leaves, structure = flatten_containers(result)
            leaves = [self.inside(leaf) for leaf in leaves]
        self._require_closed(part, leaves)
        return _Run(leaves, structure, first, self._trace.count)

    def inside(self, leaf: object) -> object:
        """What stands for ``leaf`` in the loop, if that is a tensor from outside."""
        if not isinstance(leaf, Tensor) or id(leaf) in self._by_id:
            return self._by_id.get(id(leaf), leaf)
        if any(leaf is known for known in (*self._carried, *self._inside)):
            return leaf
        node = self._trace.find(leaf)
        if node is not None and node not in self._outside and node.op == "call_function":
            return leaf
        if in_transform():
            raise unfit(_NAME, "a torch.func transform in it uses a tensor from outside")
        _require_plain(leaf, "it uses")
        stand_in = self._standing_in(leaf, leaf.requires_grad and self._gradients)
        self._others.append(leaf)
        self._inside.append(stand_in)
        self._by_id[id(leaf)] = stand_in
        return stand_in

    def _standing_in(self, tensor: Tensor, flag: bool) -> Tensor:
        with torch.no_grad():
            stand_in = _any_value(tensor)
        self._places.append(self._trace.node_of(stand_in))  # now: what writes to it is another node
        return stand_in.requires_grad_(flag)

    def _require_closed(self, part: str, results: Sequence[object]) -> None:
        """TR-151 where a gradient reaches a tensor from outside that nothing stands for: a function
        of the user's got it by a way that nobody hears of."""
        known = (*self._carried, *self._inside)
        ours = {get_gradient_edge(tensor).node for tensor in known if tensor.requires_grad}
        why = f"{part} uses a tensor from outside that is not an operand"
        require_closed(results, ours, lambda: unfit(_NAME, why))

    def operation(self, condition: _Run, body: _Run) -> list[Tensor]:
        """The loop, in the step's graph."""
        flags = [*self._flags, *(tensor.requires_grad for tensor in self._inside)]
        runs = [(condition, []), (body, [])]
        if any(flags):
            runs.append(self._backward(body, flags))
        constants, texts = without_functions(self._texts)(runs)
        others = [*self._others, *map(self._tensor_of, constants)]
        flags += [False] * len(constants)
        return _loop(self._given, others, flags, *texts, *([] if any(flags) else [""]))

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
        self, runs: Sequence[tuple[_Run, Sequence[Tensor]]]
    ) -> tuple[list[fx.Node], list[str]]:
        """What the functions read besides what they were given, and each as text."""
        with outside_modes():
            graphs = [self._graph(run, grads) for run, grads in runs]
            constants = list(
                dict.fromkeys(constant for graph in graphs for constant in graph.constants)
            )
            names = _names(len(self._carried), len(self._inside) + len(constants))
            name_of = dict(zip((*self._places, *constants), names, strict=True))
            texts = [graph.text(name_of) for graph in graphs]
            for text in texts:
                function_of(text)  # now, and not while the step runs for the first time
            return constants, texts

    def _backward(self, body: _Run, flags: Sequence[bool]) -> tuple[_Run, list[Tensor]]:
        """The body with its gradients, which take those of its results: what stands for these."""
        inputs = list(compress((*self._carried, *self._inside), flags))
        with torch.no_grad():
            grads = [_any_value(tensor) for tensor in compress(self._carried, flags)]
        pairs = zip(compress(body.leaves, self._flags), grads, strict=True)
        used = [(result, grad) for result, grad in pairs if result.requires_grad]
        tensors: Sequence[Tensor | None] = [None] * len(inputs)
        if used:
            results, theirs = zip(*used, strict=True)
            with Pure(_NAME, "a gradient of its body", always=True):
                tensors = without_functions(gradients_of)(
                    results, inputs, theirs, allow_unused=True
                )
        with torch.no_grad():
            incoming = [
                torch.zeros_like(value) if grad is None else grad
                for value, grad in zip(inputs, tensors, strict=True)
            ]
        return _Run(incoming, None, body.first, self._trace.count), grads

    def _graph(self, run: _Run, grads: Sequence[Tensor]) -> "_LoopGraph":
        """What was traced in the run, without mutation, and without what nobody reads."""
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
            raise unfit(_NAME, "its body writes to a tensor from outside")
        ours = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
        graph.output(tuple(results))
        for node in reversed(list(graph.nodes)):
            if not node.users and may_drop(node):
                graph.erase_node(node)
        return _LoopGraph(graph, ours, [place(grad) for grad in grads], known)


@dataclass(frozen=True, slots=True)
class _LoopGraph:
    """A functional graph; ``inputs``: by the nodes of the step that they stand for. ``known``: of
    these the ones that stand for values of a round, ``grads`` among them."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, fx.Node]
    grads: Sequence[fx.Node]
    known: AbstractSet[fx.Node]

    @property
    def constants(self) -> list[fx.Node]:
        """What it reads besides."""
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
    """Gives a function what stands for tensors from outside.

    before:  y = mm(h, w)                                  w is from outside
    after:   v = loop_value(w); y = mm(h, v)
    """

    def __init__(self, functions: _Functions, part: str) -> None:
        super().__init__(_NAME, part)
        self._functions = functions

    def inside(self, leaf: object) -> object:
        return self._functions.inside(leaf)


# Operators are called behind modes, which must hear of them where a loop stands in a loop.


def _any_value(tensor: Tensor) -> Tensor:
    if has_torch_function((tensor,)):
        return handle_torch_function(_any_value, (tensor,), tensor)
    return loop_value(tensor)


def _loop(carried: Sequence[Tensor], others: Sequence[Tensor], *rest: object) -> list[Tensor]:
    tensors = (*carried, *others)
    if has_torch_function(tensors):
        return handle_torch_function(_loop, tensors, carried, others, *rest)
    return loop_operation(carried, others, *rest)


def _same(value: Tensor) -> Tensor:
    return value


def refuse_loop_values(graph: fx.Graph) -> None:
    """TR-151 where a value of one round is used after the loop: a body left it somewhere."""
    for node in graph.find_nodes(op="call_function", target=loop_value):
        raise unfit(
            _NAME, "a value of one iteration is used outside that iteration", info(node).where
        )


def _names(carried: int, others: int) -> list[str]:
    return [f"carried_{at}" for at in range(carried)] + [f"other_{at}" for at in range(others)]


def _require_condition(condition: _Run) -> None:
    """One boolean, which eager asks for before each round."""
    (leaf, *more) = condition.leaves or [None]
    if more or not isinstance(leaf, Tensor):
        raise unfit(
            _NAME, f"its condition is not a tensor but {leaf!r}, the same in every iteration"
        )
    if leaf.dtype is not torch.bool or leaf.numel() != 1:
        raise unfit(_NAME, f"its condition is {_type(leaf)}, not a single boolean")


def _require_same(carried: Sequence[Tensor], spec: TreeSpec, body: _Run) -> None:
    """The body gives what it takes."""
    if str(body.spec) != str(spec) or len(body.leaves) != len(carried):
        raise unfit(_NAME, "its body does not return the containers that it receives")
    for old, new in zip(carried, body.leaves, strict=True):
        if not isinstance(new, Tensor):
            raise unfit(_NAME, f"its body returns {new!r} for {_type(old)}")
        if _type(old) != _type(new):
            raise unfit(_NAME, f"its body returns {_type(new)} for {_type(old)}")


def _type(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
