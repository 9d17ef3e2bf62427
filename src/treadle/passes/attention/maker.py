"""New nodes in the place of old ones."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from treadle.graph.core.types import type_of
from treadle.graph.core.values import inherit
from treadle.passes.attention.moves import Arrange, source

aten = torch.ops.aten


class Maker:
    """Makes nodes before ``place``, which belong where ``root`` does, or it."""

    def __init__(self, place: fx.Node, root: fx.Node | None = None) -> None:
        self._place = place
        self._root = root or place

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        graph = self._place.graph
        with graph.inserting_before(self._place):
            made = graph.call_function(target, args, kwargs)
        inherit(made, self._root)
        return made

    def again(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """What ``node`` is, of another first operand."""
        assert callable(node.target), node
        return self(node.target, operand, *node.args[1:], **node.kwargs)

    def items(self, call: fx.Node, count: int) -> list[fx.Node]:
        """The results of ``call``, one by one."""
        return [self(operator.getitem, call, at) for at in range(count)]

    def dense(self, value: fx.Node) -> fx.Node:
        """``value`` in row-major order."""
        if type_of(value).is_contiguous:
            return value
        return self(aten.clone.default, value, memory_format=torch.contiguous_format)

    def arranged(self, value: fx.Node, arrange: Arrange) -> fx.Node:
        """``value``, of three dims, as ``arrange`` says: what it is a copy of, if there is that."""
        found = source(value, arrange)
        if found is not None:
            return found
        turned = self(aten.transpose.int, value, 1, 2) if arrange.transposed else value
        return self(aten.view.default, self.dense(turned), list(arrange.shape))

    def four_dims(self, mask: fx.Node) -> fx.Node:
        """A mask of scores with dims of size 1 before its own, or without some of them."""
        shape = list(type_of(mask).shape)
        if len(shape) > 4:
            return self(aten.view.default, self.dense(mask), shape[-4:])
        missing = 4 - len(shape)
        return self(aten.expand.default, mask, [1] * missing + shape) if missing else mask


__all__ = ["Maker"]
