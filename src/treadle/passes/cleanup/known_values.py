"""Values that no input changes: computed once, when the step is compiled."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from treadle.algebra.extents import Size
from treadle.compat.operators.operator_facts import (
    CostClass,
    Effect,
    facts_of,
    gives_undefined,
    sizes_from_values,
)
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import outside_modes
from treadle.graph.analysis.alias import leaves_step, storages
from treadle.graph.core.arguments import given_of
from treadle.graph.core.constants import constant_of
from treadle.graph.core.node_info import belong, has_value, info, set_value, value_of
from treadle.graph.core.operators import effects_of, is_item, may_drop
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in, type_of
from treadle.graph.core.values import emit_ahead, refresh, value_of_constant
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.util.errors import require
from treadle.util.nested import leaves
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten
LARGEST = 1 << 20
"""Bytes of one constant, at most. It is in memory between calls as well; what each call computes is
there for a part of the call."""
LARGEST_OPERAND = 16 << 20
"""Bytes of each value on the way to one, at most: a compile is not to take longer than the calls
that it saves."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FoldConstants(GraphPass):
    """Compute what depends on no input once, on the host, and keep it as a constant.

    before:  a = arange(64); c = cumsum(a, 0); s = sin(c); y = mul(x, s)
    after:   s = the 64 numbers; y = mul(x, s)

    Only what takes a kernel of PyTorch's, a reduction or a transcendental function, and what
    follows as long as it does not grow: positions, masks and fills are formulas that are never
    stored, and a kept one would have to be read. ``most``: the bytes of all constants that are made
    of a step. A draw is never folded, nor is an operation of the user's, a result of the step, or
    what has dynamic sizes. The memory plan counts constants like those of the user.
    """

    contract = Contract()

    most: int = 4 << 20

    def run(self, step: StepGraph) -> int:
        known = _KnownValues(step.graph)
        room, made = self.most, list[fx.Node]()
        for node in list(known.worth):
            constant = attempt(known.folded, node, room)
            if not isinstance(constant, NoMatch):
                room -= type_of(node).nbytes
                made.append(_replaced(node, constant))
        for node in reversed(known.nodes):
            if not node.users and may_drop(node):
                step.graph.erase_node(node)
        refresh(step.graph, made)
        return len(made)


