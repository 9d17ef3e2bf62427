"""What ``torch.amp.GradScaler`` keeps: its scale and its count of steps without infinities."""

from typing import cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

METHODS = ("scale", "unscale_", "step", "update")
"""Those that a step calls."""
KINDS = (GradScaler, torch.cuda.amp.GradScaler)


def is_begun(scaler: GradScaler) -> bool:
    """Whether it has its tensors; it makes them at its first use."""
    return scaler._scale is not None


def begin(scaler: GradScaler, device: torch.device) -> None:
    """Make its tensors, as its first use would."""
    scaler._lazy_init_scale_growth_tracker(device)


def scale_and_tracker(scaler: GradScaler) -> tuple[Tensor, Tensor]:
    """The scale, and the number of steps since it grew."""
    return cast(Tensor, scaler._scale), cast(Tensor, scaler._growth_tracker)


def is_between(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Whether it has unscaled gradients of an optimizer, or stepped it, since its last update."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and state["stage"] is not OptState.READY
