"""Strides of plain and of symbolic sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.algebra.extents import Size, sample_of
from treadle.algebra.strides import (
    contiguous_strides,
    is_contiguous,
    is_dense,
    stride_forms,
    strides_match,
    strides_of_forms,
)

T = Size.dim("t", 0, 9, 4)
"""May be 0, so that whether it is larger than 1 has no answer."""


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0, 0), (1, 5, 1)])
def test_contiguous_strides_are_those_of_pytorch(shape):
    strides = torch.empty(shape).stride()
    assert contiguous_strides(shape) == strides
    assert is_contiguous(shape, strides)
    assert is_dense(shape, strides)


def test_a_symbolic_extent_counts_as_itself():
    assert contiguous_strides((2, T, 3)) == (3 * T, 3, 1)
    assert is_contiguous((2, T, 3), (3 * T, 3, 1))
    assert is_dense((T, 2, 3), (3, 3 * T, 1))


def test_a_dim_of_one_has_no_say():
    assert strides_match((1, 4), (7, 1), (4, 1))
    assert not strides_match((2, 4), (7, 1), (4, 1))
    assert is_contiguous((4, 1, 3), (3, 100, 1))


def test_what_sizes_decide_is_not_taken_for_true():
    assert not strides_match((T, 2), (2, 1), (T, 1))
    assert not is_contiguous((2, 3), (T, 1))


def test_gaps_and_overlaps_are_not_dense():
    assert is_dense((2, 3, 4), (1, 2, 6))
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((2, 3), (1, 1))
    assert not is_dense((2, 3), (0, 1))


EXTENTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(EXTENTS, st.data())
def test_forms_give_the_strides_that_they_are_of(extents, data):
    order = data.draw(st.permutations(range(len(extents))))
    tensor = torch.empty([extents[at] + 2 for at in order]).permute(
        *map(order.index, range(len(order)))
    )
    starts = [data.draw(st.integers(0, 2)) for _ in extents]
    steps = [data.draw(st.sampled_from([1, 1, 2])) for _ in extents]
    parts = zip(starts, extents, steps, strict=True)
    tensor = tensor[tuple(slice(a, a + n, step) for a, n, step in parts)]
    forms = stride_forms(tensor.shape, tensor.stride())
    assert strides_of_forms(forms, tensor.shape) == tensor.stride()


@given(EXTENTS, EXTENTS)
def test_what_lies_in_order_has_one_form_whatever_its_sizes(some, others):
    shapes = list(zip(some, others, strict=False))
    forms = [stride_forms(shape, contiguous_strides(shape)) for shape in zip(*shapes, strict=True)]
    assert forms[0] == forms[1]


CUTS = {
    "a part of each row": lambda n: torch.empty(7, 40)[:, :n],
    "all but the last": lambda n: torch.empty(7, n + 1)[:, :-1],
    "all but the first": lambda n: torch.empty(7, n + 1)[:, 1:],
    "neither end": lambda n: torch.empty(7, n + 2)[:, 1:-1],
    "columns": lambda n: torch.empty(n, 7).t(),
    "a part of each column": lambda n: torch.empty(7, 40).t()[:n],
    "every other row": lambda n: torch.empty(2 * n, 7)[::2],
    "one row for all": lambda n: torch.empty(7).expand(n, 7),
    "channels last": lambda n: torch.empty(2, 3, n, n + 1).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_tensors_that_are_cut_alike_have_one_form(cut):
    made = [cut(n) for n in (5, 11, 17, 30)]
    forms = [stride_forms(tensor.shape, tensor.stride()) for tensor in made]
    assert forms == forms[:1] * 4
    size = Size.dim("n", 2, 40, 17)
    at = next(at for at in range(made[0].ndim) if made[0].shape[at] != made[1].shape[at])
    shape = [size if dim == at else n for dim, n in enumerate(made[2].shape)]
    strides = strides_of_forms(forms[0], shape)
    assert tuple(map(sample_of, strides)) == made[2].stride()
