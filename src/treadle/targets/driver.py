"""Queries to the device itself while steps are compiled and run."""

from typing import Protocol

import torch


class Driver(Protocol):
    """One kind of device, as PyTorch lets it be asked."""

    def hardware(self, device: torch.device) -> str:
        """The model and what it can do, in words that differ where compiled code may; empty where
        the processor of the host says it all."""
        ...

    def capability(self, device: torch.device) -> tuple[int, int] | None:
        """What the device's instructions are called by its maker, such as ``(9, 0)``; ``None``
        where nobody numbers them, or where there is no such device to ask."""
        ...

    def memory(self, device: torch.device) -> int:
        """Bytes there are; 0: unknown."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until everything that was started has happened."""
        ...

    def is_recording(self) -> bool:
        """Whether what is launched now is recorded and not done."""
        ...

    def generators(self, device: torch.device) -> list[int]:
        """The numbers of the devices whose generators a call may draw from, beside the host's."""
        ...

    def give_back(self) -> None:
        """Memory that nobody uses and that is kept for later goes back to the device."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """So many bytes on the host that the device reads and writes by itself."""
        ...
