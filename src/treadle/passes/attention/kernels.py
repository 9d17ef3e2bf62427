"""The library kernels that replace attention that is written out, one for each kind of device.

::

    result, saved = attention(query, key, value, mask, scale)           [B, H, T, D]
    d_query, d_key, d_value = gradients(d_result, query, key, value, result, saved, mask, scale)
"""

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import fx

from treadle.compat.switches import uses_cudnn_attention
from treadle.graph.core.arguments import Argument
from treadle.graph.core.types import TensorType, type_of
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.passes.attention.forward import Forward
from treadle.passes.attention.rows import MaskedRows, fits
from treadle.targets.record import DeviceTarget
from treadle.targets.registry import target_for
from treadle.util.errors import require
from treadle.util.refusals import NoMatch

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True, slots=True)
class FusedCall:
    """A forward call with its operands. ``saved``: what its gradient is given beside them."""

    operands: tuple[fx.Node, fx.Node, fx.Node]
    mask: fx.Node | None
    scale: float | None
    result: fx.Node
    saved: tuple[Argument, ...]
    causal: bool = False


class FusedKernel(ABC):
    """A kernel of attention, forward and backward, with a mask that is added or without one."""

    @abstractmethod
    def check(self, forward: Forward, *, everywhere: bool) -> None:
        """``NoMatch`` in words where there is no kernel for ``forward``, or, unless
        ``everywhere``, where it was measured to lose."""

    @abstractmethod
    def mask_dtype(self, forward: Forward, rows: MaskedRows) -> torch.dtype:
        """Of the mask that is added; ``NoMatch`` in words where none that the kernel takes has its
        digits."""

    @abstractmethod
    def call(
        self,
        make: ReplacementBuilder,
        operands: tuple[fx.Node, fx.Node, fx.Node],
        mask: fx.Node | None,
        scale: float | None,
    ) -> FusedCall:
        """The forward pass."""

    @abstractmethod
    def gradients(
        self, make: ReplacementBuilder, d_result: fx.Node, call: FusedCall
    ) -> list[fx.Node]:
        """Those of query, key and value."""


@final
class HostFlash(FusedKernel):
    """PyTorch's kernel for CPUs. Scores, sums and the mask may be f32 for half precisions."""

    def check(self, forward: Forward, *, everywhere: bool) -> None:
        if everywhere:
            return
        _, rows, columns, width = forward.sizes
        dtype, masked = type_of(forward.result).dtype, bool(forward.scores.masks)
        least = least_scores(dtype, width, masked=masked)
        words = f"{rows} x {columns} scores of {dtype}: the call was measured to be slower"
        require(least is not None and rows * columns >= least, NoMatch, words)

    def mask_dtype(self, forward: Forward, rows: MaskedRows) -> torch.dtype:
        dtype, masks = type_of(forward.result).dtype, forward.scores.masks
        added = {type_of(mask.node).dtype for mask in masks if mask.add}
        exact = added <= {dtype} and all(fits(mask, dtype) for mask in masks if not mask.add)
        return dtype if exact else torch.float32

    def call(
        self,
        make: ReplacementBuilder,
        operands: tuple[fx.Node, fx.Node, fx.Node],
        mask: fx.Node | None,
        scale: float | None,
    ) -> FusedCall:
        options = _options(scale, mask)
        both = make.call(
            aten._scaled_dot_product_flash_attention_for_cpu.default, *operands, **options
        )
        result, logsumexp = make.items(both, 2)
        return FusedCall(operands, mask, scale, result, (logsumexp,))

    def gradients(
        self, make: ReplacementBuilder, d_result: fx.Node, call: FusedCall
    ) -> list[fx.Node]:
        target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (d_result, *call.operands, call.result, *call.saved, 0.0, False)
        return make.items(make.call(target, *args, **_options(call.scale, call.mask)), 3)


def _options(scale: float | None, mask: fx.Node | None) -> dict[str, Argument]:
    return {"scale": scale} if mask is None else {"scale": scale, "attn_mask": mask}


def least_scores(dtype: torch.dtype, width: int, *, masked: bool) -> int | None:
    """The size of a matrix of scores from which on the call loses nothing on CPUs; ``None`` where
    none was measured. Below it, products and one kernel of ours in the cache are faster.

    A whole step with the call, as a fraction of one without, by
    ``benchmarks/attention_written_out.py`` (without a mask, causal; PyTorch 2.13, one thread)::

        f32, 64 wide     256: 1.06, 0.96    384: 1.05, 0.89    512: 0.97, 0.83    1024: 0.83, 0.71
        f32, 128 wide                                          512: 1.10, 1.02    1024: 0.94, 0.89
        bf16, 64 wide    256: 1.56, 1.20                       512: 1.35, 0.95    1024: 1.08, 0.78
        f16, 64 wide                                           512: 0.41, 0.46    1024: 0.27, 0.35

    Never for f32: gradients of the call are up to five times as far from the exact ones as eager's.
    """
    match dtype:
        case torch.float16 if width <= 64:
            return 512 * 512
        case torch.bfloat16 if width <= 64 and masked:
            return 1024 * 1024
        case _:
            return None


