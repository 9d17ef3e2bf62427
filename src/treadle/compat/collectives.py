"""PyTorch's functional collectives and the process groups they name."""

from typing import Any, cast

import torch
from torch import distributed

from treadle.compat.operators import OpOverload

AVAILABLE: bool = distributed.is_available()

if AVAILABLE:  # gives the operators their results on fake tensors
    import torch.distributed._functional_collectives  # pyright: ignore[reportUnusedImport]

HANDLES: tuple[type, ...] = ()
"""Objects that stand for a connection to other ranks: one is what it is as long as it lives."""

if AVAILABLE:
    from torch._C._distributed_c10d import Logger, Reducer

    HANDLES = (distributed.ProcessGroup, distributed.Store, Reducer, Logger)

NAMESPACE = "_c10d_functional"
"""Of operators that start a collective, and of the one that waits for it."""


def collective_op(name: str) -> OpOverload:
    """``"all_reduce"`` -> ``_c10d_functional.all_reduce.default``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def group_named(name: str) -> "distributed.ProcessGroup":
    """The process group of this name. ``RuntimeError`` if there is none in this process."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return cast(Any, _resolve_process_group)(name)  # a type of its own for names, in some versions


def name_of_group(group: "distributed.ProcessGroup") -> str:
    """What functional collectives call ``group``."""
    return group.group_name


__all__ = [
    "AVAILABLE",
    "HANDLES",
    "NAMESPACE",
    "collective_op",
    "group_named",
    "name_of_group",
]
