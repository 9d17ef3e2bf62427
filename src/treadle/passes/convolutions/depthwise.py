"""Depthwise convolutions: one filter for each channel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.graph.analysis.dynamic import layout_of
from treadle.graph.core.node_info import tensor_of, value_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.convolutions.calls import derivatives_in, has_cudnn, replace_result

aten = torch.ops.aten

_FILTERS = ((3, 3), (5, 5), (7, 7))
"""Sizes for which cuDNN has kernels of its own. With larger filters, channels-last convolutions are
several times slower than contiguous ones (``benchmarks/depthwise.py``)."""
_STRIDES = ((1, 1), (2, 2))
"""Those that were measured."""
_FLIPPED = {torch.bfloat16: 3, torch.float16: 7}
"""The smallest filters for which the convolution of the gradient is faster than cuDNN's own
derivative (the same benchmark)."""


def is_depthwise(node: fx.Node) -> bool:
    """Whether a convolution, or the derivative of one, has one filter for each channel and a fast
    kernel on GPUs if its images are channels-last."""
    args = arguments(node)
    image, weight = tensor_of(args["input"]), tensor_of(args["weight"])
    each = weight.shape[1] == 1 and args["groups"] == weight.shape[0] == image.shape[1]
    return (
        each
        and not args["transposed"]
        and tuple(weight.shape[2:]) in _FILTERS
        and _pair(args["stride"]) in _STRIDES
        and _pair(args["dilation"]) == (1, 1)
    )


def _pair(sizes: Sequence[int]) -> tuple[int, ...]:
    """Both dims of an option that may be one number for both."""
    return tuple(sizes) if len(sizes) == 2 else (sizes[0], sizes[0])


@dataclass(frozen=True)
class ConvolveDepthwiseGradient(GraphPass):
    """The gradient of a depthwise convolution's image is a convolution with flipped filters.

    before:  r = convolution_backward(g, x, w, ..., [True, True, False]); dx = r[0]; dw = r[1]
    after:   dx = convolution(g, flip(w, [2, 3]), ..., padding k - 1 - p)
             r = convolution_backward(g, x, w, ..., [False, True, False]); dw = r[1]

    cuDNN computes it up to 2.3 times as fast (``benchmarks/depthwise.py``). Stride 1, in 16 bits;
    both sum in float32 and round once. ``everywhere``: on other devices than those with cuDNN as
    well.
    """

    contract = Contract()

    everywhere: bool = False

    def run(self, step: StepGraph) -> int:
        return sum(_convolve(node) for node in derivatives_in(step) if self._matches(node))

    def _matches(self, node: fx.Node) -> bool:
        args = arguments(node)
        image, weight = tensor_of(args["input"]), tensor_of(args["weight"])
        if not self.everywhere and not has_cudnn(args["input"]):
            return False
        if image.dim() != 4 or not args["output_mask"][0] or not is_depthwise(node):
            return False
        size, least = weight.shape[2], _FLIPPED.get(image.dtype)
        fits = max(_pair(args["padding"])) < size and _pair(args["stride"]) == (1, 1)
        return least is not None and size >= least and fits


def _convolve(node: fx.Node) -> bool:
    """Put the convolution in the place of the first result; not if that lies in memory as no
    convolution's result does."""
    args, build, old = arguments(node), ReplacementBuilder(node), value_of(node)[0]
    grad, weight, kind = args["grad_output"], args["weight"], {"memory_format": torch.channels_last}
    if old.is_contiguous(**kind) and not tensor_of(grad).is_contiguous(**kind):
        grad = build.call(aten.clone.default, grad, **kind)  # as cuDNN does
    padding = [tensor_of(weight).shape[2] - 1 - pad for pad in _pair(args["padding"])]
    flipped = build.call(aten.flip.default, weight, [2, 3])
    options = (None, [1, 1], padding, [1, 1], False, [0, 0], args["groups"])
    image = build.call(aten.convolution.default, grad, flipped, *options)
    if old.is_contiguous() and not tensor_of(image).is_contiguous():
        image = build.dense(image)
    if layout_of(tensor_of(image)) != layout_of(old):
        build.undo()
        return False
    replace_result(build, 0, image)
    return True
