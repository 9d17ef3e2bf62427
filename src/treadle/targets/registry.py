"""The available targets. The registry is filled at import; users add theirs before they compile."""

from collections.abc import Mapping

import torch

from treadle.targets.cpu import CPU, CPU_MODEL
from treadle.targets.cuda import A100, CUDA, H100, H200, RTX4090
from treadle.targets.model import DeviceModel
from treadle.targets.record import DeviceTarget
from treadle.util.errors import PlanError, TreadleError

_TARGETS: dict[str, DeviceTarget] = {target.name: target for target in (CPU, CUDA)}
_DEFAULTS: Mapping[str, DeviceTarget] = {target.device: target for target in (CPU, CUDA)}

MODELS: Mapping[str, DeviceModel] = {
    **{model.name: model for model in (CPU_MODEL, H200, H100, A100, RTX4090)},
    "nvidia-h200": H200,
    "cuda": H200,
}
"""What steps can be planned for, by the name that ``treadle.plan`` takes."""


def add_target(target: DeviceTarget) -> None:
    """Let ``Options.target`` name another target; ``TreadleError`` TR-001 for a name that is
    taken."""
    if target.name in _TARGETS:
        raise TreadleError(
            f"there is a target {target.name!r} already",
            code="TR-001",
            remedy="give it another name",
        )
    _TARGETS[target.name] = target


def target_for(device: str | torch.device, name: str = "") -> DeviceTarget:
    """The target called ``name``, or that of steps on ``device``.

    ``TreadleError`` TR-001 for a name that there is not, or one for another device.
    """
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    if not name:
        return _DEFAULTS.get(kind, CUDA)
    found = _TARGETS.get(name)
    if found is None:
        known = ", ".join(sorted(_TARGETS))
        remedy = "add it with treadle.targets.registry.add_target before the first call"
        raise TreadleError(f"target={name!r} is not one of {known}", code="TR-001", remedy=remedy)
    if found.device != kind:
        text = f"target={name!r} is for tensors on {found.device}, but the step's are on {kind}"
        raise TreadleError(text, code="TR-001", remedy="move the model, or leave target out")
    return found


def device_of_kinds(kinds: frozenset[str]) -> str:
    """Where a step with tensors on all these kinds of device runs: on the accelerator."""
    others = sorted(kind for kind in kinds if not target_for(kind).on_host)
    return others[0] if others else CPU.device


def model_for(name: str) -> DeviceModel:
    """``"cuda:1"`` -> the model of that kind of device; ``PlanError`` TR-204 if there is none."""
    found = MODELS.get(name.lower().partition(":")[0])
    if found is None:
        raise PlanError(
            f"there is no device named {name!r}",
            code="TR-204",
            remedy=f"use one of {', '.join(dict.fromkeys(m.name for m in MODELS.values()))}",
        )
    return found
