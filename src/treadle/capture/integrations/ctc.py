"""``torch.ctc_loss`` while a step is traced: in terms of an operation whose sizes are known."""

import torch
from torch import Tensor

from treadle.graph.custom_ops.ctc import ctc_loss

FUNCTIONS = frozenset({torch.ctc_loss, torch.nn.functional.ctc_loss})
_REDUCTIONS = "none", "mean", "sum"  # by PyTorch's numbers


def losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``log_probs`` [T, N, C] or [T, C]; lengths are tensors or numbers, as in PyTorch."""
    how = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()
    batched = log_probs.dim() == 3
    rows = log_probs if batched else log_probs.unsqueeze(1)
    rows_of_targets = targets if batched or targets.dim() != 1 else targets.unsqueeze(0)
    lengths = _lengths(input_lengths), _lengths(target_lengths)
    losses_ = ctc_loss(rows, rows_of_targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses_ = torch.where(losses_ == float("inf"), torch.zeros_like(losses_), losses_)
    if how == "mean":
        return (losses_ / lengths[1].to(losses_.device).clamp_min(1).to(losses_.dtype)).mean()
    if how == "sum":
        return losses_.sum()
    return losses_ if batched else losses_.squeeze(0)


def _lengths(value: object) -> Tensor:
    """[N] on the host."""
    if isinstance(value, Tensor):
        return value.reshape(-1).to("cpu", torch.int64)
    return torch.tensor(value, dtype=torch.int64).reshape(-1)
