"""What runs inside is not changed by the modes around it."""

from types import TracebackType
from typing import final

import torch


@final
class Undisturbed:
    """Gradients are not recorded, and nothing is cast: casts are steps of an artifact already, so a
    surrounding autocast must not add any. ``kind``: the type of the device."""

    __slots__ = ("_autocast", "_kind", "_recorded")

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._recorded = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        on = torch.is_autocast_enabled(self._kind)
        self._autocast = torch.autocast(self._kind, enabled=False) if on else None
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, trace)
        torch.set_grad_enabled(self._recorded)
