"""Numbers from which a step makes tensors: ``torch.tensor(0.5)``.

::

    before:  c = _tensor_constant0; t = lift_fresh_copy(c); y = where(m, x, t)
    after:   t = full([], 0.5, dtype=f32); y = where(m, x, t)

The tracer keeps such a tensor, and the step has only its copy. As a number, it is part of the
formula that reads it, and provers can use it. The number from which the tensor was made is a read,
like every other number.
"""

import operator
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_LIFTS = frozenset({aten.lift_fresh_copy.default, aten.lift_fresh.default})
_DTYPES = frozenset({
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
})  # fmt: skip


def literals_made_numbers(module: fx.GraphModule, is_literal: Callable[[Tensor], bool]) -> None:
    """Let each held tensor of one element that is only copied, and that ``is_literal``, be made
    where it is read."""
    graph = module.graph
    for node in graph.find_nodes(op="get_attr"):
        tensor: object = operator.attrgetter(str(node.target))(module)
        if not is_copied(tensor, node) or tensor.numel() != 1 or not is_literal(tensor):
            continue
        options = {"dtype": tensor.dtype, "device": tensor.device, "pin_memory": False}
        for user in list(node.users):
            user.target = aten.full.default
            user.args, user.kwargs = (list(tensor.shape), tensor.item()), options
        graph.erase_node(node)


def is_copied(value: object, node: fx.Node) -> TypeGuard[Tensor]:
    """Whether ``value``, which ``node`` gives, is plain numbers of which nobody has more than a
    copy."""
    if not node.users or any(user.target not in _LIFTS for user in node.users):
        return False
    if type(value) is not Tensor or value.requires_grad or value.dtype not in _DTYPES:
        return False
    own = value.layout is torch.strided and not value.is_meta
    return own and value.untyped_storage().resizable()  # others are memory of NumPy's or of bytes