@final
@dataclass
class _KnownValues:
    """The nodes that depend on no input, in order; those worth a constant, with views of these,
    which stay views of the constant; and the values that were asked for."""

    graph: fx.Graph
    nodes: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    worth: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    views: set[fx.Node] = field(default_factory=set[fx.Node])
    _values: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if not isinstance(attempt(self._require_known, node), NoMatch):
                self.nodes[node] = None
                if self._is_view(node):
                    self.views.add(node)
                if self._is_worth(node):
                    self.worth[node] = None

    def folded(self, node: fx.Node, room: int) -> Tensor:
        """The elements of a value; ``NoMatch`` where another one is made of it."""
        nbytes = type_of(node).nbytes
        require(node not in self.views, NoMatch, f"{node} is a view")
        require(self._is_read(node), NoMatch, f"{node} is only read by other constants")
        require(nbytes <= room, NoMatch, f"constants have no room for {nbytes} bytes")
        with outside_modes(), torch.no_grad():
            return self._value(node)

    def _require_known(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            require(constant_of(node) is not None, NoMatch, f"{node} is no constant")
            return
        require(node.op == "call_function", NoMatch, f"{node} is an input or the result")
        unknown = [source for source in node.all_input_nodes if source not in self.nodes]
        require(not unknown, NoMatch, f"{node} reads {unknown[:1]}")
        if not is_item(node):
            _require_pure(node)
        sizes = [size for tensor in tensors_in(value_of(node)) for size in tensor.shape]
        static = all(type(size) is int for size in sizes)
        static = static and not any(isinstance(leaf, Size) for leaf in _plain_arguments(node))
        require(static, NoMatch, f"{node} has dynamic sizes")
        nbytes = sum(tensor.nbytes for tensor in tensors_in(value_of(node)))
        require(nbytes <= LARGEST_OPERAND, NoMatch, f"{node} has {nbytes} bytes")

    def _is_worth(self, node: fx.Node) -> bool:
        """Whether to keep it costs less than to compute it at each call."""
        value = value_of(node) if node.op == "call_function" else None
        if not isinstance(value, Tensor) or value.dtype.is_complex or leaves_step(node):
            return False
        kind, sources = type_of(node), node.all_input_nodes
        from_worth = [source for source in sources if source in self.worth]
        if node in self.views:
            return bool(from_worth)
        if kind.nbytes > LARGEST or not kind.is_contiguous:
            return False
        if _is_slow(sources[0] if is_item(node) else node):
            return True
        return bool(from_worth) and kind.nbytes <= max(type_of(each).nbytes for each in from_worth)

    def _is_view(self, node: fx.Node) -> bool:
        if is_item(node):
            return node.all_input_nodes[0] in self.views
        held = storages(value_of(node))
        return any(held & storages(value_of(source)) for source in node.all_input_nodes)

    def _is_read(self, node: fx.Node) -> bool:
        """Whether something that is no constant reads it, or a view of it."""
        return any(
            user not in self.worth or (user in self.views and self._is_read(user))
            for user in node.users
        )

    def _value(self, node: fx.Node) -> Any:
        waiting = [node]
        while waiting:
            current = waiting[-1]
            missing = [each for each in current.all_input_nodes if each not in self._values]
            waiting += missing
            if not missing:
                waiting.pop()
                self._values[current] = self._run(current)
        return self._values[node]

    def _run(self, node: fx.Node) -> object:
        constant = constant_of(node)
        if constant is not None:
            return constant.detach().to(_CPU)
        args, kwargs = given_of(node, self._values.__getitem__, _on_host)
        assert callable(node.target), node
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:  # the call raises it, at its line
            raise NoMatch(f"PyTorch cannot compute {node}: {error}") from None


def _on_host(leaf: object) -> object:
    return _CPU if isinstance(leaf, torch.device) else leaf


def _require_pure(node: fx.Node) -> None:
    op = node.target
    require(isinstance(op, OpOverload), NoMatch, f"{node} is no operation")
    assert isinstance(op, OpOverload)
    pure = facts_of(op).native and effects_of(node) is Effect.NONE and has_value(node)
    require(pure, NoMatch, f"{node} draws, does something else, or is not PyTorch's")
    require(not gives_undefined(op), NoMatch, f"{node} gives memory as it is")
    require(not sizes_from_values(op), NoMatch, f"{node} has a size that depends on values")
    require(not info(node).eager, NoMatch, f"{node} runs as PyTorch's kernel")


def _plain_arguments(node: fx.Node) -> Iterable[object]:
    return leaves((tuple(node.args), dict(node.kwargs)))


def _is_slow(node: fx.Node) -> bool:
    """Whether a call is more than a pass over its result."""
    assert isinstance(node.target, OpOverload), node
    facts = facts_of(node.target)
    return facts.slow_elements or facts.cost is not CostClass.POINTWISE


def _replaced(node: fx.Node, constant: Tensor) -> fx.Node:
    """The constant, on the device of ``node``, in its place."""
    graph, device = node.graph, value_of(node).device
    name = _held(graph, constant)
    with graph.inserting_before(node):
        made = graph.create_node("get_attr", name)
    set_value(made, value_of_constant(graph, constant))
    belong(made, node)
    if device != _CPU:
        made = emit_ahead(node, node, aten._to_copy.default, made, device=device)
    node.replace_all_uses_with(made)
    return made


def _held(graph: fx.Graph, constant: Tensor) -> str:
    """The name under which the graph has it from now on, in a module of its own: that of before
    may be the module of other graphs, in which other values are folded."""
    owner, holder = graph.owning_module, nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        first = str(node.target).partition(".")[0]
        vars(holder)[first] = getattr(owner, first)
    names = (f"folded_{number}" for number in itertools.count())
    name = next(name for name in names if not hasattr(holder, name))
    vars(holder)[name] = constant
    graph.owning_module = holder  # pyright: ignore[reportAttributeAccessIssue]
    return name
