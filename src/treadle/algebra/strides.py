"""Strides of shapes, whose sizes and strides may be decided by the call."""

from collections.abc import Sequence

from treadle.algebra.extents import Size, same, sample_of


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor that is made with this shape, row by row: (2, 3, 4) -> (12, 4, 1).

    An extent of 0 counts as 1, as in PyTorch. One that the call decides counts as itself: where it
    is 0 there is no element, and no stride is wrong.
    """
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent if isinstance(extent, Size) or extent != 0 else step
    return tuple(reversed(strides))


def strides_match(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both put each element of ``shape`` at the same place: a dim of one has no say.
    ``False`` where sizes decide it."""
    triples = zip(shape, strides, others, strict=True)
    return all(same(n, 1) or same(s, t) for n, s, t in triples)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie row by row without gaps. ``False`` where sizes decide it."""
    return strides_match(shape, strides, contiguous_strides(shape))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their storage without gaps or overlap, in any order of dims.
    ``False`` where sizes decide it."""
    dims = sorted(zip(strides, shape, strict=True), key=_by_samples)
    ordered = [extent for _, extent in reversed(dims)]
    strides = [stride for stride, _ in reversed(dims)]
    return strides_match(ordered, strides, contiguous_strides(ordered))


def _by_samples(dim: tuple[int, int]) -> tuple[int, int]:
    return sample_of(dim[0]), sample_of(dim[1])
