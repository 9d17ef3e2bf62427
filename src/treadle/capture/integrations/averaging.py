"""Averages over all earlier steps, without reading how many there were: those of ``AveragedModel``,
and of batch norms with ``momentum=None``."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from treadle.capture.integrations.integration import Integration, Patch, TracedRun
from treadle.compat.batch_norm import batch_norm_forward, check_dims


def update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
    """``a = m`` at the first update and ``a = f(a, m, n)`` at every later one, decided by a select.

    ``averaged``: an ``AveragedModel``; ``f``: its ``multi_avg_fn`` or ``avg_fn``, by default the
    mean of all models so far. Buffers are averaged with ``use_buffers``, copied otherwise.
    """
    with torch.no_grad():
        mine, theirs = list(averaged.module.parameters()), list(model.parameters())
        own, others = list(averaged.module.buffers()), list(model.buffers())
        if averaged.use_buffers:
            mine, theirs = [*mine, *own], [*theirs, *others]
        count, old = averaged.n_averaged, [parameter.detach() for parameter in mine]
        new = [parameter.detach().to(a.device) for a, parameter in zip(old, theirs, strict=False)]
        first = count == 0
        for a, m, mean in zip(old, new, _means(averaged, old, new, count), strict=False):
            a.copy_(torch.where(first.to(a.device), m.to(a.dtype), mean.to(a.dtype)))
        if not averaged.use_buffers:
            for a, m in zip(own, others, strict=True):
                a.detach().copy_(m.detach().to(a.device))
        count.add_(1)


def _means(
    averaged: AveragedModel, old: list[Tensor], new: list[Tensor], count: Tensor
) -> Sequence[Tensor]:
    """The averages after this model; nothing is written."""
    if averaged.multi_avg_fn is not None and not _is_mean(averaged.multi_avg_fn):
        return _all_at_once(averaged.multi_avg_fn, old, new, count)
    if averaged.avg_fn is not None:
        fn = averaged.avg_fn
        return [fn(a.clone(), m, count.to(a.device)) for a, m in zip(old, new, strict=False)]
    pairs = zip(old, new, strict=False)
    return [a + (m - a) / (count.to(a.device) + 1).to(a.dtype) for a, m in pairs]


def _is_mean(fn: Callable[..., object]) -> bool:
    """PyTorch's own mean of all models, which turns the count into a number."""
    made_by = get_swa_multi_avg_fn.__qualname__
    is_torch_s = fn.__module__ == get_swa_multi_avg_fn.__module__
    return is_torch_s and fn.__qualname__.startswith(f"{made_by}.")


def _all_at_once(
    fn: Callable[[list[Tensor], list[Tensor], Tensor], object],
    old: list[Tensor],
    new: list[Tensor],
    count: Tensor,
) -> list[Tensor]:
    """``fn`` writes its first list in place, and gets tensors of one device and dtype."""
    copies = [tensor.clone() for tensor in old]
    kinds = [(tensor.device, tensor.dtype) for tensor in old]
    order = sorted(range(len(new)), key=lambda at: str(kinds[at]))
    for _, group in itertools.groupby(order, key=lambda at: str(kinds[at])):
        places = list(group)
        device = kinds[places[0]][0]
        fn([copies[at] for at in places], [new[at] for at in places], count.to(device))
    return copies


def averaged_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    averages: tuple[Tensor, Tensor],
    share: Tensor | float,
    eps: float,
) -> Tensor:
    """A batch norm in training. ``averages``: of means and variances, in which this batch gets
    ``share``, a float64 tensor without dims."""
    mean, variance = map(torch.zeros_like, averages)
    result = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    for running, now in zip(averages, (mean, variance), strict=True):
        running.copy_(running * (1 - share) + now * share)
    return result


def cumulative_batch_norm() -> tuple[object, str, Callable[[object, Tensor], Tensor]]:
    """What to put where (owner, name, value) while a step is traced: the forward of a batch norm
    with ``momentum=None``, whose averages are over all batches. It turns the count of batches into
    a number; here it stays a tensor.

    after n batches:  running = running * (1 - 1 / n) + of this batch / n
    """
    owner, name, original = batch_norm_forward()

    def forward(module: Any, input_: Tensor) -> Tensor:
        tracked = module.training and module.track_running_stats
        if module.momentum is not None or not tracked or module.num_batches_tracked is None:
            return original(module, input_)
        check_dims(module, input_)
        module.num_batches_tracked.add_(1)
        averages = module.running_mean, module.running_var
        share = module.num_batches_tracked.double().reciprocal()
        return averaged_batch_norm(input_, module.weight, module.bias, averages, share, module.eps)

    return owner, name, forward


def _patches(_: TracedRun) -> Iterable[Patch]:
    return (AveragedModel, "update_parameters", update_parameters), cumulative_batch_norm()


AVERAGING = Integration(name="torch.optim.swa_utils", patches=_patches)
