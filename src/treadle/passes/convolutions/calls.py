"""Convolutions and their derivatives as calls: where they run, and results of a derivative that
something else computes."""

import operator

import torch
from torch import fx

from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.targets.registry import target_for

aten = torch.ops.aten


def has_cudnn(image: fx.Node) -> bool:
    """Whether convolutions of ``image`` run where cuDNN is."""
    return "cudnn" in target_for(tensor_of(image).device).libraries


def derivatives_in(step: StepGraph) -> list[fx.Node]:
    """The derivatives of convolutions, in order."""
    return step.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)


def replace_result(build: ReplacementBuilder, at: int, value: fx.Node) -> None:
    """``value`` takes the place of result ``at`` of a derivative, which no longer computes it: the
    gradient of the image, the weight or the bias, in this order.

    before:  r = convolution_backward(..., [True, True, False]); dx = r[0]; dw = r[1]
    after:   dx = value; r = convolution_backward(..., [False, True, False]); dw = r[1]
    """
    node = build.root
    mask = [wanted and i != at for i, wanted in enumerate(arguments(node)["output_mask"])]
    rest = build.again(node, {"output_mask": mask}) if any(mask) else None
    for item in list(node.users):
        assert item.target is operator.getitem, item
        if item.args[1] == at:
            item.replace_all_uses_with(value)
            node.graph.erase_node(item)
        elif rest is not None:
            item.replace_input_with(node, rest)
    node.graph.erase_node(node)
