"""Norms of images whose results are computed from their statistics, apart from these."""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import arguments, is_item
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.passes.convolutions.calls import has_cudnn

aten = torch.ops.aten

_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
)
_WIDE = torch.float32
"""In which statistics are kept, and results computed."""


@dataclass(frozen=True)
class NormaliseFromStatistics(GraphPass):
    """Compute what a batch or group norm gives from the mean and spread that it keeps.

    before:  r = native_group_norm(x, w, b, ...); y = r[0]; mean = r[1]; rstd = r[2]
    after:   r = native_group_norm(x, w, b, ...); mean = r[1]; rstd = r[2]
             y = (x - mean) * rstd * w + b

    A memory plan then keeps one number for a channel instead of the image, and computes the image
    again without its statistics. Norms of rows (``layer_norm``) read each row once either way.
    ``everywhere``: on other devices than those with cuDNN as well.
    """

    contract = Contract()

    everywhere: bool = False

    def run(self, step: StepGraph) -> int:
        norms = [n for n in step.graph.nodes if n.target in _NORMS and self._matches(n)]
        return sum(_normalise(node) for node in norms)

    def _matches(self, node: fx.Node) -> bool:
        args = arguments(node)
        image = type_of(args["input"])
        if not args.get("training", True) or image.dtype.itemsize > 4 or image.ndim < 3:
            return False
        if node.target is aten.native_batch_norm.default and args["running_mean"] is not None:
            return False  # it writes to them
        statistics = value_of(node)[1:3]
        known = all(each.dtype is _WIDE for each in statistics)
        return known and (self.everywhere or has_cudnn(args["input"]))


def _normalise(node: fx.Node) -> int:
    """Whether something reads the result."""
    mine = [each for each in node.users if is_item(each) and each.args[1] == 0 and each.users]
    if not mine:
        return 0
    args, build = arguments(node), ReplacementBuilder(mine[0])
    image = args["input"]
    dtype, shape = type_of(image).dtype, type_of(image).shape
    centre, scale = (
        _by_channel(build, build.call(operator.getitem, node, at), shape, args.get("group"))
        for at in (1, 2)
    )
    ones = [1] * (len(shape) - 2)
    wide = build.converted(image, _WIDE)
    value = build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, wide, centre), scale)
    for name, operation in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if args[name] is not None:
            parameter = build.viewed(args[name], [*type_of(args[name]).shape, *ones])
            value = build.call(operation, value, build.converted(parameter, _WIDE))
    value = build.converted(value, dtype)
    for each in mine:
        each.replace_all_uses_with(value)
        node.graph.erase_node(each)
    return 1


def _by_channel(
    build: ReplacementBuilder, statistic: fx.Node, shape: tuple[int, ...], groups: int | None
) -> fx.Node:
    """A statistic of each channel, or of each of some ``groups``, as one of each channel that
    images of ``shape`` are combined with."""
    batch, channels, *plane = shape
    ones = [1] * len(plane)
    if groups is None:
        return build.viewed(statistic, [channels, *ones])
    each: list[Argument] = [batch, groups, channels // groups]
    spread = build.call(aten.expand.default, build.call(aten.unsqueeze.default, statistic, 2), each)
    return build.viewed(build.dense(spread), [batch, channels, *ones])
