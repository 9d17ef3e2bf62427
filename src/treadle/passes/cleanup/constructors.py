"""Values that are made only from numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from treadle.algebra.extents import Size
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import TensorType, type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.filled import as_element, number_everywhere
from treadle.graph.rewrite.node_rewrite import NodeRewrite
from treadle.graph.rewrite.passes import Contract
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten


@dataclass(frozen=True)
class CountConstants(NodeRewrite[tuple[fx.Node, int | float]]):
    """Running sums of a constant are its multiples.

    before:  f = full([3, 4], 2); s = cumsum(f, 1)
    after:   a = arange(1, 5); m = mul(a, 2); v = view(m, [1, 4]); e = expand(v, [3, 4])
             s = clone(e)

    A formula instead of a call, and nothing is read. Integers are summed in int64 where eager
    does, and wrap where it wraps. Of floating-point numbers only where every multiple is one that
    its dtype has: then every order of summing gives the same bits.
    """

    contract = Contract()

    def find(self, node: fx.Node) -> tuple[fx.Node, int | float]:
        return node, _counted(node)

    def replace(self, found: tuple[fx.Node, int | float]) -> Iterable[fx.Node]:
        return [_count(*found)]


def _counted(node: fx.Node) -> int | float:
    """The number that ``node`` sums, in its own dtype."""
    require(node.target is aten.cumsum.default, NoMatch, f"{node} is not a running sum")
    args, result = arguments(node), type_of(node)
    number = number_everywhere(args["self"])
    require(number is not None, NoMatch, f"{args['self']} is not one number everywhere")
    require(result.ndim > 0, NoMatch, f"{node} has no dims")
    static = not any(isinstance(size, Size) for size in result.shape)
    require(static, NoMatch, f"{node} has dynamic sizes")
    exact = not isinstance(number, complex) and not result.dtype.is_complex
    exact = exact and result.dtype is not torch.bool
    require(exact, NoMatch, f"{node} is {result}")
    assert isinstance(number, int | float)
    count = result.shape[args["dim"] % result.ndim]
    if result.dtype.is_floating_point:
        return _exact_multiple(number, count, result)
    require(math.isfinite(number), NoMatch, f"{number} is not an integer")
    limits = torch.iinfo(result.dtype)
    for whole in (count + 1, int(number)):
        fits = limits.min <= whole <= limits.max
        require(fits, NoMatch, f"{result.dtype} has no {whole}")
    return int(number)


def _exact_multiple(number: float, count: int, result: TensorType) -> float:
    number = float(as_element(number, result.dtype).real)
    negative_zero = number == 0 and math.copysign(1.0, number) < 0
    require(not negative_zero, NoMatch, "the sum of -0.0 may be 0.0")
    require(math.isfinite(number), NoMatch, f"{number} is not finite")
    limits = torch.finfo(result.dtype)
    most = round(2 / limits.eps)  # up to here integers are exact
    top, _ = number.as_integer_ratio()
    while top and top % 2 == 0:
        top //= 2
    fits = abs(top) * count <= most and count <= most and abs(number) * count <= limits.max
    require(fits, NoMatch, f"sums of {count} times {number} round in {result.dtype}")
    return number


def _count(node: fx.Node, number: float) -> fx.Node:
    args, result = arguments(node), type_of(node)
    dim = args["dim"] % result.ndim
    count = result.shape[dim]
    flat = [count if index == dim else 1 for index in range(result.ndim)]
    build = ReplacementBuilder(node)
    kind = {"dtype": result.dtype, "device": result.device}
    new = build.call(aten.arange.start, 1, count + 1, **kind)
    if number != 1:
        new = build.call(aten.mul.Tensor, new, number)
    if result.ndim > 1:
        new = build.call(aten.view.default, new, flat)
        new = build.call(aten.expand.default, new, list(result.shape))
        new = build.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new
