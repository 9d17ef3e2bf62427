"""What a node costs: its class, floating-point operations, bytes moved, and seconds on a device."""

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from treadle.graph.alias import storages
from treadle.graph.operator_facts import CostClass, facts_of
from treadle.graph.operators import OpOverload, has_effect, is_random
from treadle.graph.types import tensors_in
from treadle.util.allocator import Allocator
from treadle.util.errors import PlanError


class Kind(enum.StrEnum):
    """How a value comes about, as far as its memory and time are concerned."""

    INPUT = "input"  # a placeholder or a constant: alive all the time
    VIEW = "view"  # the bytes of its operand, or one result of several
    RANDOM = "random"
    POINTWISE = CostClass.POINTWISE.value
    REDUCTION = CostClass.REDUCTION.value
    PRODUCT = CostClass.PRODUCT.value
    LIBRARY = CostClass.LIBRARY.value


FUSIBLE = frozenset({Kind.POINTWISE, Kind.REDUCTION})
CALLS = frozenset({Kind.PRODUCT, Kind.LIBRARY, Kind.RANDOM})
"""Kernels that are not ours: nothing is fused across them."""


@dataclass(frozen=True)
class Device:
    """Ceilings that times are estimated with. ``flops``: per second, by dtype, for products.

    ``bandwidth``: bytes per second. ``element``: seconds for one transcendental function.
    ``reserve``: bytes that libraries hold all the time: cuBLAS's workspace (33 MiB on Hopper with
    PyTorch 2.11) and the scratch of kernels whose sums are split (at most 2 MiB); on a CPU the
    state of the generator during a call (5,056 bytes). ``memory``: bytes there are; 0: unknown.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    element: float = 0.0
    reserve: int = 0
    memory: int = 0

    def rate(self, dtype: torch.dtype) -> float:
        return self.flops.get(dtype, self.flops[torch.float32])

    @property
    def allocator(self) -> Allocator:
        """How its memory is counted."""
        return Allocator(self.reserve, blocks=self.name != CPU.name)


def _rates(full: float, half: float, double: float) -> Mapping[torch.dtype, float]:
    rates = {torch.float32: full, torch.float64: double}
    return rates | {torch.bfloat16: half, torch.float16: half}


CPU = Device(
    "cpu", {torch.float32: 6e10, torch.bfloat16: 3e10, torch.float64: 3e10}, 1e10, 1e-9, 5056
)
H200 = Device("h200", _rates(5e13, 7e14, 5e13), 4e12, reserve=35 << 20, memory=139 << 30)
H100 = Device("h100", _rates(5e13, 6.5e14, 5e13), 2.8e12, reserve=35 << 20, memory=79 << 30)
A100 = Device("a100", _rates(1.6e13, 2.3e14, 1.6e13), 1.7e12, reserve=11 << 20, memory=79 << 30)
RTX4090 = Device("rtx4090", _rates(6e13, 1.4e14, 1.1e12), 8.8e11, reserve=11 << 20, memory=23 << 30)
"""About 75 to 85 % of what the data sheets give for dense products and memory (the H200 and the
CPU measured), and what PyTorch can allocate of the memory."""
DEVICES: Mapping[str, Device] = {each.name: each for each in (CPU, H200, H100, A100, RTX4090)} | {
    "nvidia-h200": H200,
    "cuda": H200,
}


def device_for(name: str) -> Device:
    """``"cuda:1"`` -> the description of that kind of device; ``PlanError`` if there is none."""
    found = DEVICES.get(name.lower().partition(":")[0])
    if found is None:
        raise PlanError(
            f"no description of a device called {name!r}",
            code="TR-204",
            remedy=f"use one of {', '.join(DEVICES)}",
        )
    return found


def kind_of(node: fx.Node) -> Kind:
    """The class of a node that is not the output."""
    if node.op != "call_function":
        return Kind.INPUT
    if node.target is operator.getitem:
        return Kind.VIEW
    if is_random(node):
        return Kind.RANDOM
    if has_effect(node) or not isinstance(node.target, OpOverload):
        return Kind.LIBRARY
    held, sources = storages(node.meta["val"]), node.all_input_nodes
    if held and sources and held <= storages(sources[0].meta["val"]):
        return Kind.VIEW
    return Kind(facts_of(node.target).cost)


def flops_of(node: fx.Node) -> float:
    """Floating-point operations of a product; 0 for everything else."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0.0
    args = map_arg(node.args, lambda each: each.meta["val"])
    kwargs = map_arg(node.kwargs, lambda each: each.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def bytes_of(node: fx.Node) -> int:
    """Bytes of a node's elements, all results together."""
    return sum(each.numel() * each.dtype.itemsize for each in tensors_in(node.meta["val"]))


def work_of(node: fx.Node) -> tuple[float, int, torch.dtype | None]:
    """Of a kernel of PyTorch's: flops of products, bytes with each operand and result once, and
    the dtype of its first result."""
    tensors = tensors_in(node.meta["val"])
    moved = bytes_of(node) + sum(map(bytes_of, node.all_input_nodes))
    return flops_of(node), moved, tensors[0].dtype if tensors else None


def seconds_of(node: fx.Node, kind: Kind, device: Device) -> float:
    """Roofline: ``max(flops / rate, bytes / bandwidth)``. Fusible work pays for one pass over
    its result, since its operands are read by neighbours as well; views are free."""
    if kind in (Kind.INPUT, Kind.VIEW):
        return 0.0
    if kind in FUSIBLE:
        work = max(bytes_of(node), _row_bytes(node, kind)) / device.bandwidth
        return max(work, slow_seconds(node, device))
    flops, moved, dtype = work_of(node)
    return max(flops / device.rate(dtype or torch.float32), moved / device.bandwidth)


def _row_bytes(node: fx.Node, kind: Kind) -> int:
    """A reduction reads its widest operand, whatever it returns."""
    if kind is not Kind.REDUCTION:
        return 0
    return max((bytes_of(each) for each in node.all_input_nodes), default=0)


def slow_seconds(node: fx.Node, device: Device) -> float:
    """Time for transcendental functions, if ``node`` computes any."""
    if not isinstance(node.target, OpOverload) or not facts_of(node.target).slow_elements:
        return 0.0
    return sum(prod(each.shape) for each in tensors_in(node.meta["val"])) * device.element
