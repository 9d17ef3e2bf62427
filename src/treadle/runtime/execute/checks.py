"""Whether the inputs of a call are what an artifact was compiled for."""

import torch
from torch import Tensor

from treadle.runtime.execute.bindings import same_strides
from treadle.runtime.store.artifact import BufferSpec
from treadle.util.errors import RuntimeFailure


def check_layout(tensor: Tensor, spec: BufferSpec, device: torch.device) -> None:
    """TR-401 unless ``tensor`` has the strides of ``spec`` and is where the step expects it."""
    if tensor.stride() != spec.strides and not same_strides(tensor, spec):
        raise mismatch(tensor, spec)
    wanted = spec.device or device.type
    if tensor.device.type != wanted and not (tensor.ndim == 0 and tensor.is_cpu):
        raise mismatch(tensor, spec)
    if tensor.is_conj() or tensor.is_neg():
        raise RuntimeFailure(
            f"input {spec.name} is a lazy conjugate or negative",
            code="TR-401",
            remedy="pass tensor.resolve_conj().resolve_neg()",
        )


def mismatch(tensor: Tensor, spec: BufferSpec) -> RuntimeFailure:
    """TR-401: what was given, and what the step was compiled for."""
    dense = tensor.layout is torch.strided
    layout = f"strides {tensor.stride()}" if dense else str(tensor.layout)
    actual = f"{tensor.dtype} {tuple(tensor.shape)} {layout} on {tensor.device}"
    return RuntimeFailure(
        (
            f"input {spec.name} is {actual}, but the step was compiled for {spec.dtype} "
            f"{spec.shape} strides {spec.strides}"
        )
        + (f" on {spec.device}" if spec.device else ""),
        code="TR-401",
        remedy="pass a tensor of that layout, or compile the step for this one",
    )


def wrong_count(actual: int, expected: int) -> RuntimeFailure:
    """TR-401: too many inputs, or too few."""
    return RuntimeFailure(
        f"{actual} inputs were given, but the step has {expected}",
        code="TR-401",
        remedy="pass the inputs that the artifact lists, in that order",
    )
