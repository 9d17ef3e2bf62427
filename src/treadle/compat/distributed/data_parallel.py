"""The plan of ``DistributedDataParallel``, read from the wrapper."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


@final
@dataclass(frozen=True, slots=True)
class WrapperPlan:
    """``group``: the process group. ``parameters`` and ``buffers``: names within the module of what
    it averages and sends. ``device``: where inputs are moved, if anywhere. ``beyond``: what else it
    does, in words: none of it can be told from the wrapper."""

    group: Any
    parameters: frozenset[str]
    buffers: frozenset[str]
    device: torch.device | None
    beyond: tuple[str, ...]


def plan_of(wrapper: DistributedDataParallel) -> WrapperPlan:
    """The plan of a wrapper as it stands now."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters(remove_duplicate=False)
    devices = wrapper.device_ids
    return WrapperPlan(
        wrapper.process_group,
        frozenset([name for name, _ in named if name not in ignored]),
        frozenset([name for name, _ in wrapper.module.named_buffers() if name not in ignored]),
        torch.device(wrapper.device_type, devices[0]) if devices else None,
        tuple([words for holds, words in _beyond(wrapper) if holds]),
    )


def sends_buffers(wrapper: DistributedDataParallel, *, first: bool) -> bool:
    """Whether a forward gets the first rank's buffers. The ``first`` of a step always does, also
    after one without gradients, when the wrapper leaves it out once: which forward came before is
    no part of a step."""
    asked = vars(wrapper).get("forward_sync_buffers", wrapper.broadcast_buffers)
    return bool(asked and (first or wrapper.require_forward_param_sync))


def _beyond(wrapper: DistributedDataParallel) -> list[tuple[bool, str]]:
    return [
        (bool(wrapper._comm_hooks), "a communication hook"),
        (hasattr(wrapper, "buffer_hook"), "a hook that sends buffers"),
        (wrapper._join_config.enable, "join(), for ranks with uneven inputs"),
        (wrapper.mixed_precision is not None, "a mixed-precision policy of its own"),
        (bool(wrapper._delay_all_reduce_params), "gradients that are reduced late"),
        (wrapper._use_python_reducer, "the compiled autograd's reducer"),
    ]


def moved(value: object, device: torch.device | None) -> object:
    """A tensor on ``device``, where that is given; all else as it is."""
    return value.to(device) if device is not None and isinstance(value, Tensor) else value
