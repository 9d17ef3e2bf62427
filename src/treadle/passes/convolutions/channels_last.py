"""Images in the memory format in which GPUs convolve them."""

import operator
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.graph.core.node_info import set_value, tensor_of, value_of
from treadle.graph.core.operators import OpOverload, arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import is_tensor, tensors_in
from treadle.graph.core.values import compute, emit, emit_ahead
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.convolutions.calls import has_cudnn
from treadle.passes.convolutions.depthwise import is_depthwise

aten = torch.ops.aten

_OPERANDS = {
    aten.convolution.default: ("input", "weight"),
    aten.convolution_backward.default: ("grad_output", "input", "weight"),
}
_ROW = 8
"""Channels of an image that the kernels take in one load."""
_FOLLOW = frozenset({
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten.native_batch_norm_backward,
    aten.native_group_norm, aten.native_group_norm_backward,
    aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward,
    aten.avg_pool2d, aten.avg_pool2d_backward,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward,
    aten.upsample_nearest2d, aten.upsample_nearest2d_backward,
    aten.mean, aten.sum, aten.cat,
})  # fmt: skip
"""Operations, beside elementwise ones, whose results lie as their images do, and are the same."""


@dataclass(frozen=True)
class ConvolveChannelsLast(GraphPass):
    """Give convolutions in 16 bits channels-last operands, and keep the values between them so.

    before:  y = convolution(x, w); z = relu(y); v = view(z, [8, 4096])     x: bf16[8, 64, 8, 8]
    after:   a = clone(x, channels_last); b = clone(w, channels_last)
             y = convolution(a, b); z = relu(y); c = clone(z, contiguous); v = view(c, [8, 4096])

    cuDNN's kernels compute so, and turn other operands around at every call; depthwise convolutions
    of contiguous images have slow kernels of PyTorch's. Layouts spread through elementwise
    operations, norms and pools; what other operations read, gradients of weights and what the
    caller gets lie as before. Not where that would copy more than cuDNN does.
    ``everywhere``: on other devices than those with cuDNN as well.
    """

    contract = Contract()

    everywhere: bool = False

    def run(self, step: StepGraph) -> int:
        convolutions = {node for node in step.graph.nodes if self._matches(node)}
        if not convolutions or not _pays(step.graph, convolutions):
            return 0
        return _Layouts(step.graph).spread(convolutions)

    def _matches(self, node: fx.Node) -> bool:
        """Whether it is a convolution of images in 16 bits, without groups or depthwise."""
        if node.target not in _OPERANDS:
            return False
        args = arguments(node)
        image, weight = tensor_of(args["input"]), tensor_of(args["weight"])
        if image.dtype not in (torch.bfloat16, torch.float16) or image.dim() != 4:
            return False
        if not self.everywhere and not has_cudnn(args["input"]):
            return False
        rows, columns = weight.shape[:2]
        if is_depthwise(node):
            return rows % _ROW == 0
        return args["groups"] == 1 and rows % _ROW == 0 and (columns % _ROW == 0 or columns < _ROW)


def _operands(node: fx.Node) -> list[fx.Node]:
    args = arguments(node)
    names = next(names for target, names in _OPERANDS.items() if target is node.target)
    return [args[name] for name in names]


@dataclass(frozen=True, slots=True)
class _Reads:
    """What of its operands an operation is to read channels-last, and what as it lay ``before``;
    ``follows``: whether its result lies as what it reads."""

    last: Sequence[fx.Node] = ()
    before: Sequence[fx.Node] = ()
    follows: bool = False

    @staticmethod
    def of(node: fx.Node, convolutions: Set[fx.Node], laid: Container[fx.Node]) -> "_Reads":
        """``laid``: the values that are channels-last already."""
        if node in convolutions:
            return _Reads([each for each in _operands(node) if each not in laid], follows=True)
        mine = [each for each in node.all_input_nodes if each in laid]
        if not mine or not _follows(node):
            return _Reads(before=mine)
        shapes = {tensor_of(each).shape for each in mine if is_tensor(each)}
        beside = [
            each
            for each in node.all_input_nodes
            if each not in laid and is_tensor(each) and tensor_of(each).shape in shapes
        ]
        return _Reads([each for each in beside if tensor_of(each).is_contiguous()], follows=True)


