"""Requirements of PyTorch's CPU kernels on values: assumed, and checked by each call.

::

    binary_cross_entropy(x, y)      expect(all(0 <= x <= 1)); expect(all(0 <= y <= 1))
    n // d, n % d                   expect(all(d != 0))          of integers
    table[(x * 10).long()]          expect(all(-rows <= i < rows))

A call that violates one has changed nothing and runs in eager, which raises its own error. On a GPU
nothing is checked: PyTorch's kernels there stop the device or continue, and so do treadle's.
Integer indices of the batch are checked before the step, by ``graph/analysis/index_bounds.py``;
those that their own operations bound, as ``argmax`` does, are not checked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import SymInt, Tensor, fx
from torch.nn import functional as F

from treadle.capture.symbolic.numbers import Number
from treadle.graph.analysis.index_bounds import IndexBound, unchecked_index_bounds, unmoved
from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import copy_notes, info, known_value, set_value, tensor_of
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.custom_ops.expect import expect
from treadle.targets.registry import target_for

aten = torch.ops.aten
Range = tuple[float, float]

_UNSAFE = (aten._unsafe_index.Tensor, aten._unsafe_index_put.default)
_DIVIDES = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})


def require_values(graph: fx.Graph) -> None:
    """An ``expect`` in front of each operation whose operands could be refused, up to the first
    update: what is written by that would have to wait. ``graph`` is functional."""
    bounds: dict[fx.Node, list[IndexBound]] = {}
    for bound in unchecked_index_bounds(graph):
        bounds.setdefault(bound.user, []).append(bound)
    seen: set[tuple[object, ...]] = set()
    for node in list(graph.nodes):
        if info(node).phase == "optimizer":
            return
        if not isinstance(node.target, OpOverload) or not _is_on_host(node):
            continue
        for key, write in [*_of_index_bounds(bounds.get(node, ())), *_of_operands(node)]:
            if key not in seen:
                seen.add(key)
                with graph.inserting_before(node):
                    holds = write(_Writer(graph, node))
                    _Writer(graph, node).call(expect, holds)


Requirement = tuple[tuple[object, ...], Callable[["_Writer"], fx.Node]]
"""What is required, and how it is written into the graph."""


def _of_index_bounds(unproved: Iterable[IndexBound]) -> Iterator[Requirement]:
    for bound in unproved:
        if bound.user.target in _UNSAFE:
            continue  # PyTorch's own, made to fit
        low, high, bounds = bound.low, bound.high, range_of(bound.value)
        if type(low) is not int or type(high) is not int:
            continue  # of declared sizes
        if bounds is None or bounds[0] < low or bounds[1] > high:
            yield (bound.value, low, high), lambda to, e=bound: to.inside(e.value, e.low, e.high, e)


def _of_operands(node: fx.Node) -> Iterator[Requirement]:
    packet, operands = node.target.overloadpacket, arguments(node)  # type: ignore[union-attr]
    if packet is aten.binary_cross_entropy:
        for name in ("self", "target"):
            value = operands[name]
            bounds = range_of(value)
            if bounds is not None and bounds[0] >= 0 and bounds[1] <= 1:
                continue
            yield (value, 0, 1), lambda to, x=value: to.inside(x, 0, 1)
    elif packet in _DIVIDES and _is_whole(node):
        divisor = operands["other"]
        size = _value(divisor)
        if isinstance(size, SymInt):  # asked of the sample, and guarded
            divisor = 1 if size != 0 else 0
        if isinstance(divisor, fx.Node):
            yield (divisor, "no zero"), lambda to: to.all(to.call(aten.ne.Scalar, divisor, 0))
        elif divisor == 0:
            yield (node, "never"), lambda to: to.never(operands["self"])


class _Writer:
    """Writes conditions in front of an operation, with its notes."""

    def __init__(self, graph: fx.Graph, user: fx.Node) -> None:
        self._graph, self._user = graph, user

    def call(self, target: OpOverload, *args: Argument) -> fx.Node:
        node = self._graph.call_function(target, args)
        copy_notes(node, self._user)
        set_value(node, target(*(_value(arg) for arg in args)))
        return node

    def all(self, flags: fx.Node) -> fx.Node:
        return self.call(aten.all.default, flags)

    def inside(self, value: fx.Node, low: int, high: int, of: IndexBound | None = None) -> fx.Node:
        above = self.call(aten.ge.Scalar, value, low)
        flags = self.call(aten.logical_and.default, above, self.call(aten.le.Scalar, value, high))
        if of is not None and of.ignored is not None:
            spared = self.call(aten.eq.Scalar, value, of.ignored)
            flags = self.call(aten.logical_or.default, flags, spared)
        return self.all(flags)

    def never(self, value: fx.Node) -> fx.Node:
        """True where there is nothing to divide."""
        return self.all(self.call(aten.ne.Tensor, value, value))


def one_hot(
    require: Callable[[Tensor], None],
    item: Callable[[Tensor], Number],
    input: Tensor,
    num_classes: int = -1,
) -> Tensor:
    """``F.one_hot``, whose classes are looked at as eager looks at them."""
    if type(num_classes) is int and num_classes == -1 and input.numel():
        num_classes = int(item(input.max()).plain()) + 1
    encoded = F.one_hot(input, num_classes)
    if type(num_classes) is int and num_classes > 0 and target_for(input.device).on_host:
        require(((input >= 0) & (input < num_classes)).all())
    return encoded


def _value(argument: object) -> object:
    return known_value(argument) if isinstance(argument, fx.Node) else argument


def _is_whole(node: fx.Node) -> bool:
    value = known_value(node)
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_on_host(node: fx.Node) -> bool:
    value = known_value(node)
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, Tensor) and target_for(first.device).on_host


# -- between which numbers an integer is, as far as operations say

_FILLED: dict[object, Range | None] = {
    aten.full: None, aten.full_like: None, aten.new_full: None,
    aten.ones: (1, 1), aten.ones_like: (1, 1), aten.new_ones: (1, 1),
    aten.zeros: (0, 0), aten.zeros_like: (0, 0), aten.new_zeros: (0, 0),
}  # fmt: skip
_PLACES = frozenset({aten.argmax, aten.argmin})
_PLACES_BESIDE = frozenset({
    aten.sort, aten.topk, aten.max, aten.min, aten.median, aten.nanmedian, aten.mode,
    aten.kthvalue, aten.cummax, aten.cummin,
})  # fmt: skip
_KEEPS = frozenset({
    aten.select, aten.slice, aten.index_select, aten.gather, aten.index, aten.flip, aten.roll,
    aten.split, aten.unbind, aten.diagonal, aten.narrow, aten.contiguous,
})  # fmt: skip
"""The result has some of the numbers of the first operand."""


def range_of(node: Argument) -> Range | None:
    """The least and the greatest number that may be in a value; ``None``: any, or NaN."""
    if type(node) is int or type(node) is float:
        return node, node
    if not isinstance(node, fx.Node):
        return None
    node = unmoved(node)
    value = known_value(node)
    if isinstance(value, Tensor) and value.dtype is torch.bool:
        return 0, 1
    if not isinstance(node.target, OpOverload):
        return _of_part(node)
    return _of_operation(node, node.target.overloadpacket)


def _of_part(node: fx.Node) -> Range | None:
    """One of several results."""
    if node.op != "call_function" or len(node.args) != 2:
        return None
    parent, at = node.args
    if not isinstance(parent, fx.Node) or not isinstance(parent.target, OpOverload):
        return None
    packet, operands = parent.target.overloadpacket, arguments(parent)
    if packet in _PLACES_BESIDE and at == 1:
        shape = tensor_of(operands["self"]).shape
        return _below(shape[operands["dim"]] if shape and "dim" in operands else 1)
    return range_of(operands["self"]) if packet in _KEEPS else None


def _of_operation(node: fx.Node, packet: object) -> Range | None:
    operands = arguments(node)
    if packet in _FILLED:
        return range_of(operands["fill_value"]) if "fill_value" in operands else _FILLED[packet]
    if packet in _PLACES:
        operand = tensor_of(operands["self"])
        dim = operands["dim"]
        return _below(operand.numel() if dim is None else (*operand.shape, 1)[dim])
    if packet is aten.multinomial:
        return _below(tensor_of(operands["self"]).shape[-1])
    if packet is aten.randperm:
        return _below(operands["n"])
    if packet is aten.randint:
        last = _below(operands["high"])
        return None if last is None else (operands.get("low", 0), last[1])
    if packet in (aten.bucketize, aten.searchsorted):
        edges = operands["boundaries" if packet is aten.bucketize else "sorted_sequence"]
        return 0, tensor_of(edges).shape[-1]
    if packet is aten.nonzero:
        return _below(max(tensor_of(operands["self"]).shape, default=1))
    if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
        return _clamped(operands)
    if packet is aten._to_copy and not _is_whole(node.all_input_nodes[0]):
        return None
    if packet in _KEEPS or packet is aten._to_copy:
        return range_of(operands["self"])
    return None


def _clamped(operands: Mapping[str, Argument]) -> Range | None:
    low, high = operands.get("min"), operands.get("max")
    inner = range_of(operands["self"])
    low = low if type(low) is int else None if inner is None else inner[0]
    high = high if type(high) is int else None if inner is None else inner[1]
    return None if low is None or high is None else (low, high)


def _below(extent: object) -> Range | None:
    return (0, extent - 1) if type(extent) is int else None
