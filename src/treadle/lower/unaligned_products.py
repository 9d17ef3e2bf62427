"""Large products on a GPU with unaligned rows, of matrices with an external layout: some rows at a
time, copied through padded matrices.

::

    before:  y = mm(h, w)                                   y: bf16[16384, 50257], returned
    after:   v[:, :50257] <- w;  v[:, 50257:] <- 0          v: bf16[768, 50264]
             t = mm(h[:1280], v);  y[:1280] <- t[:, :50257]
             t = mm(h[1280:2560], v);  y[1280:2560] <- t[:, :50257]      and so on

``padding.py`` pads treadle's own matrices to whole units. Results and arguments of a step have
eager's layout: the logits of a model, and their gradient. A library takes up to seven times as long
for such a product as for one that is a little larger (decision 0026), far more than copies take.
Because a few rows at a time are copied, the matrix is never in memory twice.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch

from treadle.algebra.extents import Size
from treadle.loop.expr import Array
from treadle.loop.program import Call, Compute, Origin, Step, TensorRef
from treadle.lower.context import Builder, Layout, element, fresh_axes

_PIECE = 1 << 27
"""Bytes of what is copied at a time, about."""
_ROWS = 128
"""A piece has a multiple of them: tiles of a library's kernels."""
_LEAST = 1 << 31
"""Multiplications from which a product takes longer than the launches of its pieces."""
_REUSED = 256
"""Multiplications with each number that is copied: from there on copies are the smaller part."""
_HALF = (torch.bfloat16, torch.float16)
_TAKEN = ("aten.mm.out", "aten.addmm.out")


def pad_unaligned_products(builder: Builder) -> None:
    """Put padded products, a piece at a time, in the place of large unaligned ones, where
    ``aligned_bytes`` of the target says that it matters."""
    if not builder.target.aligned_bytes or builder.library:
        return
    numbers = (step.origin.chunk for step in builder.steps)
    chunks = itertools.count(1 + max((n for n in numbers if n is not None), default=-1))
    steps: list[Step] = []
    for step in builder.steps:
        product = _Product.of(builder, step) if isinstance(step, Call) else None
        steps += [step] if product is None else _Pieces(builder, product, chunks).steps()
    builder.steps[:] = steps


