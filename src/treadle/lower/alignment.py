"""Rows of matrices on a GPU start at multiples of 16 bytes.

::

    before:  logits: bf16[16384, 50257], strides (50257, 1)      every row at another alignment
    after:   logits: bf16[16384, 50257], strides (50264, 1)      products load 16 bytes at a time

Products with unaligned rows run several times slower on tensor cores. Only the layout of buffers
of ours changes: views, formulas and out-variants read strides, so nothing is padded or copied.
"""

from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from treadle.graph.signature import StepGraph
from treadle.lower import views
from treadle.lower.calls import CHOSEN, OUT_VARIANTS
from treadle.lower.registry import rule_for
from treadle.lower.site import contiguous_strides

_BYTES = 16
_SHORTEST = 64  # elements of a row from which the padding is a small share of it
_DTYPES = (torch.bfloat16, torch.float16)


def aligned_strides(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Contiguous strides, with each row of the last dim rounded up to 16 bytes."""
    unit = _BYTES // dtype.itemsize
    return contiguous_strides((*shape[:-1], -(-shape[-1] // unit) * unit))


def rows_to_align(step: StepGraph, device: str) -> frozenset[fx.Node]:
    """Nodes whose buffers get ``aligned_strides``: factors and results of products on a GPU.

    What the step returns keeps eager's layout, since users may ask for views of it.
    """
    if not device.startswith("cuda"):
        return frozenset()
    returned = {_source(node) for node, _ in step.outputs() if node is not None}
    found: set[fx.Node] = set()
    for node in step.graph.nodes:
        if node.op == "call_function" and node.target in OUT_VARIANTS:
            for each in (node, *node.all_input_nodes):
                source = _source(each)
                if _is_movable(source) and source not in returned:
                    found.add(source)
    return frozenset(found)


def _source(node: fx.Node) -> fx.Node:
    """The node whose buffer a view reads; itself if it is no view."""
    while node.target in views.VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_movable(node: fx.Node) -> bool:
    """Whether the node fills a buffer of ours, whose rows are long and unaligned."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    ours = target in OUT_VARIANTS or (target not in CHOSEN and rule_for(target) is not None)
    if not ours or value.dtype not in _DTYPES or value.ndim < 2:
        return False
    unaligned = value.shape[-1] * value.dtype.itemsize % _BYTES != 0
    return unaligned and value.shape[-1] >= _SHORTEST and value.is_contiguous()
