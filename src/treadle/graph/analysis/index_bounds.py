"""Indices in the batch: found in the graph, and checked before a step runs.

Generated code and some of PyTorch's kernels read and write wherever an index points, so an index
outside a table must not reach them::

    embedding(weight, f(tokens))            0 <= f(tokens) < rows
    nll_loss(x, f(labels), ignore=-100)     0 <= f(labels) < classes, or -100
    x[f(index)]                             -n <= f(index) < n

``f`` is recomputed by PyTorch, from the inputs, without operations that only move elements. Indices
that depend on floating-point or random numbers are checked by the step itself, on CPUs: see
``capture/symbolic/branches/value_checks.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treadle.algebra.extents import surely_less
from treadle.compat.operators.operator_facts import may_wait
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.dim_maps import MOVES
from treadle.graph.core.node_info import info, known_value, tensor_of, value_of
from treadle.graph.core.operators import OpOverload, arguments, is_mutable, is_random
from treadle.graph.core.types import type_of
from treadle.graph.custom_ops.expect import expect
from treadle.targets.registry import target_for
from treadle.util.reach import reached

aten = torch.ops.aten

_ALONG_A_DIM = frozenset({
    aten.gather, aten.index_add, aten.index_copy, aten.index_fill, aten.index_select, aten.scatter,
    aten.scatter_add, aten.scatter_reduce,
})  # fmt: skip
_BY_INDICES = frozenset({
    aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put,
})  # fmt: skip
_LOSSES = frozenset({aten.nll_loss_forward, aten.nll_loss2d_forward})
_LOOKUPS = (
    _ALONG_A_DIM | _BY_INDICES | _LOSSES | {aten.embedding, aten.take, aten.multi_margin_loss}
)
"""What looks something up: of the others nobody asks the arguments."""

_PARTS = frozenset({aten.select.int, aten.slice.Tensor})
"""What gives some of the elements."""


@dataclass(frozen=True, slots=True)
class IndexBound:
    """``value`` must be in ``low..high``, or ``ignored``; ``origin`` is the user's line. Ends that
    each call decides are a ``Size``."""

    value: fx.Node
    low: int
    high: int
    ignored: int | None
    operation: str
    origin: str
    user: fx.Node


def index_bounds_in(graph: fx.Graph) -> list[IndexBound]:
    """Every check that the graph needs, each once."""
    bounds: dict[tuple[object, ...], IndexBound] = {}
    for node in graph.nodes:
        for bound in index_bounds_of(node):
            if _is_of_whole_numbers(bound.value):
                bounds.setdefault((bound.value, bound.low, bound.high, bound.ignored), bound)
    return list(bounds.values())


def unchecked_index_bounds(graph: fx.Graph) -> list[IndexBound]:
    """Those that only a run of the step can check: floating-point or random numbers decide."""
    every = [bound for node in graph.nodes for bound in index_bounds_of(node)]
    return [bound for bound in every if not _is_of_whole_numbers(bound.value)]


def index_bounds_of(node: fx.Node) -> Iterator[IndexBound]:
    """What a node looks up."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket not in _LOOKUPS:
        return
    packet, args = node.target.overloadpacket, arguments(node)
    if packet is aten.embedding:
        yield from _lookup(node, args["indices"], _extent(args["weight"], 0))
    elif packet is aten.take:
        extent = tensor_of(args["self"]).numel()
        yield from _lookup(node, args["index"], extent, wraps=True)
    elif packet is aten.multi_margin_loss:
        yield from _lookup(node, args["target"], _shape(args["self"])[-1])
    elif packet in _LOSSES:
        classes = _extent(args["self"], min(1, len(_shape(args["self"])) - 1))
        yield from _lookup(node, args["target"], classes, ignored=args["ignore_index"])
    elif packet in _ALONG_A_DIM:
        shape = _shape(args["self"])
        extent = shape[args["dim"]] if shape else 1
        yield from _lookup(node, args["index"], extent, wraps=packet is aten.index_fill)
    elif packet in _BY_INDICES:
        for dim, index in enumerate(args["indices"]):
            if index is None or tensor_of(index).dtype in (torch.bool, torch.uint8):
                continue
            yield from _lookup(node, index, _extent(args["self"], dim), wraps=True)


