"""Strides of shapes, whose sizes and strides may be dynamic."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, final

from treadle.algebra.extents import Size, same, sample_of, with_dims


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


StrideForm = tuple[int, tuple[tuple[int, int], ...]]
"""A stride as a number times the product of ``size of a dim + a number``, over pairs of both."""

_CUT = 2
"""Up to so many elements less than a row has, a dim is taken for a part of the row, whatever its
length; with more, rows are taken to be of one length."""


def stride_forms(shape: Sequence[int], strides: Sequence[int]) -> tuple[StrideForm, ...]:
    """How strides follow from sizes, for tensors of other sizes that lie alike.

    ::

        (8, 32)  (32, 1)      (1, ((1, 0),))  (1, ())     rows without gaps
        (8, 31)  (32, 1)      (1, ((1, 1),))  (1, ())     all but one of each row's
        (8, 12)  (32, 1)      (32, ())        (1, ())     the first of rows of 32
        (8, 32)  (1, 8)       (1, ())  (1, ((0, 0),))     columns
    """
    forms: list[StrideForm] = [(stride, ()) for stride in strides]
    inner: int | None = None  # the dim within which there is no other, of those looked at
    places = [at for at in reversed(range(len(shape))) if strides[at]]
    for at in sorted(places, key=lambda at: (strides[at], shape[at])):
        if inner is not None and strides[at] % strides[inner] == 0:
            left = strides[at] // strides[inner] - max(shape[inner], 1)
            number, factors = forms[inner]
            if 0 <= left <= _CUT:
                forms[at] = number, (*factors, (inner, left))
        inner = at
    return tuple(forms)


def strides_of_forms(forms: Sequence[StrideForm], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape that lies so."""
    extents = [extent if isinstance(extent, Size) else max(extent, 1) for extent in shape]
    return tuple(
        number * math.prod(extents[dim] + left for dim, left in factors)
        for number, factors in forms
    )


@final
class SizedLayout(NamedTuple):
    """A shape, with a ``Size`` where calls change it, and how strides follow from it."""

    shape: tuple[int, ...]
    forms: tuple[StrideForm, ...]
    part: Mapping[str, Size] = MappingProxyType({})
    """By name the dims whose sizes are but a part of what calls may have, as that part."""

    @property
    def traced(self) -> tuple[int, ...]:
        """The shape in that part."""
        return tuple(with_dims(size, self.part) for size in self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of ``traced``."""
        return strides_of_forms(self.forms, self.traced)