@dataclass(frozen=True, slots=True)
class _Product:
    """``out[m, n] = left[m, k] @ right[k, n] + bias[n]``. ``k`` and ``n``: padded to whole units.
    ``copies_…``: whether a matrix is copied, since it has another size or is not aligned."""

    call: Call
    left: TensorRef
    right: TensorRef
    out: TensorRef
    bias: TensorRef | None
    k: int
    n: int
    copies_left: bool
    copies_right: bool
    copies_out: bool

    @classmethod
    def of(cls, builder: Builder, call: Call) -> Self | None:
        """The product of a call, if it is an unaligned one that repays its copies."""
        *bias, left, right = call.args if call.out in _TAKEN else (None, None)
        if call.origin.chunk is not None or not isinstance(left, TensorRef):
            return None  # pieces of a chunk are ours
        (name,) = call.outputs
        assert isinstance(right, TensorRef)
        assert name is not None
        out = call.into or builder.whole(name)
        added = bias[0] if bias else None
        sizes = (*out.shape, *left.shape)
        if left.dtype not in _HALF or any(isinstance(size, Size) for size in sizes):
            return None
        if added is not None and (not isinstance(added, TensorRef) or added.shape != out.shape[1:]):
            return None
        product = cls._of(builder, call, left, right, out, added)
        if product is None or product.copies_left or product.copies_out or added is not None:
            return product
        left, right, out = map(_transposed, (right, left, out))  # what is copied is cut in rows
        return cls._of(builder, call, left, right, out, None)

    @classmethod
    def _of(
        cls,
        builder: Builder,
        call: Call,
        left: TensorRef,
        right: TensorRef,
        out: TensorRef,
        bias: TensorRef | None,
    ) -> Self | None:
        matrices = left, right, out
        if not all(1 in matrix.strides for matrix in matrices):
            return None
        unit = builder.target.aligned_bytes // left.dtype.itemsize
        (m, k), n = left.shape, right.shape[1]
        wide_k = _rounded(k, unit) if _by_rows(left) or not _by_rows(right) else k
        wide_n = _rounded(n, unit) if _by_rows(right) or _by_rows(out) else n
        padded = (m, wide_k), (wide_k, wide_n), (m, wide_n)
        copies = [
            matrix.shape != shape or not _is_aligned(matrix, builder.target.aligned_bytes)
            for matrix, shape in zip(matrices, padded, strict=True)
        ]
        copied = sum(itertools.compress((matrix.numel for matrix in matrices), copies))
        if not copied or m * k * n < max(_LEAST, _REUSED * copied):
            return None
        return cls(call, left, right, out, bias, wide_k, wide_n, *copies)

    def rows(self) -> Iterator[tuple[int, int]]:
        """From where to where the pieces go."""
        widths = [self.k] * self.copies_left + [self.n] * self.copies_out
        m = self.left.shape[0]
        rows = m
        if widths:
            fitting = _PIECE // (max(widths) * self.left.dtype.itemsize)
            rows = max(fitting // _ROWS, 1) * _ROWS
        for start in range(0, m, rows):
            yield start, min(start + rows, m)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Writes the steps of one product."""

    builder: Builder
    product: _Product
    chunks: Iterator[int]

    def steps(self) -> list[Step]:
        """In the place of the call."""
        product, before = self.product, len(self.builder.steps)
        origin, right, bias = product.call.origin, product.right, product.bias
        if product.copies_right:
            right = self._padded(right, (product.k, product.n), origin)
        if bias is not None and bias.shape != (product.n,):
            bias = self._padded(bias, (product.n,), origin)
        for start, stop in product.rows():
            chunk = replace(origin, chunk=next(self.chunks))
            self._piece(bias, right, start, stop, chunk)
        steps = self.builder.steps[before:]
        del self.builder.steps[before:]
        return steps

    def _piece(
        self, bias: TensorRef | None, right: TensorRef, start: int, stop: int, origin: Origin
    ) -> None:
        product, builder = self.product, self.builder
        left, out = (_rows_of(matrix, start, stop) for matrix in (product.left, product.out))
        if product.copies_left:
            left = self._padded(left, (stop - start, product.k), origin)
        copies_out = product.copies_out
        target = self._like(out, (stop - start, product.n)) if copies_out else out
        args = (left, right) if bias is None else (bias, left, right)
        call = replace(product.call, args=args, outputs=(target.buffer,), origin=origin)
        builder.steps.append(replace(call, into=None if copies_out else out))
        if copies_out:
            self._copy(replace(target, shape=out.shape), out, origin)

    def _padded(self, ref: TensorRef, shape: tuple[int, ...], origin: Origin) -> TensorRef:
        """A copy with zeros up to ``shape``, aligned."""
        whole = self._like(ref, shape)
        copy = replace(whole, shape=ref.shape)
        self._copy(ref, copy, origin)
        self.builder.fill_margins(copy, origin)
        return whole

    def _like(self, ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
        """A new buffer, row by row or column by column as ``ref`` is."""
        unit = self.builder.target.aligned_bytes // ref.dtype.itemsize
        strides = (1,)
        if len(shape) == 2:
            rows, columns = shape
            along = (_rounded(columns, unit), 1), (1, _rounded(rows, unit))
            strides = along[0] if _by_rows(ref) else along[1]
        name = f"{self.product.out.buffer}_piece"
        return self.builder.buffer(name, ref.dtype, shape, layout=Layout(strides, shape))

    def _copy(self, source: TensorRef, target: TensorRef, origin: Origin) -> None:
        axes = fresh_axes(source.shape)
        self.builder.steps.append(Compute(target, Array(axes, element(source, axes)), origin))


def _rounded(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _by_rows(ref: TensorRef) -> bool:
    return ref.strides[-1] == 1


def _is_aligned(matrix: TensorRef, unit: int) -> bool:
    """Whether its rows, or its columns, begin at multiples of ``unit`` bytes."""
    distance = max(matrix.strides)
    return not any(n * matrix.dtype.itemsize % unit for n in (distance, matrix.offset))


def _transposed(matrix: TensorRef) -> TensorRef:
    return replace(matrix, shape=matrix.shape[::-1], strides=matrix.strides[::-1])


def _rows_of(matrix: TensorRef, start: int, stop: int) -> TensorRef:
    shape = (stop - start, matrix.shape[1])
    return replace(matrix, shape=shape, offset=matrix.offset + start * matrix.strides[0])
