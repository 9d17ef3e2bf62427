"""Layouts for tensor cores: on a GPU, matrices of products in multiples of 16 bytes.

::

    before:  logits: bf16[16384, 50257] = mm(h, w)      w: bf16[768, 50257]
    after:   logits: bf16[16384, 50264] = mm(h, w)      w: bf16[768, 50264], zero past 50257

A product with an odd size runs several times slower than one a little larger. treadle's own buffers
are padded to whole units, filled with zeros where a factor needs them; every view and formula still
sees the value's own shape. If treadle does not control the layout of a factor, only rows are
aligned. Dynamic sizes are not padded.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from treadle.algebra.extents import Size, same, sample_of
from treadle.algebra.strides import contiguous_strides
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import known_value, tensor_of, value_of
from treadle.graph.core.signature import StepGraph
from treadle.lower.context import Layout, Layouts
from treadle.lower.library import PRODUCTS, is_chosen
from treadle.lower.operators import views
from treadle.lower.registry import rule_for
from treadle.targets.record import DeviceTarget

_BYTES = 16
_SHORTEST = 64  # elements of a row from which the padding is a small share of it
_WORK = 1 << 26  # multiplications from which a product repays filling its padding
_DTYPES = (torch.bfloat16, torch.float16)

Shape = tuple[int, ...]


def layouts_for(step: StepGraph, target: DeviceTarget) -> Layouts:
    """The layouts of factors and results of products, where it matters how rows are aligned.

    What the step returns keeps eager's layout, since users may ask for views of it.
    """
    if not target.aligned_bytes:
        return Layouts()
    return _PaddingPlanner(step).layouts()


def aligned_strides(shape: Sequence[int], dtype: torch.dtype) -> Shape:
    """Contiguous strides, with each row of the last dim rounded up to 16 bytes."""
    return contiguous_strides((*shape[:-1], _rounded(shape[-1], dtype)))


def _rounded(size: int, dtype: torch.dtype) -> int:
    unit = _BYTES // dtype.itemsize
    return -(-size // unit) * unit


@dataclass
class _PaddingPlanner:
    step: StepGraph
    extents: dict[fx.Node, Shape] = field(default_factory=dict[fx.Node, Shape])
    factors: dict[fx.Node, tuple[Shape, Shape]] = field(
        default_factory=dict[fx.Node, tuple[Shape, Shape]]
    )

    def __post_init__(self) -> None:
        self._returned = {_source(node) for node, _ in self.step.outputs() if node is not None}

    def layouts(self) -> Layouts:
        nodes = [n for n in self.step.graph.nodes if n.op == "call_function"]
        products = [node for node in nodes if node.target in PRODUCTS]
        for node in products:
            for source in map(_source, (node, *node.all_input_nodes)):
                if self._is_ours(source) and _is_unaligned(source):
                    self.extents.setdefault(source, _shape(source))
        for node in products:
            if node.target is torch.ops.aten.mm.default and tensor_of(node).dtype in _DTYPES:
                self._pad(node)
        made = {
            node: Layout(aligned_strides(extents, tensor_of(node).dtype), extents)
            for node, extents in self.extents.items()
        }
        return Layouts(made, self.factors)

    def _pad(self, node: fx.Node) -> None:
        """Room for whole units in every dim of ``mm(left, right)``, if all of it is ours."""
        left, right = node.args
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        (m, k), n = _shape(left), _shape(right)[1]
        dtype = tensor_of(node).dtype
        rooms = [size if isinstance(size, Size) else _rounded(size, dtype) for size in (m, k, n)]
        is_padded = [not same(size, room) for size, room in zip((m, k, n), rooms, strict=True)]
        if math.prod(map(sample_of, (m, k, n))) < _WORK or not any(is_padded):
            return
        ends = (((left, 0), (node, 0)), ((left, 1), (right, 0)), ((right, 1), (node, 1)))
        wanted: list[tuple[fx.Node, int, int]] = []
        for room, both in itertools.compress(zip(rooms, ends, strict=True), is_padded):
            for operand, dim in both:
                found = self._place(operand, dim)
                if found is None:
                    return
                wanted.append((*found, room))
        for source, dim, room in wanted:
            old = self.extents.get(source, _shape(source))
            self.extents[source] = (*old[:dim], room, *old[dim + 1 :])
        rows, inner, columns = rooms
        self.factors[node] = ((rows, inner), (inner, columns))

    def _place(self, operand: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
        """The node and dim whose room gives ``operand`` room in ``dim``."""
        source = _source(operand)
        if not self._is_ours(source):
            return None
        value, base = value_of(operand), value_of(source)
        if value.numel() != base.numel():
            return None
        for at in {base.ndim - 1} | ({0} if base.ndim == 2 else set()):
            if value.stride(dim) == base.stride(at) and value.shape[dim] == base.shape[at]:
                return source, at
        return None

    def _is_ours(self, node: fx.Node) -> bool:
        """Whether the node fills a matrix in a buffer of ours, laid out as we like."""
        target, value = node.target, known_value(node)
        if not isinstance(target, OpOverload) or not isinstance(value, torch.Tensor):
            return False
        made = target in PRODUCTS or (not is_chosen(target) and rule_for(target) is not None)
        return (
            made
            and node not in self._returned
            and value.dtype in _DTYPES
            and value.ndim >= 2
            and value.is_contiguous()
        )


def _is_unaligned(node: fx.Node) -> bool:
    """Whether rows of a fixed length are not whole units. Dynamic lengths do not count: whether
    they need room differs from call to call."""
    length = _shape(node)[-1]
    fixed = not isinstance(length, Size)
    return fixed and length >= _SHORTEST and length != _rounded(length, tensor_of(node).dtype)


def _shape(node: fx.Node) -> Shape:
    """The sizes, with a ``Size`` for each that is dynamic."""
    return layout_of(tensor_of(node))[0]


def _source(node: fx.Node) -> fx.Node:
    """The node whose buffer a view reads; itself if it is not a view."""
    while node.target in views.VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
