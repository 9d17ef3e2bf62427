"""Biases of convolutions that generated kernels add and sum."""

from dataclasses import dataclass

import torch
from torch import fx

from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.convolutions.calls import derivatives_in, has_cudnn, replace_result

aten = torch.ops.aten

_BIAS = 2
"""The place of its gradient among the results of a derivative."""


@dataclass(frozen=True)
class SplitConvolutionBias(GraphPass):
    """Let the kernel that reads a convolution add its bias, and sum the gradient where it is made.

    before:  y = convolution(x, w, b, ...);  r = convolution_backward(g, x, w, ..., [.., .., True])
    after:   y = add(convolution(x, w, None, ...), view(b, [c, 1, 1])); db = sum(g, [0, 2, 3])

    On GPUs PyTorch does the same after it has called cuDNN, in separate kernels: one reads and
    writes the image, one reads its gradient. The image is rounded before the bias is added there
    as well, except in PyTorch's own kernel for depthwise convolutions of contiguous images.
    ``everywhere``: on other devices as well.
    """

    contract = Contract()

    everywhere: bool = False

    def run(self, step: StepGraph) -> int:
        forward = step.graph.find_nodes(op="call_function", target=aten.convolution.default)
        added = [node for node in forward if self._adds(node)]
        summed = [node for node in derivatives_in(step) if self._sums(node)]
        for node in added:
            _add(node)
        for node in summed:
            _sum(node)
        return len(added) + len(summed)

    def _adds(self, node: fx.Node) -> bool:
        args = arguments(node)
        return args["bias"] is not None and self._placed(args["input"])

    def _sums(self, node: fx.Node) -> bool:
        args = arguments(node)
        return bool(args["output_mask"][_BIAS]) and self._placed(args["input"])

    def _placed(self, image: fx.Node) -> bool:
        return self.everywhere or has_cudnn(image)


def _add(node: fx.Node) -> None:
    build, bias = ReplacementBuilder(node), arguments(node)["bias"]
    product = build.again(node, {"bias": None})
    ones = [1] * (tensor_of(product).dim() - 2)
    shaped = build.viewed(bias, [*tensor_of(bias).shape, *ones])
    node.replace_all_uses_with(build.call(aten.add.Tensor, product, shaped))
    node.graph.erase_node(node)


def _sum(node: fx.Node) -> None:
    build, grad = ReplacementBuilder(node), arguments(node)["grad_output"]
    dims = [0, *range(2, tensor_of(grad).dim())]
    replace_result(build, _BIAS, build.call(aten.sum.dim_IntList, grad, dims))