def _lookup(
    node: fx.Node, index: fx.Node, extent: int, *, wraps: bool = False, ignored: int | None = None
) -> Iterator[IndexBound]:
    low, name = -extent if wraps else 0, str(node.target).removesuffix(".default")
    yield IndexBound(unmoved(index), low, extent - 1, ignored, name, info(node).where, node)


def unmoved(node: fx.Node) -> fx.Node:
    """The value that ``node`` shows in another shape, as int64, or on another device."""
    while isinstance(node.target, OpOverload):
        cast = node.target is aten._to_copy.default
        to_int64 = cast and node.kwargs.get("dtype") in (None, torch.int64)
        operand = node.all_input_nodes[0] if node.all_input_nodes else node
        if node.target not in MOVES and not (to_int64 and _is_whole(operand)):
            break
        node = operand  # sizes that were declared come behind it
    return node


def implies(bound: IndexBound, other: IndexBound) -> bool:
    """Whether ``other``, of elements of the same value and constants, holds where ``bound`` does,
    for all sizes. No two of ``index_bounds_in`` imply each other::

        0 <= tokens < 61     =>     0 <= pad(tokens, -100)[:, 1:] < 61, or -100
    """
    if bound is other or bound.ignored is not None:
        return False
    if not (_at_most(other.low, bound.low) and _at_most(bound.high, other.high)):
        return False
    node = other.value
    while node is not bound.value and isinstance(node.target, OpOverload):
        given = arguments(node)
        if node.target is aten.constant_pad_nd.default:
            constant = given["value"]
            fits = _at_most(other.low, constant) and _at_most(constant, other.high)
            if constant != other.ignored and not fits:
                return False
        elif node.target not in _PARTS:
            return False
        node = unmoved(given["self"])
    return node is bound.value


def _at_most(low: int, high: int) -> bool:
    return surely_less(low, high + 1)


def _is_whole(node: fx.Node) -> bool:
    value = known_value(node)
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_of_whole_numbers(node: fx.Node) -> bool:
    """Whether nothing but integers, and no random number, decides the value."""
    for ancestor in cone_of(node):
        called = ancestor.op == "call_function" and isinstance(ancestor.target, OpOverload)
        if not _is_whole(ancestor) or is_random(ancestor) or is_mutable(ancestor):
            return False
        if ancestor.op != "placeholder" and not called:
            return False
    return True


def cone_of(node: fx.Node) -> list[fx.Node]:
    """``node`` and all that it is computed from."""
    return list(reached([node], lambda current: current.all_input_nodes))


def is_on_host(node: fx.Node) -> bool:
    """Whether what ``node`` gives can be looked at without waiting for a device."""
    return target_for(type_of(node).device).on_host


def asked_before(graph: fx.Graph, bounds: Sequence[IndexBound]) -> list[IndexBound]:
    """Those whose numbers a condition of the step speaks of as well, without looking them up:
    eager raises there, and never reaches the operation."""
    pending = [node.args[0] for node in graph.find_nodes(op="call_function", target=expect)]
    cones: list[set[fx.Node]] = []
    while pending:
        condition = pending.pop()
        if condition.target is aten.logical_and.default:
            pending.extend(condition.all_input_nodes)
        else:
            cones.append(set(cone_of(condition)))
    return [
        bound
        for bound in bounds
        if any(bound.user not in cone and cone & _inputs_of(bound.value) for cone in cones)
    ]


def _inputs_of(node: fx.Node) -> set[fx.Node]:
    return {ancestor for ancestor in cone_of(node) if ancestor.op == "placeholder"}


def _shape(node: fx.Node) -> tuple[int, ...]:
    return layout_of(value_of(node))[0]


def _extent(node: fx.Node, dim: int) -> int:
    return _shape(node)[dim]


def is_fixed(bound: IndexBound) -> bool:
    """Whether no input has a say: a range of positions, as long as the shapes make it."""
    return all(node.op != "placeholder" for node in cone_of(bound.value))


def can_be_launched(value: fx.Node) -> bool:
    """Whether what computes it is launched with what else a step launches, and can be recorded:
    nothing of it is on the host, and nothing waits."""
    for node in cone_of(value):
        if is_on_host(node):
            return False
        target = node.target
        if isinstance(target, OpOverload) and may_wait(str(target), masks=_reads_masks(node)):
            return False
    return True


def _reads_masks(node: fx.Node) -> bool:
    return any(
        tensor_of(operand).dtype in (torch.bool, torch.uint8) for operand in node.all_input_nodes
    )
