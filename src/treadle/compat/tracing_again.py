"""A piece of the trace in progress, put there once more for other tensors without being traced.

::

    traced:   d = detach(p1);  m = mul(d, keep);  c = copy_(p1, m)     the piece, for p1
    again:    d2 = detach(p2); m2 = mul(d2, keep); c2 = copy_(p2, m2)  the same for p2

An operation is a node of the graph, a proxy, and a run on fake tensors, which tells the type of its
result. Of a piece that was traced for tensors of the same types the results are known: what is new
is the node, and fake memory where a result has memory of its own. Operations that write, or whose
results share memory with what they are given, run on fake tensors: so views and versions are right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from treadle.compat.operators import written_arguments
from treadle.compat.tensors import storage_key


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """One operation of a piece. ``runs``: whether it has to run to know its result; ``writes``:
    whether its result is the tensor that it wrote to."""

    node: fx.Node
    value: FakeTensor
    runs: bool
    writes: bool


@final
@dataclass(frozen=True, slots=True)
class TracedPiece:
    """What was traced for the tensors that ``given`` stood for."""

    given: tuple[fx.Node, ...]
    steps: tuple[_Step, ...]

    def again(self, tensors: Sequence[Tensor]) -> None:
        """The piece once more, for ``tensors`` of the types that the first had."""
        tracer = _mode().tracer
        nodes = dict(zip(self.given, map(_node_of, tensors), strict=True))
        values = dict(zip(self.given, tensors, strict=True))
        with _disable_current_modes():
            for step in self.steps:
                args, kwargs = _mapped(step.node, lambda each: nodes.get(each, each))
                made = tracer.graph.create_node(
                    "call_function", step.node.target, args, kwargs, step.node.name
                )
                nodes[step.node] = made
                values[step.node] = value = self._value(step, values)
                if step.runs:
                    track_tensor_tree(value, tracer.proxy(made), constant=None, tracer=tracer)
                else:
                    made.meta["val"] = value

    def _value(self, step: _Step, values: dict[fx.Node, Tensor]) -> Tensor:
        """The result of ``step`` for what the nodes of the piece stand for now."""
        if not step.runs:
            return _like(step.value)
        args, kwargs = _mapped(step.node, lambda each: values.get(each, each.meta["val"]))
        return step.node.target(*args, **kwargs)  # type: ignore[operator]


def tracing_of(tensors: Sequence[Tensor]) -> Callable[[], TracedPiece | None]:
    """To be asked when a piece was traced for ``tensors``, from now on: the piece; ``None`` where
    it is one that has to be traced each time."""
    graph = _mode().tracer.graph
    start = len(graph.nodes)
    given = tuple(map(_node_of, tensors))

    def piece() -> TracedPiece | None:
        last = islice(reversed(graph.nodes), len(graph.nodes) - start)
        steps = tuple(map(_step, reversed(tuple(last))))
        known = tuple(each for each in steps if each is not None)
        return TracedPiece(given, known) if len(known) == len(steps) else None

    return piece


def _mode() -> ProxyTorchDispatchMode:
    mode = get_proxy_mode()
    assert mode is not None, "outside of a trace"
    return mode


def _node_of(tensor: Tensor) -> fx.Node:
    found: Any = get_proxy_slot(tensor, _mode().tracer)
    return found.proxy.node


def _step(node: fx.Node) -> _Step | None:
    """An operation with one dense result of fixed sizes; ``None`` for others."""
    value = node.meta.get("val")
    target = node.target
    if not isinstance(value, FakeTensor) or not isinstance(target, OpOverload):
        return None
    key = storage_key(value)
    if key is None or any(isinstance(n, SymInt) for n in (*value.shape, *value.stride())):
        return None
    writes = bool(written_arguments(target))
    shared = any(storage_key(each.meta.get("val")) == key for each in node.all_input_nodes)
    return _Step(node, value, writes or shared, writes)


def _mapped(node: fx.Node, of: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: Any = map_arg(node.args, of)
    kwargs: Any = map_arg(node.kwargs, of)
    return args, kwargs


def _like(value: FakeTensor) -> Tensor:
    """A fake tensor of the same type, in memory of its own."""
    plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, plain, value.device)


__all__ = ["TracedPiece", "tracing_of"]
