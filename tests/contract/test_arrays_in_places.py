"""Arrays of NumPy's in attributes, entries and variables, with other numbers at each call: those of
the call, at the second compile at the latest."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle import CaptureError, Options

W = np.ones(3)


def world():
    torch.manual_seed(0)
    w = np.ones(3)
    held = SimpleNamespace(
        w=w, same=w, view=w[1:], v=np.zeros(3), entries=[np.ones(3)], named={"w": np.ones(3)},
        deep=SimpleNamespace(w=np.ones(3)), square=np.ones((3, 3)), tensor=torch.from_numpy(w),
    )  # fmt: skip
    model = nn.Linear(3, 2)
    model.w = np.ones(3)
    return model, held


def setting(model, held, value):
    """Other arrays."""
    global W
    W, held.w, model.w, held.entries[0], held.named["w"], held.deep.w = (
        value.copy() for _ in range(6)
    )
    held.same, held.view, held.square = held.w, held.w[1:], np.outer(value, value)
    held.tensor = torch.from_numpy(held.w)


def filling(model, held, value):
    """Other numbers in the same arrays."""
    for each in (W, held.w, model.w, held.entries[0], held.named["w"], held.deep.w):
        each[:] = value
    held.square[:] = np.outer(value, value)


def kept(model, held, h):
    held.v = held.w * 2
    return h * held.w.sum()


READS = {
    "a global": lambda m, c, h: h * W.sum(),
    "an attribute": lambda m, c, h: h * c.w[0] + float(np.mean(c.w)),
    "of the model": lambda m, c, h: h * m.w.max(),
    "an entry": lambda m, c, h: h * c.entries[0][1],
    "under a key": lambda m, c, h: h * sum(c.named["w"].tolist()),
    "deep": lambda m, c, h: h * np.sqrt(c.deep.w[2]),
    "twice": lambda m, c, h: h * c.w.sum() + c.same.sum(),
    "a view": lambda m, c, h: h * c.w.sum() + c.view.sum(),
    "a loop": lambda m, c, h: sum(h * x * y for x, y in zip(c.w, c.square[0], strict=True)),
    "a tensor": lambda m, c, h: h * torch.from_numpy(c.w).float().sum(),
    "a copy": lambda m, c, h: h @ torch.as_tensor(c.square[:2, :2], dtype=torch.float32),
    "kept": kept,
}


def pair(read):
    def make():
        model, held = world()
        return lambda x: read(model, held, model(x)), model, held

    step, model, held = make()
    ours = treadle.compile(step, model=model, options=Options(codegen=False))
    theirs, *other = make()
    return ours, theirs, (model, held), other


@pytest.mark.parametrize("change", [setting, filling])
@pytest.mark.parametrize("name", READS)
def test_arrays_in_places(name, change):
    ours, theirs, own, other = pair(READS[name])
    for _ in range(4):
        value, x = np.random.rand(3), torch.randn(4, 3)
        for model, held in (own, other):
            change(model, held, value)
        torch.testing.assert_close(ours(x), theirs(x))
        np.testing.assert_allclose(own[1].v, other[1].v)
        assert type(own[1].w) is np.ndarray
    assert len(ours.recompiles) + len(ours.recaptures) == 1


def test_what_the_step_puts_there_is_of_the_call():
    def mean(model, held, h):
        held.w = held.w * 0.9 + 0.1
        held.w, held.v = held.v, held.w
        return h * held.w.sum()

    ours, theirs, (_, held), (_, other) = pair(mean)
    held.w, other.w = np.arange(3.0), np.arange(3.0)
    for _ in range(5):
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x), theirs(x))
        np.testing.assert_allclose(held.w, other.w)
        np.testing.assert_allclose(held.v, other.v)
    assert len(ours.recompiles) <= 2


def test_arrays_of_another_kind_and_those_that_part():
    ours, theirs, (_, held), (_, other) = pair(lambda m, c, h: h * c.w.sum() + c.same[-1] * 2)
    values = [np.ones(3), np.zeros(3), np.arange(5), np.arange(3), np.eye(3), np.ones(3)]
    for at, value in enumerate(values * 2):
        for each in (held, other):
            each.w = value.astype("float32") if at == 5 else value.copy()
            each.same = each.w if at % 3 else each.w + 1
            if each.same.ndim > 1:
                each.same = each.same[0]
        x = torch.randn(4, 3)
        torch.testing.assert_close(ours(x), theirs(x))


def test_arrays_of_a_tensor_that_the_step_writes_to_are_refused():
    def written(model, held, h):
        held.tensor.add_(1)
        return h * held.w.sum()

    ours, *_ = pair(written)
    with pytest.raises(CaptureError, match="TR-112"):
        ours(torch.randn(4, 3))
