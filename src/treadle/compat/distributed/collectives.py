"""PyTorch's functional collectives and the process groups they name."""

from typing import Any, cast

import torch
from torch import Tensor, distributed

from treadle.compat.operators.schemas import OpOverload

AVAILABLE: bool = distributed.is_available()

if AVAILABLE:  # gives the operators their results on fake tensors
    import torch.distributed._functional_collectives  # pyright: ignore[reportUnusedImport]


def _handles() -> tuple[type, ...]:
    if not AVAILABLE:
        return ()
    from torch._C._distributed_c10d import Logger, Reducer

    return distributed.ProcessGroup, distributed.Store, Reducer, Logger


HANDLES = _handles()
"""Objects that stand for a connection to other ranks: one is what it is as long as it lives."""

NAMESPACE = "_c10d_functional"
"""Of operators that start a collective, and of the one that waits for it."""

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Those that a name says all of: ``ReduceOp.SUM`` and so on."""


def collective_op(name: str) -> OpOverload:
    """``"all_reduce"`` -> ``_c10d_functional.all_reduce.default``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def reduction_named(name: str) -> "distributed.ReduceOp.RedOpType":
    """``"sum"`` -> ``ReduceOp.SUM``."""
    return getattr(distributed.ReduceOp, name.upper())


def name_of_reduction(kind: object) -> str | None:
    """``ReduceOp.SUM`` -> ``"sum"``; ``None`` for one that is more than a name."""
    return next((name for name in _REDUCTIONS if kind == reduction_named(name)), None)


def _named(new: str, old: str) -> Any:
    """A function of ``torch.distributed`` that had another name before."""
    return vars(distributed).get(new) or getattr(distributed, old)


def reduce_scatter(out: Tensor, x: Tensor, **how: object) -> "distributed.Work | None":
    """Each rank's part of the reduced ``x`` into ``out``, along dim 0."""
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(out, x, **how)


def all_gather(out: Tensor, x: Tensor, **how: object) -> "distributed.Work | None":
    """All ranks' ``x`` into ``out``, one after another along dim 0."""
    return _named("all_gather_single", "all_gather_into_tensor")(out, x, **how)


def group_named(name: str) -> "distributed.ProcessGroup":
    """The process group of this name. ``RuntimeError`` if there is none in this process."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return cast(Any, _resolve_process_group)(name)  # a type of its own for names, in some versions


def name_of_group(group: "distributed.ProcessGroup") -> str:
    """What functional collectives call ``group``."""
    return group.group_name


def everyone() -> "distributed.ProcessGroup":
    """The group of all ranks. ``ValueError`` where ``init_process_group`` was not called."""
    group = distributed.group.WORLD
    if group is None:
        raise ValueError("the default process group has not been initialised")
    return group
