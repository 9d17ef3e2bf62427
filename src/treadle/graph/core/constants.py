"""Tensors that a graph has by itself: literals of the step, the same at every call."""

import operator

from torch import Tensor, fx

from treadle.compat.fake import FakeTensor


def constant_of(node: fx.Node) -> Tensor | None:
    """The tensor that ``node`` is, on its device; ``None`` where it is none of the graph's own, or
    one that nobody has."""
    if node.op != "get_attr":
        return None
    found = operator.attrgetter(str(node.target))(node.graph.owning_module)
    known = isinstance(found, Tensor) and not isinstance(found, FakeTensor) and not found.is_meta
    return found if known else None
