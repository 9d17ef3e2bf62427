"""Writing through a strided view: the place of every element is undone into the view's indices."""

import pytest
import torch

from lower.lowering_help import check, lower, trace
from treadle.util.errors import LoweringError

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "size", "stride", "offset"),
    [
        ((2, 12), (2, 3), (12, 1), 6),  # one gate of a recurrent cell
        ((4, 6), (4,), (7,), 0),  # a diagonal
        ((3, 5, 7), (3, 7), (35, 1), 14),  # select
        ((3, 5, 7), (2, 5), (35, 7), 38),
        ((6, 6), (3, 3), (12, 2), 7),  # every other one
        ((5,), (1,), (1,), 4),
        ((4, 4), (4, 4), (1, 4), 0),  # transposed
        ((7, 1), (1, 7), (1, 1), 0),
    ],
)
def test_writes_where_eager_writes(shape, size, stride, offset):
    x, source = torch.randn(shape), torch.randn(size)
    check(lambda x, s: [aten.as_strided_scatter(x, s, size, stride, offset)], x, source)


def test_a_base_in_another_order_of_dims():
    x, source = torch.randn(5, 4), torch.randn(3)
    check(lambda x, s: [aten.as_strided_scatter(x.t().clone(), s, (3,), (5,), 2)], x, source)


def test_split_of_a_computed_value():
    check(
        lambda x: [each * 2 for each in aten.unsafe_split.Tensor(x + 1, 3, 1)], torch.randn(2, 12)
    )


def test_places_that_overlap_are_written_by_pytorch_s_kernel():
    """Equal values meet in a place, so that any order of writes gives the same."""
    x, row = torch.randn(10), torch.randn(7)
    source = row.as_strided((3, 3), (2, 1)).clone()

    def write(x, s):
        return [aten.as_strided_scatter(x, s, (3, 3), (2, 1), 1)]

    check(write, x, source, formulas=False)
    scatter = lower(trace(write, x, source)).steps[-1]
    assert "places that overlap" in scatter.reason


def test_places_that_overlap_in_a_base_with_gaps_are_refused():
    x, source = torch.randn(10, 2)[:, 0], torch.randn(3, 3)

    def write(x, s):
        return [aten.as_strided_scatter(x, s, (3, 3), (2, 1), 0)]

    with pytest.raises(LoweringError, match="storage that has gaps"):
        lower(trace(write, x, source))
