"""CPUs: generated C++, run by OpenMP's threads."""

import torch

from treadle.targets.model import DeviceModel
from treadle.targets.record import DeviceTarget

CPP = "cpp"
_FLOPS = {torch.float32: 6e10, torch.bfloat16: 3e10, torch.float64: 3e10}


class _Host:
    """Nothing to wait for, nothing to ask."""

    def hardware(self, device: torch.device) -> str:
        return ""

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        return None

    def memory(self, device: torch.device) -> int:
        return 0

    def synchronize(self, device: torch.device) -> None:
        return None

    def is_recording(self) -> bool:
        return False

    def generators(self, device: torch.device) -> list[int]:
        return []

    def give_back(self) -> None:
        return None

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


HOST = _Host()
CPU_MODEL = DeviceModel("cpu", _FLOPS, 1e10, 1e-9, 5056)
CPU = DeviceTarget(
    name="cpu",
    device="cpu",
    language=CPP,
    workers="threads",
    model=CPU_MODEL,
    driver=HOST,
    libraries=frozenset({"onednn"}),
    on_host=True,
    sequential_rng=True,
    draws=True,
    any_size=True,
)
