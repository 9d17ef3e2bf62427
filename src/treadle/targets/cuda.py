"""NVIDIA GPUs: generated Triton."""

from collections.abc import Mapping

import torch

from treadle.targets.links import ETHERNET, HDR, NDR, NVLINK3, NVLINK4, PCIE4, Link
from treadle.targets.locked_memory import locked_memory
from treadle.targets.model import FLOAT8, DeviceModel
from treadle.targets.record import DeviceTarget

TRITON = "triton"


class _Cuda:
    """What CUDA says, through PyTorch."""

    def hardware(self, device: torch.device) -> str:
        gpu = torch.cuda.get_device_properties(device)
        return (
            f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count} x {gpu.total_memory}, "
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        )

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None

    def memory(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def generators(self, device: torch.device) -> list[int]:
        return [torch.cuda.current_device()]

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return locked_memory(nbytes)


def _rates(
    full: float, half: float, double: float, float8: float = 0.0
) -> Mapping[torch.dtype, float]:
    """``float8``: 0 for GPUs that do not multiply it."""
    rates = {torch.float32: full, torch.float64: double}
    rates |= {torch.bfloat16: half, torch.float16: half}
    return rates | (dict.fromkeys(FLOAT8, float8) if float8 else {})


_HIDDEN = 0.6


def _gpu(
    name: str,
    rates: Mapping[torch.dtype, float],
    bandwidth: float,
    links: tuple[Link, Link, float],
    *,
    reserve: int,
    memory: int,
) -> DeviceModel:
    reserved, bytes_ = reserve << 20, memory << 30
    link, network, host_link = links
    return DeviceModel(
        name,
        rates,
        bandwidth,
        reserve=reserved,
        memory=bytes_,
        blocks=True,
        tables=True,
        hidden=_HIDDEN,
        host_link=host_link,
        link=link,
        network=network,
        host_ranks=8,
    )


_HOPPER, _AMPERE = (NVLINK4, NDR, 5e10), (NVLINK3, HDR, 2.4e10)
_ADA = (PCIE4, ETHERNET, 2.4e10)
"""Links to the others of a host, to other hosts, and bytes per second to the host itself each way:
an H200 copied 55 GB/s from and to locked memory."""
H200 = _gpu("h200", _rates(5e13, 7e14, 5e13, 1.3e15), 4e12, _HOPPER, reserve=33, memory=139)
H100 = _gpu("h100", _rates(5e13, 6.5e14, 5e13, 1.2e15), 2.8e12, _HOPPER, reserve=33, memory=79)
A100 = _gpu("a100", _rates(1.6e13, 2.3e14, 1.6e13), 1.7e12, _AMPERE, reserve=9, memory=79)
RTX4090 = _gpu("rtx4090", _rates(6e13, 1.4e14, 1.1e12, 2.6e14), 8.8e11, _ADA, reserve=9, memory=23)
"""About 75 to 85 % of what the data sheets give for dense products and memory (the H200
measured), and what PyTorch can allocate of the memory. Of float8 they are estimates, two thirds of
what the data sheets give on Hopper: the present GPU is measured."""

CUDA = DeviceTarget(
    name="cuda",
    device="cuda",
    language=TRITON,
    workers="programs",
    model=H200,
    driver=_Cuda(),
    libraries=frozenset({"cublas", "cudnn"}),
    aligned_bytes=16,
    any_size=True,
    wide_products=True,
)
