"""What a node costs: its class, floating-point operations, bytes moved, and seconds on a device."""

import enum
import operator
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from treadle.compat.operators.operator_facts import MATTERS, CostClass, Effect, facts_of
from treadle.compat.operators.schemas import schema_of
from treadle.graph.analysis.alias import storages
from treadle.graph.core.arguments import given_of
from treadle.graph.core.node_info import info, value_of
from treadle.graph.core.operators import OpOverload, arguments, effects_of
from treadle.graph.core.types import is_tensor, tensors_in, type_of
from treadle.targets.model import DeviceModel


class Kind(enum.StrEnum):
    """How a value comes about, as far as its memory and time are concerned."""

    INPUT = "input"  # a placeholder or a constant: alive all the time
    VIEW = "view"  # the bytes of its operand, or one result of several
    RANDOM = "random"
    POINTWISE = CostClass.POINTWISE.value
    REDUCTION = CostClass.REDUCTION.value
    PRODUCT = CostClass.PRODUCT.value
    LIBRARY = CostClass.LIBRARY.value


FUSIBLE = frozenset(Kind(cost_class) for cost_class in CostClass if not cost_class.is_expensive)
CALLS = frozenset(
    {*(Kind(cost_class) for cost_class in CostClass if cost_class.is_expensive), Kind.RANDOM}
)
"""Kernels that are not ours: nothing is fused across them."""


def kind_of(node: fx.Node) -> Kind:
    """The class of a node that is not the output."""
    if node.op != "call_function":
        return Kind.INPUT
    if node.target is operator.getitem:
        return Kind.VIEW
    effects = effects_of(node)
    if Effect.DRAWS in effects:
        return Kind.RANDOM
    if effects & MATTERS or not isinstance(node.target, OpOverload):
        return Kind.LIBRARY
    facts = facts_of(node.target)
    if not facts.allocates and _shows_first_operand(node):
        return Kind.VIEW
    return Kind(facts.cost)


def _shows_first_operand(node: fx.Node) -> bool:
    """Whether all results are memory of the first operand's."""
    held, sources = storages(value_of(node)), node.all_input_nodes
    return bool(held and sources) and held <= storages(value_of(sources[0]))


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of a product; 0 for everything else."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    name = schema_of(node.target).name
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None and facts_of(node.target).cost is not CostClass.PRODUCT:
        return 0.0
    call_args = arguments(node)
    if {"query", "key", "value"} <= call_args.keys() and type_of(call_args["query"]).ndim == 4:
        heads_first = name.startswith("aten::_scaled_dot_product")
        return _attention_flops(call_args, -2 if heads_first else -3)
    if name.endswith("grouped_mm"):
        return _grouped_flops(call_args)
    if formula is None:
        return 0.0
    args, kwargs = given_of(node, value_of)
    return float(formula(*args, **kwargs, out_val=value_of(node)))


def _attention_flops(args: Mapping[str, Any], tokens: int) -> float:
    """Of a call of attention or of its gradients, which make the scores again; ``tokens``: the dim
    of the positions. There are as many heads as queries have: PyTorch 2.11's formulas refuse
    fewer of keys and values. A window that is open on one side counts as none."""
    *rows, head = type_of(args["query"]).shape
    keys, values = (type_of(args[name]).shape for name in ("key", "value"))
    backward = not {"grad_out", "grad_out_"}.isdisjoint(args)
    products = 3 * head + 2 * values[-1] if backward else head + values[-1]
    left, right = (args.get(f"window_size_{side}") for side in ("left", "right"))
    seen = keys[tokens]
    if left is not None and right is not None and min(left, right) >= 0:
        seen = min(seen, left + right + 1)
    return 2.0 * prod(rows) * seen * products


def _grouped_flops(args: Mapping[str, Any]) -> float:
    """Of products whose groups share the rows, the columns, or what is summed."""
    left, right = (type_of(value).shape for value in list(args.values())[:2])
    columns_divided = len(left) > len(right)
    return 2.0 * prod(left[columns_divided:]) * right[-1]


def bytes_of(node: fx.Node) -> int:
    """Bytes of a node's elements, all results together."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors_in(value_of(node)))


def work_of(node: fx.Node) -> tuple[float, int, torch.dtype | None]:
    """Of a kernel of PyTorch's: flops of products, bytes with each operand and result once, and
    the dtype that it computes in: of its first result, or of its factors where it gives another."""
    like = node.all_input_nodes[-1] if "out_dtype" in node.kwargs else node
    if node.target is torch.ops.aten._scaled_mm.default:
        like = node.all_input_nodes[0]  # of float8; the last one is a scale
    tensors = tensors_in(value_of(like))
    moved = bytes_of(node) + sum(map(bytes_of, node.all_input_nodes))
    return flops_of(node), moved, tensors[0].dtype if tensors else None


def seconds_of(node: fx.Node, kind: Kind, device: DeviceModel) -> float:
    """Roofline: ``max(flops / rate, bytes / bandwidth)``. Fusible work pays for one pass over
    its result, since its operands are read by neighbours as well; views are free. What each chunk
    of rows reads and writes again is not hidden: products of few rows have little to hide it."""
    if kind in (Kind.INPUT, Kind.VIEW):
        return 0.0
    if kind in FUSIBLE:
        work = max(bytes_of(node), _row_bytes(node, kind)) / device.bandwidth
        return max(work, slow_seconds(node, device))
    flops, moved, dtype = work_of(node)
    roofline = max(flops / device.rate(dtype or torch.float32), moved / device.bandwidth)
    return roofline + _bytes_of_every_chunk(node) / device.bandwidth


def _bytes_of_every_chunk(node: fx.Node) -> int:
    """The bytes that a call of a chunk of rows moves beside its own rows: it reads the weights, and
    it reads and writes the sum so far."""
    chunk = info(node).chunk
    if chunk is None:
        return 0
    shared = [operand for operand in node.all_input_nodes if info(operand).chunk != chunk]
    alike = (type_of(operand) for operand in shared if is_tensor(operand))
    adds = is_tensor(node) and any(like.shape == type_of(node).shape for like in alike)
    return sum(map(bytes_of, shared)) + adds * bytes_of(node)


def _row_bytes(node: fx.Node, kind: Kind) -> int:
    """A reduction reads its widest operand, whatever it returns."""
    if kind is not Kind.REDUCTION:
        return 0
    return max((bytes_of(operand) for operand in node.all_input_nodes), default=0)


def slow_seconds(node: fx.Node, device: DeviceModel) -> float:
    """Time for transcendental functions, if ``node`` computes any."""
    if not isinstance(node.target, OpOverload) or not facts_of(node.target).slow_elements:
        return 0.0
    return sum(prod(tensor.shape) for tensor in tensors_in(value_of(node))) * device.element
