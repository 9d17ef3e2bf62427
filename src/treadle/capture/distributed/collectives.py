"""Collectives that the user's code calls inside a traced run: the functional one, and a copy.

::

    dist.all_reduce(x)    ->    x.copy_(wait(all_reduce(x)))
"""

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from treadle.compat.distributed.collectives import (
    collective_op,
    everyone,
    name_of_group,
    name_of_reduction,
)


def all_reduce_in_place(original: Callable[..., object]) -> Callable[..., object]:
    """The replacement of ``torch.distributed.all_reduce``. An asynchronous call, and a reduction
    that needs more than its name, run as they are, and are refused when the trace ends."""

    def all_reduce(
        tensor: Tensor,
        op: object = None,
        group: distributed.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> object:
        kind = distributed.ReduceOp.SUM if op is None else op
        reduction = name_of_reduction(kind)
        if async_op or tensor.is_sparse or reduction is None:
            return original(tensor, kind, group, async_op)
        name = name_of_group(group or everyone())
        start, wait = collective_op("all_reduce"), collective_op("wait_tensor")
        with torch.no_grad():
            shown = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            shown.copy_(wait(start(shown, reduction, name)))
        return None

    return all_reduce
