"""Mean pooling, resizing and the derivative of edge padding: which inputs an output reads."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from treadle.loop.expr import Array
from treadle.lower.context import LoweringContext
from treadle.lower.operators.reductions import mean
from treadle.lower.operators.sparse_maps import Row, SparseMap, require_known, resampled
from treadle.lower.registry import Value, aten_op, lowers

aten = torch.ops.aten


def spread(values: Sequence[int] | int, rank: int, default: Sequence[int] = ()) -> list[int]:
    """``3``, ``[3]`` -> ``[3, 3]`` for two dims; nothing given -> ``default``."""
    listed = [values] if isinstance(values, int) else list(values)
    listed = listed or list(default)
    return listed * rank if len(listed) == 1 else listed


# --- pooling by mean ------------------------------------------------------------------------


def _averages(
    extent: int, out: int, size: int, stride: int, pad: int, include_pad: bool, override: bool
) -> SparseMap:
    """Output ``j`` is the mean of ``x[j * stride - pad ...]``; ``override``: the sum of it."""
    require_known(extent, out)
    rows: list[Row] = []
    for j in range(out):
        start = j * stride - pad
        end = min(start + size, extent + pad)
        inside = range(max(start, 0), min(end, extent))
        count = end - start if include_pad else len(inside)
        weight = 1.0 if override else 1.0 / max(count, 1)
        rows.append(dict.fromkeys(inside, weight))
    return SparseMap.of(extent, rows)


def _average_maps(
    shape: Sequence[int],
    out: Sequence[int],
    rank: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_pad: bool,
    divisor: int | None,
) -> list[SparseMap]:
    sizes = spread(kernel, rank)
    steps, pads = spread(stride, rank, sizes), spread(padding, rank, (0,))
    return [
        _averages(n, m, k, s, p, include_pad, divisor is not None)
        for n, m, k, s, p in zip(shape[-rank:], out[-rank:], sizes, steps, pads, strict=True)
    ]


def _register_average(rank: int) -> None:
    @lowers(aten_op(f"avg_pool{rank}d.default"))
    def forward(
        context: LoweringContext,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        include_pad: bool = True,
        divisor: int | None = None,
    ) -> Array:
        """``out[j] = sum{k} x[j * stride - pad + k] / count``."""
        sparse_maps = _average_maps(
            x.shape, context.shape, rank, kernel, stride, padding, include_pad, divisor
        )
        return resampled(context, x, sparse_maps, 1.0 / divisor if divisor else 1.0)

    @lowers(aten_op(f"avg_pool{rank}d_backward.default"))
    def backward(
        context: LoweringContext,
        grad: Value,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        include_pad: bool,
        divisor: int | None,
    ) -> Array:
        sparse_maps = _average_maps(
            x.shape, grad.shape, rank, kernel, stride, padding, include_pad, divisor
        )
        flipped = [sparse_map.transposed() for sparse_map in sparse_maps]
        return resampled(context, grad, flipped, 1.0 / divisor if divisor else 1.0)


def _adaptive(extent: int, out: int) -> SparseMap:
    """Output ``j`` is the mean of ``x[j * n // m ... ceil((j + 1) * n / m)]``."""
    require_known(extent, out)
    rows: list[Row] = []
    for j in range(out):
        inside = range(j * extent // out, -(-(j + 1) * extent // out))
        rows.append(dict.fromkeys(inside, 1.0 / max(len(inside), 1)))
    return SparseMap.of(extent, rows)


def _register_adaptive(rank: int) -> None:
    name = f"_adaptive_avg_pool{rank}d"

    @lowers(aten_op(f"{name}.default"))
    def forward(context: LoweringContext, x: Value, size: Sequence[int]) -> Value:
        if all(m == 1 for m in context.shape[-rank:]):
            return mean(context, x, tuple(range(len(x.shape) - rank, len(x.shape))), True)
        pairs = zip(x.shape[-rank:], context.shape[-rank:], strict=True)
        return resampled(context, x, [_adaptive(n, m) for n, m in pairs])

    @lowers(aten_op(f"{name}_backward.default"))
    def backward(context: LoweringContext, grad: Value, x: Value) -> Array:
        pairs = zip(x.shape[-rank:], grad.shape[-rank:], strict=True)
        return resampled(context, grad, [_adaptive(n, m).transposed() for n, m in pairs])


# --- resizing -------------------------------------------------------------------------------


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _nearest(
    extent: int, out: int, scale: float | None, align: bool, dtype: torch.dtype, *, exact: bool
) -> SparseMap:
    """Output ``j`` is ``x[floor(j * n / m)]``, or of its centre: in float32, as in eager."""
    ratio = _float32(1.0 / scale if scale else extent / out)
    places = torch.arange(out, dtype=torch.float32)
    found = ((places + 0.5 if exact else places) * ratio).floor().long().clamp(0, extent - 1)
    return SparseMap.of(extent, [{place: 1.0} for place in found.tolist()])


def _sources(
    extent: int, out: int, scale: float | None, align: bool, dtype: torch.dtype
) -> list[float]:
    """Where output ``j`` lies among the inputs."""
    places = torch.arange(out, dtype=dtype)
    if align:
        ratio = torch.tensor((extent - 1) / (out - 1) if out > 1 else 0.0, dtype=dtype)
        return (places * ratio).tolist()
    ratio = torch.tensor(1.0 / scale if scale else extent / out, dtype=dtype)
    return ((places + 0.5) * ratio - 0.5).tolist()


def _linear(
    extent: int, out: int, scale: float | None, align: bool, dtype: torch.dtype
) -> SparseMap:
    """Output ``j`` between its two neighbours, by distance."""
    rows: list[Row] = []
    for source in _sources(extent, out, scale, align, dtype):
        at = max(source, 0.0)
        low = min(math.floor(at), extent - 1)
        high = min(low + 1, extent - 1)
        share = min(max(at - low, 0.0), 1.0)
        row: Row = {low: 1.0 - share}
        row[high] = row.get(high, 0.0) + share
        rows.append({place: weight for place, weight in row.items() if weight})
    return SparseMap.of(extent, rows)


_CUBIC = -0.75


def _cubic(
    extent: int, out: int, scale: float | None, align: bool, dtype: torch.dtype
) -> SparseMap:
    """Output ``j`` from four neighbours; places outside are those at the edge."""

    def near(x: float) -> float:
        return ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1

    def far(x: float) -> float:
        return ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC

    rows: list[Row] = []
    for at in _sources(extent, out, scale, align, dtype):
        low = math.floor(at)
        t = at - low
        row: Row = {}
        for place, weight in enumerate((far(t + 1), near(t), near(1 - t), far(2 - t)), low - 1):
            inside = min(max(place, 0), extent - 1)
            row[inside] = row.get(inside, 0.0) + weight
        rows.append({place: weight for place, weight in row.items() if weight})
    return SparseMap.of(extent, rows)


Make = Callable[[int, int, float | None, bool, torch.dtype], SparseMap]
"""From the extents of input and output, the scale, whether corners align, and the dtype."""


def _register_resizing(name: str, rank: int, make: Make, *, aligns: bool) -> None:
    """``aligns``: whether its calls say if corners align, ahead of the scales."""

    def maps(
        small: Sequence[int], large: Sequence[int], dtype: torch.dtype, options: Sequence[Any]
    ) -> list[SparseMap]:
        align, *scales = options if aligns else (False, *options)
        precise = dtype if dtype is torch.float64 else torch.float32
        require_known(*small[-rank:], *large[-rank:])
        parts = zip(small[-rank:], large[-rank:], scales or [None] * rank, strict=True)
        return [make(n, m, scale, align, precise) for n, m, scale in parts]

    @lowers(aten_op(f"{name}.default"))
    def forward(
        context: LoweringContext, x: Value, size: Sequence[int], *options: float | None
    ) -> Array:
        return resampled(context, x, maps(x.shape, context.shape, context.dtype, options))

    @lowers(aten_op(f"{name}_backward.default"))
    def backward(
        context: LoweringContext,
        grad: Value,
        size: Sequence[int],
        inputs: Sequence[int],
        *options: float | None,
    ) -> Array:
        sparse_maps = maps(context.shape, grad.shape, context.dtype, options)
        return resampled(context, grad, [sparse_map.transposed() for sparse_map in sparse_maps])


# --- padding --------------------------------------------------------------------------------


def _replicated(extent: int, before: int, after: int) -> SparseMap:
    """Padded place ``j`` is ``x[min(max(j - before, 0), n - 1)]``."""
    require_known(extent)
    out = extent + before + after
    rows = [{min(max(j - before, 0), extent - 1): 1.0} for j in range(out)]
    return SparseMap.of(extent, rows)


def _register_replication(rank: int) -> None:
    @lowers(aten_op(f"replication_pad{rank}d_backward.default"))
    def backward(context: LoweringContext, grad: Value, x: Value, pad: Sequence[int]) -> Array:
        pairs = [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(rank))]
        sizes = zip(x.shape[-rank:], pairs, strict=True)
        return resampled(context, grad, [_replicated(n, *pair).transposed() for n, pair in sizes])


def _register() -> None:
    for rank in (2, 3):
        _register_average(rank)
        _register_adaptive(rank)
    for rank in (1, 2, 3):
        for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
            nearest = functools.partial(_nearest, exact=exact)
            _register_resizing(f"{name}{rank}d", rank, nearest, aligns=False)
        _register_replication(rank)
    _register_resizing("upsample_linear1d", 1, _linear, aligns=True)
    _register_resizing("upsample_bilinear2d", 2, _linear, aligns=True)
    _register_resizing("upsample_trilinear3d", 3, _linear, aligns=True)
    _register_resizing("upsample_bicubic2d", 2, _cubic, aligns=True)


_register()
