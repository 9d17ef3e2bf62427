"""Tables of addresses on a device, for launches of many instances at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.targets.registry import target_for


class Tables:
    """Makes tables without waiting for the device. Nothing can be copied while launches are
    recorded. So the tables of a recording are allocated before it, belong to it, and are filled
    after it."""

    def __init__(self) -> None:
        self._empty: list[tuple[Tensor, list[int]]] = []

    def is_recording(self, device: torch.device) -> bool:
        """Whether the current stream records launches instead of running them."""
        return target_for(device).driver.is_recording()

    def of(self, addresses: Sequence[int], device: torch.device) -> Tensor:
        """``table[i] = addresses[i]``, int64, for what the current stream runs next."""
        if target_for(device).on_host:
            return torch.tensor(addresses, dtype=torch.int64)
        table = torch.empty(len(addresses), dtype=torch.int64, device=device)
        _fill(table, addresses)
        return table

    def fill_later(self, table: Tensor, addresses: Sequence[int]) -> None:
        """``table[i] = addresses[i]`` once the recording is done."""
        self._empty.append((table, list(addresses)))

    def settle(self) -> list[Tensor]:
        """Fill the tables of a recording, which must be kept as long as it is."""
        tables = [table for table, _ in self._empty]
        for table, addresses in self._empty:
            _fill(table, addresses)
        self._empty.clear()
        return tables

    def forget(self) -> None:
        """A recording failed: nobody reads its tables."""
        self._empty.clear()


def _fill(table: Tensor, addresses: Sequence[int]) -> None:
    staged = torch.tensor(addresses, dtype=torch.int64, pin_memory=True)
    table.copy_(staged, non_blocking=True)
