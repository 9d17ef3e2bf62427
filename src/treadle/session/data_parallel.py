"""``DataParallel`` around the calls of a step: equal start values on all ranks, and its eager
version."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from treadle.capture.distributed.gradient_sync import GradientSync, RankGroup, from_first_rank
from treadle.compat.distributed.collectives import everyone, group_named, name_of_group
from treadle.compat.distributed.process_groups import ranks_of
from treadle.compat.distributed.sharded_tensors import (
    gathered,
    is_sharded,
    layout_of,
    local_of,
    placed_like,
)
from treadle.options import DataParallel
from treadle.util.errors import TreadleError

_FIRST = (
    "call torch.distributed.init_process_group first; torchrun sets the variables that it reads"
)


def rank_group(parallel: DataParallel) -> RankGroup:
    """The group that is meant. ``TreadleError`` TR-500 where there is none, or several."""
    group = parallel.group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise TreadleError(
                f"DataParallel over a mesh of {group.ndim} dims: choose one of them",
                code="TR-500",
                remedy='pass one dim: mesh["dp"]',
            )
        group = group.get_group()
    if group is None:
        try:
            group = everyone()
        except ValueError as error:
            raise TreadleError(str(error), code="TR-500", remedy=_FIRST) from None
    divides = parallel.shard == "optimizer"
    return RankGroup(name_of_group(group), group.size(), group.rank(), divides)


def refuse_other_parts(models: Mapping[str, nn.Module], group: RankGroup) -> None:
    """TR-514 where ranks of ``group`` hold other parts of a parameter, whose mean is nothing."""
    ranks = {*ranks_of(group_named(group.name))}
    others = ranks - {distributed.get_rank()}
    for model in models.values():
        for name, parameter in model.named_parameters():
            layout = layout_of(parameter)
            if layout is not None and layout.is_split and others & layout.ranks:
                raise TreadleError(
                    f"DataParallel over ranks {sorted(ranks)}, which hold shards of {name}",
                    code="TR-514",
                    remedy=(
                        "pass the mesh dim along which ranks hold the same values: "
                        'treadle.DataParallel(mesh["dp"]); fully_shard alone needs none'
                    ),
                )


_READ_GRAD = cast(Any, Tensor.grad).__get__
_SET_GRAD = cast(Any, Tensor.grad).__set__


def start_together(models: Mapping[str, nn.Module], group: RankGroup) -> None:
    """Every rank gets the first rank's parameters and buffers, in place."""
    with torch.no_grad():
        for tensor in _held(models):
            tensor.copy_(from_first_rank(tensor.detach(), group))


def _held(models: Mapping[str, nn.Module]) -> list[Tensor]:
    """Parameters and buffers, each once, in the order of their names."""
    named = [
        parameter
        for model in models.values()
        for parameter in (*model.parameters(), *model.buffers())
    ]
    return list({id(parameter): parameter for parameter in named}.values())


@final
class _Reads(TorchFunctionMode):
    """Tells ``sync`` of every gradient that is about to be read."""

    def __init__(self, sync: GradientSync) -> None:
        super().__init__()
        self._sync = sync

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if func == _READ_GRAD:
            self._sync.looked_at(args[0])
        result = func(*args, **(kwargs or {}))
        if func == _SET_GRAD:
            self._sync.was_set(args[0])
        return result


@contextmanager
def averaging(models: Mapping[str, nn.Module], group: RankGroup, *, steps: bool) -> Iterator[None]:
    """While the user's function runs as it is: gradients are averaged as in a graph. ``steps``:
    whether it has optimizers, before whose steps they are."""
    sync = GradientSync(group)
    with ExitStack() as undo:
        for model in models.values():
            for parameter in model.parameters():
                handle = sync.watch(parameter, has_gradient=parameter.grad is not None)
                if handle is not None:
                    undo.callback(handle.remove)
        with _Reads(sync):
            yield
        if not steps:
            sync.finish()
        with torch.no_grad():
            for model in models.values():
                for buffer in model.buffers():
                    buffer.copy_(from_first_rank(buffer, group))


@contextmanager
def whole_state(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """While the user's function runs as it is, an optimizer that steps has all of what ranks
    divide. One that does not step, or that an error comes before, sends nothing."""
    divided: list[tuple[dict[str, Any], str, Tensor]] = []

    def gather(optimizer: Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if is_sharded(value) and not is_sharded(parameter):
                    divided.append((state, key, value))
                    state[key] = gathered(value)

    with ExitStack() as undo:
        for optimizer in optimizers.values():
            if _has_divided(optimizer):
                undo.callback(optimizer.register_step_pre_hook(gather).remove)
        try:
            yield
        finally:
            with torch.no_grad():
                for state, key, value in divided:
                    local_of(value).copy_(local_of(placed_like(state[key], value)))
                    state[key] = value


def _has_divided(optimizer: Optimizer) -> bool:
    pairs = optimizer.state.items()
    return any(
        is_sharded(value)
        for parameter, state in pairs
        if not is_sharded(parameter)
        for value in state.values()
    )
