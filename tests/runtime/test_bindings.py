import pytest
import torch

from treadle.algebra.dims import Dim
from treadle.algebra.extents import size_of
from treadle.runtime.execute.bindings import Bindings, shows_all, whole
from treadle.runtime.store.artifact import BufferSpec, Storage, View

N = size_of(Dim("n", 2, 8, 5))


def spec(*shape, place=Storage.CALL):
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    return BufferSpec("b", torch.float32, shape, strides, place)


@pytest.mark.parametrize("shape", [(N, 4), (5, N), (5, 4)])
def test_a_buffer_is_shown_whole_for_all_sizes(shape):
    buffer = spec(*shape)
    assert shows_all(whole(buffer), buffer)


@pytest.mark.parametrize(
    ("buffer", "shape", "offset"),
    [
        (spec(N, 4), (5, 4), 0),  # the same of the sample alone
        (spec(5, 4), (N, 4), 0),
        (spec(N, 4), (N - 1, 4), 0),
        (spec(N, 4), (N, 4), N - 5),
        (spec(5, 4), (4, 4), 0),
    ],
)
def test_a_part_of_one_is_not_nor_what_is_all_of_it_for_some_sizes(buffer, shape, offset):
    view = View("b", torch.float32, shape, buffer.strides, offset)
    assert not shows_all(view, buffer)
    bindings = Bindings({"b": buffer})
    held = [None]
    bindings.argument(view, (held, 0))
    assert list(bindings.uses["b"].views) == [view]
