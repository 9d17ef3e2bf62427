"""New nodes instead of old ones: the only way in which passes and rules create them."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import fx

from treadle.algebra.extents import same_sizes
from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import forget
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import TensorType, type_of
from treadle.graph.core.values import inherit

aten = torch.ops.aten


@final
class ReplacementBuilder:
    """Creates operations before ``place``. They get the phase, source line and region of ``root``,
    or of ``place`` without a ``root``."""

    def __init__(self, place: fx.Node, root: fx.Node | None = None) -> None:
        self._place = place
        self.root = root or place
        self.made: list[fx.Node] = []

    def call(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> fx.Node:
        """A call of ``target``, an operation that neither writes nor draws random numbers. Its
        value is set."""
        with self._place.graph.inserting_before(self._place):
            return self._placed(self._place.graph.call_function(target, args, kwargs))

    def at(self, node: fx.Node) -> "ReplacementBuilder":
        """A builder for operations at the position of ``node``, with its phase, line and region;
        undone together with this one."""
        other = ReplacementBuilder(node)
        other.made = self.made
        return other

    def belonging(self, node: fx.Node) -> "ReplacementBuilder":
        """A builder for operations at this position, with the phase, line and region of ``node``;
        undone together with this one."""
        other = ReplacementBuilder(self._place, node)
        other.made = self.made
        return other

    def again(self, call: fx.Node, changes: Mapping[str, Argument]) -> fx.Node:
        """``call`` with some arguments replaced by name, at the same positions."""
        assert callable(call.target), call
        names, args, kwargs = list(arguments(call)), list(call.args), dict(call.kwargs)
        for name, value in changes.items():
            at = names.index(name)
            if at < len(args):
                args[at] = value
            else:
                kwargs[name] = value
        return self.call(call.target, *args, **kwargs)

    def copy(self, node: fx.Node, operand: Callable[[fx.Node], Argument]) -> fx.Node:
        """A copy of ``node`` from another graph, with ``operand(each)`` for each value that it
        reads."""
        with self._place.graph.inserting_before(self._place):
            made = self._place.graph.node_copy(node, operand)
        forget(made)
        return self._placed(made)

    def items(self, call: fx.Node, count: int) -> list[fx.Node]:
        """The results of ``call``, one by one."""
        return [self.call(operator.getitem, call, at) for at in range(count)]

    def dense(self, value: fx.Node) -> fx.Node:
        """``value`` in row-major order."""
        if type_of(value).is_contiguous:
            return value
        return self.call(aten.clone.default, value, memory_format=torch.contiguous_format)

    def viewed(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """``value`` in another shape; ``value`` itself if it has that shape, a copy if it cannot be
        a view."""
        known = type_of(value)
        if same_sizes(known.shape, shape):
            return value
        target = aten.view.default if known.is_contiguous else aten.reshape.default
        return self.call(target, value, list(shape))

    def converted(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``value`` of ``dtype``."""
        if type_of(value).dtype is dtype:
            return value
        return self.call(aten._to_copy.default, value, dtype=dtype)

    def type_of(self, value: fx.Node) -> TensorType:
        """The type of a value that is one tensor."""
        return type_of(value)

    def undo(self) -> None:
        """Remove everything that was created."""
        for node in reversed(self.made):
            node.graph.erase_node(node)
        self.made.clear()

    def _placed(self, node: fx.Node) -> fx.Node:
        self.made.append(node)
        inherit(node, self.root)
        return node
