"""Packed sequences while a step is traced: padded rows and lengths under another name.

``pack_padded_sequence`` gives rows whose number depends on values. Here it gives handles, tensors
that stand for them: recurrent layers and ``pad_packed_sequence`` know what they mean, and any other
use is refused (TR-141), because it would see rows that eager does not have.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.capture.explain_errors import here
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.compat.packed import PACK, UNPACK
from treadle.graph.custom_ops.packed import AT_MOST, EQUAL, unpacked
from treadle.util.errors import CaptureError

_KNOWN = "dtype", "device", "is_cuda", "requires_grad", "ndim"
_HARMLESS = frozenset(
    {Tensor.dim, Tensor.is_floating_point, *(getattr(Tensor, n).__get__ for n in _KNOWN)}
)


_BETWEEN = (CodeOwner.OURS, CodeOwner.TORCH)


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """What a handle stands for: ``padded`` [T, B, ...] and the lengths of its sequences."""

    handle: Tensor
    padded: Tensor
    lengths: Tensor


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """``batch_sizes``: how many sequences are that long, of which only the first is known."""

    handle: Tensor
    rows: int
    lengths: Tensor


class Longest(int):
    """The length of the longest sequence, as far as is known: the time of the batch. Whoever pads
    without a total length gets it, and the call checks it."""


def _pads() -> bool:
    """Whether the caller is ``pad_packed_sequence``."""
    frame = sys._getframe()
    while frame is not None and code_owner(frame.f_code.co_filename) in _BETWEEN:
        if frame.f_code is nn.utils.rnn.pad_packed_sequence.__code__:
            return True
        frame = frame.f_back
    return False


class PackedRows:
    """The handles of one trace, by their identity."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._sizes: dict[int, Sizes] = {}

    def rows_of(self, value: object) -> Rows | None:
        """What ``value`` stands for, if it is packed rows."""
        return self._rows.get(id(value))

    def instead_of(
        self,
        function: Callable[..., object],
        leaves: list[object],
        kwargs: Mapping[str, object] | None,
    ) -> Callable[..., object]:
        """What to call instead of ``function``, if it packs or its arguments are packed."""
        if function == PACK:
            return self._pack
        held = [leaf for leaf in leaves if id(leaf) in self._rows or id(leaf) in self._sizes]
        if not held:
            return function
        if function == UNPACK:
            return self._unpack
        if function == Tensor.__getitem__ and id(leaves[0]) in self._sizes and leaves[1] == 0:
            return lambda sizes, _: self._sizes[id(sizes)].rows
        if function == Tensor.size and id(leaves[0]) in self._sizes and _pads():
            return lambda sizes, at: Longest(sizes.shape[at])
        known = function == Tensor.size and leaves[1:] in ([-1], [1])
        if function in _HARMLESS or known:
            return function
        raise _is_packed()

    def refuse(self, leaves: list[object]) -> None:
        """TR-141 if packed rows leave the step."""
        if any(id(leaf) in self._rows or id(leaf) in self._sizes for leaf in leaves):
            raise _is_packed()

    def handle_of(self, padded: Tensor, lengths: Tensor) -> Tensor:
        """A handle for rows of ``padded`` [T, B, ...]."""
        count = padded.shape[0] * padded.shape[1]
        handle = padded.detach().new_empty((count, *padded.shape[2:]))
        self._rows[id(handle)] = Rows(handle, padded, lengths)
        return handle

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        x = x.transpose(0, 1) if batch_first else x
        if lengths.dim() != 1 or lengths.shape[0] != x.shape[1]:
            raise ValueError(
                f"Expected `len(lengths)` to be equal to batch_size, but got {lengths.shape[0]} "
                f"(batch_size={x.shape[1]})"
            )
        sizes = torch.empty(x.shape[0], dtype=torch.int64)
        self._sizes[id(sizes)] = Sizes(sizes, x.shape[1], lengths)
        return self.handle_of(x, lengths), sizes

    def _unpack(
        self, data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[Tensor, Tensor]:
        rows = self._rows.get(id(data))
        if rows is None:
            raise _is_packed()
        padded, lengths = rows.padded, rows.lengths
        trailing = padded.dim() - 2
        if trailing != 1:
            padded = padded.reshape(*padded.shape[:2], -1)
        fits = EQUAL if isinstance(total, Longest) else AT_MOST
        padded = F.pad(padded, (0, 0, 0, 0, 0, total - padded.shape[0]))
        batch = unpacked(padded, lengths, float(value), fits)
        if trailing != 1:
            batch = batch.reshape(*batch.shape[:2], *rows.padded.shape[2:])
        return (batch.transpose(0, 1) if batch_first else batch), lengths


def _is_packed() -> CaptureError:
    return CaptureError(
        "the step uses the rows of a packed sequence directly: their number depends on the "
        "lengths, which are unknown during capture",
        code="TR-141",
        where=here(),
        remedy="unpack first (pad_packed_sequence), and mask the padding",
    )
