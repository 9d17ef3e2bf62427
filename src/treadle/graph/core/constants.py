"""Tensors that belong to a graph: literals of the step, the same at every call."""

import operator

from torch import Tensor, fx

from treadle.compat.fake import FakeTensor


def constant_of(node: fx.Node) -> Tensor | None:
    """The tensor that ``node`` is, on its device; ``None`` where it is none of the graph's own, or
    one that nobody has."""
    if node.op != "get_attr":
        return None
    constant = operator.attrgetter(str(node.target))(node.graph.owning_module)
    known = (
        isinstance(constant, Tensor)
        and not isinstance(constant, FakeTensor)
        and not constant.is_meta
    )
    return constant if known else None
