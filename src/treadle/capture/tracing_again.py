"""A part of the trace in progress, repeated for other tensors without tracing it again.

::

    traced:   d = detach(p1);  m = mul(d, keep);  c = copy_(p1, m)     the piece, for p1
    again:    d2 = detach(p2); m2 = mul(d2, keep); c2 = copy_(p2, m2)  the same for p2

An operation is a node of the graph, a proxy, and a run on fake tensors, which tells the type of its
result. If a part was traced for tensors of the same types, the results are known: only the node is
new, and fake memory if a result has its own memory. Operations that write, or whose results share
memory with their arguments, run on fake tensors, so views and versions are correct.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

from torch import SymInt, Tensor, fx

from treadle.compat.fake import FakeTensor, fake_like
from treadle.compat.operators.schemas import OpOverload, written_arguments
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import TraceInProgress, outside_modes
from treadle.graph.core.arguments import given_of, map_nodes
from treadle.graph.core.node_info import known_value, set_value, value_of


@final
@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation of a piece. ``runs``: whether it has to run to know its result."""

    node: fx.Node
    target: OpOverload
    value: FakeTensor
    runs: bool

    def result(self, values: Mapping[fx.Node, Tensor]) -> Tensor:
        """The result, for the present values of the piece's nodes."""
        if not self.runs:
            return fake_like(self.value)
        args, kwargs = given_of(self.node, lambda operand: values.get(operand, value_of(operand)))
        return self.target(*args, **kwargs)


@final
@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A part of a trace that was made for the tensors of ``inputs``."""

    inputs: tuple[fx.Node, ...]
    operations: tuple[_Operation, ...]

    def again(self, tensors: Sequence[Tensor]) -> None:
        """The piece once more, for ``tensors`` of the types that the first had."""
        trace = TraceInProgress()
        nodes = dict(zip(self.inputs, map(trace.node_of, tensors), strict=True))
        values = dict(zip(self.inputs, tensors, strict=True))
        with outside_modes():
            for operation in self.operations:
                args, kwargs = map_nodes(
                    lambda node: nodes.get(node, node), (operation.node.args, operation.node.kwargs)
                )
                call = trace.graph.create_node(
                    "call_function", operation.target, args, kwargs, operation.node.name
                )
                nodes[operation.node], values[operation.node] = call, operation.result(values)
                if operation.runs:
                    trace.track(values[operation.node], call)
                else:
                    set_value(call, values[operation.node])


def tracing_of(tensors: Sequence[Tensor]) -> Callable[[], TracedPiece | None]:
    """To be asked when a piece was traced for ``tensors``, from now on: the piece; ``None`` where
    it is one that has to be traced each time."""
    trace = TraceInProgress()
    start = len(trace.graph.nodes)
    nodes = tuple(map(trace.node_of, tensors))

    def piece() -> TracedPiece | None:
        last = islice(reversed(trace.graph.nodes), len(trace.graph.nodes) - start)
        operations = tuple(map(_operation, reversed(tuple(last))))
        known = tuple(operation for operation in operations if operation is not None)
        return TracedPiece(nodes, known) if len(known) == len(operations) else None

    return piece


def _operation(node: fx.Node) -> _Operation | None:
    """An operation with one dense result of fixed sizes; ``None`` for others."""
    value, target = known_value(node), node.target
    if not isinstance(value, FakeTensor) or not isinstance(target, OpOverload):
        return None
    key = storage_key(value)
    if key is None or any(isinstance(n, SymInt) for n in (*value.shape, *value.stride())):
        return None
    shared = any(storage_key(known_value(operand)) == key for operand in node.all_input_nodes)
    return _Operation(node, target, value, shared or bool(written_arguments(target)))
