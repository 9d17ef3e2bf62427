"""Attention masks in a graph from Dynamo, in the layout that PyTorch's fused GPU kernels accept.

::

    before:  scaled_dot_product_attention(q, k, v, mask)     mask: [B, H, T, S], one number a row
    after:   rows = mask[...].contiguous().expand_as(mask)   each dim that is expanded stays so,
             scaled_dot_product_attention(q, k, v, rows)     but the last

No fused kernel accepts a mask whose last dim has a stride other than one: PyTorch then computes
attention by its definition, in 32 bits, with all its weights in memory. A mask of ones that a
library creates for a traced model, but not in eager, is often a single expanded number or row.
"""

from torch import Tensor, fx
from torch.nn import functional as F

from treadle.compat.dynamo import copy_stack, traced_value
from treadle.graph.core.arguments import Argument
from treadle.targets.registry import target_for


def lay_out_masks(module: fx.GraphModule) -> int:
    """Give masks of attention on GPUs a last dim that lies in order; how many there were."""
    graph = module.graph
    calls = graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    laid_out: dict[fx.Node, fx.Node] = {}
    for call in calls:
        mask = _mask_of(call)
        if mask is None or not _is_scattered(traced_value(mask)):
            continue
        if mask not in laid_out:
            laid_out[mask] = _in_order(graph, call, mask)
        call.replace_input_with(mask, laid_out[mask])
    if laid_out:
        module.recompile()
    return len(laid_out)


def _mask_of(call: fx.Node) -> fx.Node | None:
    mask = call.args[3] if len(call.args) > 3 else call.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _is_scattered(mask: object) -> bool:
    """Whether the elements of a row do not lie one after the other."""
    if not isinstance(mask, Tensor) or not mask.ndim or target_for(mask.device).on_host:
        return False
    return mask.stride(-1) != 1 and mask.shape[-1] != 1


def _in_order(graph: fx.Graph, call: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask with the elements of a row in order, before its first ``call``."""
    value, node = traced_value(mask), mask
    assert isinstance(value, Tensor)
    layout = zip(value.shape[:-1], value.stride()[:-1], strict=True)
    expanded = [dim for dim, (size, stride) in enumerate(layout) if stride == 0 and size > 1]
    with graph.inserting_before(call):
        for dim in expanded:
            node = _method(graph, call, "narrow", node, dim, 0, 1)
        node = _method(graph, call, "contiguous", node)
        return _method(graph, call, "expand_as", node, mask)


def _method(graph: fx.Graph, call: fx.Node, name: str, *args: Argument) -> fx.Node:
    node = graph.call_method(name, args)
    copy_stack(node, call)
    return node