def _follows(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.overloadpacket in _FOLLOW or facts_of(node.target).elementwise


def _is_last(node: fx.Node) -> bool:
    return tensor_of(node).is_contiguous(memory_format=torch.channels_last)


def _pays(graph: fx.Graph, convolutions: Set[fx.Node]) -> bool:
    """Whether fewer elements would be copied than cuDNN turns around now: the operands of each
    convolution, and the image that it makes. Gradients of weights are turned around either way.
    PyTorch's kernels for contiguous images of depthwise convolutions lose more time than that."""
    laid: set[fx.Node] = set()
    copied: set[fx.Node] = set()
    turned = 0
    for node in graph.nodes:
        reads = _Reads.of(node, convolutions, laid)
        copied.update(each for each in (*reads.last, *reads.before) if is_tensor(each))
        if reads.follows:
            laid.add(node)
        if node in convolutions:
            contiguous = [tensor_of(each) for each in _operands(node) if not _is_last(each)]
            made = tensors_in(value_of(node))[:1] if contiguous else ()
            turned += sum(each.numel() for each in (*contiguous, *made))
    return sum(tensor_of(each).numel() for each in copied if not _is_last(each)) < turned


@dataclass
class _Layouts:
    """``was``: what images that are channels-last now were before. ``made_again``: operations with
    several results, of which some may be such images. ``last`` and ``first``: copies of values,
    channels-last and as they were."""

    graph: fx.Graph
    was: dict[fx.Node, torch.Tensor] = field(default_factory=dict[fx.Node, torch.Tensor])
    made_again: set[fx.Node] = field(default_factory=set[fx.Node])
    last: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    first: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def spread(self, convolutions: Set[fx.Node]) -> int:
        """Spread the layout; gives how many images and copies of operands became channels-last."""
        for node in list(self.graph.nodes):
            laid = self.was.keys() | self.made_again
            reads = _Reads.of(node, convolutions, laid)
            for each in reads.last:
                node.replace_input_with(each, self._channels_last(node, each))
            for each in reads.before:
                node.replace_input_with(each, self._as_before(node, each))
            if node.op == "call_function" and (reads.last or reads.before or reads.follows):
                self._update(node)
        return len(self.was) + len(self.last)

    def _channels_last(self, place: fx.Node, operand: fx.Node) -> fx.Node:
        if _is_last(operand):
            return operand
        if operand not in self.last:
            kind = {"memory_format": torch.channels_last}
            self.last[operand] = emit_ahead(place, place, aten.clone.default, operand, **kind)
        return self.last[operand]

    def _as_before(self, place: fx.Node, operand: fx.Node) -> fx.Node:
        if operand not in self.first:
            with self.graph.inserting_before(place):
                self.first[operand] = _laid_as(operand, self.was[operand])
        return self.first[operand]

    def _update(self, node: fx.Node) -> None:
        """Compute the value of ``node`` anew, after the layout of its operands has changed."""
        old, new = value_of(node), compute(node)
        if not isinstance(old, torch.Tensor):
            set_value(node, type(old)(map(_moved, old, new)))
            self.made_again.add(node)
            return
        set_value(node, new)
        if old.stride() != new.stride():
            if old.dim() == 4 and not _is_gradient_of_weight(node):
                self.was[node] = old
                return
            with self.graph.inserting_after(node):
                before = _laid_as(node, old)
            node.replace_all_uses_with(before, lambda user: user is not before)


def _moved(old: object, new: object) -> object:
    """A result of several: the new one if it is an image. Statistics of norms do not move, and
    PyTorch's fake form gives those of symbolic sizes another dtype than its kernels do."""
    return new if isinstance(old, torch.Tensor) and old.dim() == 4 else old


def _is_gradient_of_weight(node: fx.Node) -> bool:
    """Whether it is what the optimizer joins with a weight, which lies as before."""
    if node.target is not operator.getitem:
        return False
    maker, at = node.args
    assert isinstance(maker, fx.Node)
    return maker.target is aten.convolution_backward.default and isinstance(at, int) and at == 1


def _laid_as(node: fx.Node, like: torch.Tensor) -> fx.Node:
    """A copy of ``node`` in the order of memory of ``like``, which has no gaps."""
    kind = {"memory_format": torch.contiguous_format}
    if like.is_contiguous():
        return emit(node, aten.clone.default, node, **kind)
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    back = [order.index(dim) for dim in range(like.dim())]
    turned = emit(node, aten.permute.default, node, order)
    return emit(node, aten.permute.default, emit(node, aten.clone.default, turned, **kind), back)
