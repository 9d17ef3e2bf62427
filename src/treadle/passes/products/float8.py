"""Products of float8 numbers, which GPUs multiply twice as fast as half precision.

A factor is divided by the scale that makes its largest number the largest of float8, and rounded::

    s = max(abs(x)) / 448        q = float8(x / s)        x @ y  ~  (q_x @ q_y) * (s_x * s_y)

A scale for each matrix, e4m3 for activations and weights, which has more digits, and e5m2 for
gradients, which has a wider range: Micikevicius et al., "FP8 Formats for Deep Learning" (2022),
sections 2 and 3. The scale is found from the numbers of the matrix in this very step.

Hopper multiplies rows of the left factor by columns of the right one that both lie in memory one
number after another. What a forward product reads so, its gradients read the other way: such a
factor has a copy in float8, transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from treadle.algebra.extents import divides, sample_of
from treadle.graph.core.dim_maps import RESHAPES, SWAPS
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import TensorType, type_of
from treadle.graph.custom_ops.float8 import TO_FLOAT8
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.targets.model import FLOAT8, DeviceModel
from treadle.util.reach import reached

aten = torch.ops.aten

E4M3, E5M2 = FLOAT8
_LEAST = 1e-12
"""A matrix whose numbers are all smaller is scaled as if this were its largest."""
_UNIT = 16
"""Of each size of a product, for cuBLASLt."""
_HALVES = (torch.bfloat16, torch.float16)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_FACTORS = slice(-2, None)
_PASSED = frozenset({*RESHAPES, *SWAPS, aten._to_copy.default, aten.slice.Tensor})
"""What logits go through on their way to a loss, and weights on their way to a product."""
_LOSSES = frozenset({aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default})
_MOVED = 3.5
"""Bytes that a product moves for each number of a factor in half precision: two products share what
reads it for its scale (2), reads and rounds it (3), and transposes it (2)."""


def multiplies_float8(device: DeviceModel) -> bool:
    """Whether a device has products of float8."""
    return E4M3 in device.flops


@dataclass(frozen=True)
class MultiplyInFloat8(GraphPass):
    """Multiply float8 numbers where that is estimated to be faster than half precision.

    before:  y = mm(x, t(w))                                        x: bf16[m, k], w: bf16[n, k]
    after:   a = amax(abs(x)) / 448; q = to_float8(x, a, f8e4m3); b = ..., p = ... of w
             y = _scaled_mm(q, t(p), a, b, out_dtype=bf16)

    Each number of a factor is off by up to 1/16 of itself (gradients 1/8), and by more where it is
    less than 1/28,000 of the largest. A factor that is not finite gives NaN. All sizes are
    multiples of 16. Products of logits, and their gradients, keep half precision: the loss takes
    their exponentials. ``device``: for which times are estimated; without one all products that can
    be are in float8.
    """

    contract = Contract()

    device: DeviceModel | None = None

    def __repr__(self) -> str:
        return type(self).__name__

    def run(self, step: StepGraph) -> int:
        products = [node for node in step.graph.nodes if _can_be(node)]
        of_logits = _of_logits(step, products)
        products = [node for node in products if node not in of_logits]
        chosen = self._chosen(products)
        writer = _Writer()
        for node in products:
            if node in chosen:
                writer.write(node)
        return len(chosen)

    def _chosen(self, products: Sequence[fx.Node]) -> set[fx.Node]:
        """Those that gain by themselves, and those that gain since others read their factors."""
        chosen = {node for node in products if self._gains(node, frozenset())}
        scaled = frozenset(_matrix(each) for node in chosen for each in _factors(node))
        return chosen | {node for node in products if self._gains(node, scaled)}

    def _gains(self, node: fx.Node, scaled: frozenset[fx.Node]) -> bool:
        """``scaled``: matrices that are in float8 anyway."""
        if self.device is None:
            return True
        left, right = _factors(node)
        (m, k), n = map(sample_of, type_of(left).shape), sample_of(type_of(right).shape[1])
        half, eight = self.device.rate(type_of(left).dtype), self.device.rate(E4M3)
        saved = 2 * m * k * n * (1 / half - 1 / eight)
        new = [each for each in (left, right) if _matrix(each) not in scaled]
        moved = _MOVED * sum(sample_of(type_of(each).numel) for each in new)
        return saved > moved / self.device.bandwidth


def _can_be(node: fx.Node) -> bool:
    """Whether the library has the product in float8."""
    if node.target not in _PRODUCTS:
        return False
    result = type_of(node)
    left, right = map(type_of, _factors(node))
    sizes = (*left.shape, right.shape[1])
    if result.dtype not in _HALVES or left.dtype is not result.dtype:
        return False
    return all(divides(_UNIT, size) for size in sizes) and _has_plain_bias(node, result)


def _has_plain_bias(node: fx.Node, result: TensorType) -> bool:
    """Whether what an ``addmm`` adds is a row."""
    if node.target is aten.mm.default:
        return True
    given = arguments(node)
    bias = type_of(given["self"])
    is_row = bias.shape == result.shape[1:] and bias.dtype is result.dtype
    return is_row and given.get("beta", 1) == 1 and given.get("alpha", 1) == 1


def _of_logits(step: StepGraph, products: list[fx.Node]) -> set[fx.Node]:
    """The products that logits are, and those of their gradients: with the same weights, and with
    what is multiplied by these backward."""
    losses = [node for node in step.graph.nodes if node.target in _LOSSES]
    logits = reached(losses, lambda node: _through(node, first=node in losses))
    ends = {node for node in products if node in logits}
    weights = {_root(node.args[-1]) for node in ends}
    found = {node for node in products if weights & {_root(each) for each in _factors(node)}}
    gradients = {_root(each) for node in found - ends for each in _factors(node)} - weights
    return found | {
        node for node in products if gradients & {_root(each) for each in _factors(node)}
    }


def _through(node: fx.Node, *, first: bool) -> list[fx.Node]:
    return node.all_input_nodes[:1] if first or node.target in _PASSED else []


def _factors(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.args[_FACTORS] if isinstance(each, fx.Node)]


def _root(node: object) -> fx.Node:
    """What a factor is made of by views and conversions."""
    assert isinstance(node, fx.Node), node
    while node.target in _PASSED:
        node = node.all_input_nodes[0]
    return node


@dataclass
class _Writer:
    """Writes products, from first to last: what one has made of a matrix the next ones read."""

    scaled: dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, fx.Node]] = field(
        default_factory=dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, fx.Node]]
    )
    turned: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def write(self, node: fx.Node) -> None:
        """Put a product of float8 in the place of ``node``."""
        build, (left, right) = ReplacementBuilder(node), _factors(node)
        dtypes = [_dtype_of(_matrix(each)) for each in (left, right)]
        if dtypes == [E5M2, E5M2]:  # the library has no product of two such factors
            dtypes = [E4M3, E5M2]
        q, a = self._quantised(build, left, dtypes[0], by_rows=True)
        p, b = self._quantised(build, right, dtypes[1], by_rows=False)
        bias = None if node.target is aten.mm.default else node.args[0]
        result, fast = type_of(node).dtype, info(node).phase == "forward"
        scaled_mm = aten._scaled_mm.default
        product = build.call(scaled_mm, q, p, a, b, bias, None, result, fast)
        node.replace_all_uses_with(product)
        node.graph.erase_node(node)
        for factor in {left, right}:
            if factor.target in SWAPS and not factor.users:
                factor.graph.erase_node(factor)

    def _quantised(
        self, build: ReplacementBuilder, factor: fx.Node, dtype: torch.dtype, *, by_rows: bool
    ) -> tuple[fx.Node, fx.Node]:
        """A factor in float8, with the numbers of a row (or of a column) beside each other, and its
        scale."""
        matrix = _matrix(factor)
        if (matrix, dtype) not in self.scaled:
            self.scaled[matrix, dtype] = _scaled(build, matrix, dtype)
        q, scale = self.scaled[matrix, dtype]
        if (matrix is not factor) == by_rows:
            if q not in self.turned:
                self.turned[q] = build.dense(build.call(aten.t.default, q))
            q = self.turned[q]
        return (q if by_rows else build.call(aten.t.default, q)), scale


def _scaled(
    build: ReplacementBuilder, matrix: fx.Node, dtype: torch.dtype
) -> tuple[fx.Node, fx.Node]:
    """A matrix in float8, in row-major order, and its scale."""
    largest = build.call(aten.amax.default, build.call(aten.abs.default, matrix), [0, 1])
    largest = build.call(aten.clamp_min.default, build.converted(largest, torch.float32), _LEAST)
    scale = build.call(aten.mul.Tensor, largest, 1 / torch.finfo(dtype).max)
    return build.dense(build.call(TO_FLOAT8.op, matrix, scale, dtype)), scale


def _matrix(factor: fx.Node) -> fx.Node:
    """The matrix that a factor is, or is the transpose of, whose rows lie in memory one after
    another."""
    if not type_of(factor).is_contiguous and factor.target in SWAPS:
        (matrix,) = factor.all_input_nodes
        if type_of(matrix).is_contiguous:
            return matrix
    return factor


def _dtype_of(matrix: fx.Node) -> torch.dtype:
    """Gradients are what the backward pass computes, and does not compute again."""
    known = info(matrix)
    again = known.recomputed or known.region is not None
    return E5M2 if known.phase == "backward" and not again else E4M3