_LEAST_ON_GPUS = 3 << 22
"""The scores of all heads from which on cuDNN's call loses nothing: 192 x 256 x 256. A whole step
with the call, as a fraction of one without, by ``benchmarks/attention_written_out.py --device cuda
--batch 16 --heads 12 --dtypes bfloat16`` on an H200 (without a mask, causal)::

    length 64: 1.27, 1.10    256: 1.02, 1.01    1024: 0.71, 0.67
"""


@final
@dataclass(frozen=True, slots=True)
class Cudnn(FusedKernel):
    """cuDNN's kernel: 16-bit operands, a mask of their dtype, f32 inside."""

    target: DeviceTarget

    def check(self, forward: Forward, *, everywhere: bool) -> None:
        self.require_fits(type_of(forward.result), forward.sizes[1:])
        heads, rows, columns, _ = forward.sizes
        few = f"{heads} x {rows} x {columns} scores: the call was measured to be slower"
        require(everywhere or heads * rows * columns >= _LEAST_ON_GPUS, NoMatch, few)

    def require_fits(self, kind: TensorType, sizes: tuple[int, int, int]) -> None:
        """``NoMatch`` in words where there is no kernel for ``sizes``, queries, keys and the width
        of a head, of a result of this ``kind``, or where PyTorch is told not to call it."""
        rows, columns, width = sizes
        off = "cuDNN's attention is switched off, or results are to be deterministic"
        require(uses_cudnn_attention(), NoMatch, off)
        require(kind.dtype in _HALF, NoMatch, f"of {kind.dtype}: cuDNN's kernel is for 16 bits")
        wide = f"heads are {width} wide: cuDNN's kernel takes multiples of 8 up to 128"
        require(width % 8 == 0 and width <= 128, NoMatch, wide)
        lone = f"{rows} x {columns} scores: cuDNN's kernel needs more than one of each"
        require(min(rows, columns) > 1, NoMatch, lone)
        capability = self.target.driver.capability(kind.device)
        old = f"cuDNN has no kernel for devices of compute capability {capability}"
        require(capability is None or capability >= (8, 0), NoMatch, old)

    def mask_dtype(self, forward: Forward, rows: MaskedRows) -> torch.dtype:
        dtype, masks = type_of(forward.result).dtype, forward.scores.masks
        words = f"the mask {masks[0].node} may be a finite number in all of a row"
        require(rows.proved or bool(rows.drops), NoMatch, words)
        for mask in masks if not rows.drops else ():
            words = f"cuDNN's kernel would round the mask {mask.node} to {dtype}"
            require(fits(mask, dtype), NoMatch, words)
        return dtype

    def call(
        self,
        make: ReplacementBuilder,
        operands: tuple[fx.Node, fx.Node, fx.Node],
        mask: fx.Node | None,
        scale: float | None,
        *,
        causal: bool = False,
    ) -> FusedCall:
        args = (*operands, mask, True, 0.0, causal, False)
        results = make.call(aten._scaled_dot_product_cudnn_attention.default, *args, scale=scale)
        result, logsumexp, seed, offset = (
            make.call(operator.getitem, results, at) for at in (0, 1, 6, 7)
        )
        return FusedCall(operands, mask, scale, result, (logsumexp, seed, offset), causal)

    def gradients(
        self, make: ReplacementBuilder, d_result: fx.Node, call: FusedCall
    ) -> list[fx.Node]:
        rows, columns = (type_of(operand).shape[2] for operand in call.operands[:2])
        beside = (call.mask, None, None, rows, columns, 0.0, call.causal)
        args = (d_result, *call.operands, call.result, *call.saved, *beside)
        target = aten._scaled_dot_product_cudnn_attention_backward.default
        return make.items(make.call(target, *args, scale=call.scale), 3)


def kernel_for(device: torch.device) -> FusedKernel:
    """The kernel for values on ``device``; ``NoMatch`` in words if there is none."""
    target = target_for(device)
    if target.on_host:
        return HostFlash()
    words = f"no call is known to be right and fast on {device.type}"
    require("cudnn" in target.libraries, NoMatch, words)
    return Cudnn(target)
