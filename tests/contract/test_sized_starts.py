"""Steps for many sizes in a second process: what the first one compiled serves sizes that it never
saw, and nothing is traced."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.test_sizes_seen import batch, check, of_classes
from sized_models import Attention, Convolution, training

DECLARED = treadle.dynamic(
    {"x": ("rows", "time"), "y": ("rows", "time")}, rows=(2, 8), time=(2, 40)
)


def process(folder, made=Attention, loss_of=of_classes, saved=None, **options):
    """A compiled step and an eager one, and what they train. ``saved``: a file to load it from."""
    torch.manual_seed(0)
    model = made()
    twin = copy.deepcopy(model)
    function, optimizer = training(model, loss_of)
    eager, _ = training(twin, loss_of)
    shapes = options.pop("shapes", None)
    chosen = treadle.Options(cache_dir=folder, **options)
    given = {"model": model, "optimizer": optimizer, "options": chosen, "shapes": shapes}
    if saved is None:
        step = treadle.compile(function, **given)
    else:
        step = treadle.load(saved, function, **given)
    return step, eager, model, twin


def untraced(calls, sizes, draw=batch):
    """Whether each call was served without a trace; all are equal to eager."""
    found = []
    for size in sizes:
        check(*calls, [size], draw)
        found.append(calls[0].compiled.untraced)
    return found


@pytest.mark.parametrize("memory", [None, 0.5])
def test_declared_sizes(tmp_path, memory):
    first = process(tmp_path, shapes=DECLARED, memory=memory)
    assert untraced(first, [(4, 12), (2, 7)]) == [False, False]
    assert "the next process traces nothing" in first[0].explain()
    second = process(tmp_path, shapes=DECLARED, memory=memory)
    assert untraced(second, [(3, 40), (8, 5), (4, 12)]) == [True, True, True]
    assert second[0].recompiles == ["another process compiled for rows in 2..8, time in 2..40"]
    assert second[0].compiled.artifact.peak_bytes <= first[0].compiled.artifact.peak_bytes


def test_what_was_not_traced_is_told_of_as_any_other(tmp_path):
    steps = [process(tmp_path, shapes=DECLARED) for _ in range(2)]
    for calls in steps:
        check(*calls, [(4, 12)])
    first, second = (calls[0] for calls in steps)
    assert second.compiled.untraced
    for which in ("captured", "planned"):
        assert second.graph(which) == first.graph(which)
    assert "S_time" in second.graph("captured")
    assert second.summary().operations == first.summary().operations
    assert "nothing was traced" in second.explain()


def test_sizes_that_calls_have_shown(tmp_path):
    check(*process(tmp_path), [(4, 12), (4, 7)])
    second = process(tmp_path)
    assert untraced(second, [(4, 9), (4, 3), (4, 12), (4, 2)]) == [True] * 4
    assert second[0].recompiles == []
    third = process(tmp_path)  # from the size that was compiled by itself
    assert untraced(third, [(4, 12), (4, 5), (4, 8)]) == [True] * 3
    (why,) = third[0].recompiles
    assert why == (
        "argument x: shape [4, 12] became [4, 5] (dim 1: 12 -> 5); another process compiled for "
        "x_1 in 2..12, as treadle.dynamic({'x': {1: 'x_1'}, 'y': {1: 'x_1'}}, x_1=(2, 12)) declares"
    )


def test_sizes_that_no_process_has_shown(tmp_path):
    """They are compiled, and the next process has them."""
    check(*process(tmp_path), [(4, 12), (4, 7)])
    sizes = [(4, 9), (4, 20), (4, 31), (3, 9), (2, 25)]
    second = process(tmp_path)
    assert untraced(second, sizes) == [True, False, False, False, False]
    assert len(second[0].recompiles) == 3
    third = process(tmp_path)
    assert all(untraced(third, sizes))


@pytest.mark.parametrize("shapes", [None, DECLARED], ids=["shown", "declared"])
def test_a_saved_step_has_its_sizes(tmp_path, shapes):
    first = process(tmp_path / "one", shapes=shapes)
    check(*first, [(4, 12), (4, 7)])
    first[0].save(tmp_path / "step.treadle")
    second = process(tmp_path / "two", saved=tmp_path / "step.treadle", shapes=shapes)
    assert untraced(second, [(4, 9), (4, 2)]) == [True, True]
    second[0].save(tmp_path / "again.treadle")
    third = process(tmp_path / "three", saved=tmp_path / "again.treadle", shapes=shapes)
    assert untraced(third, [(4, 11)]) == [True]


def images(rows, side):
    return torch.randn(rows, 3, side, side), torch.randint(4, (rows,))


def test_sizes_that_decide_what_runs(tmp_path):
    """oneDNN's convolution is another one for 16 images or more: what was compiled for fewer serves
    fewer, in every process."""
    first = process(tmp_path, Convolution, F.cross_entropy)
    check(*first, [(20, 8), (24, 8), (5, 8)], images)
    second = process(tmp_path, Convolution, F.cross_entropy)
    assert untraced(second, [(4, 8), (18, 8), (23, 8), (3, 8)], images) == [True] * 4


SCALE = 2.0


def test_what_is_read_outside_is_never_stale(tmp_path):
    def steps():
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        options = treadle.Options(cache_dir=tmp_path)
        return layer, treadle.compile(lambda x: layer(x) * SCALE, model=layer, options=options)

    def call(size):
        layer, step = steps()
        for n in (5, size):
            x = torch.randn(n, 3)
            torch.testing.assert_close(step(x), layer(x) * SCALE)
        return step.compiled.untraced

    global SCALE
    try:
        assert not call(4)
        assert call(3)
        SCALE = 3.0
        assert not call(3)
        assert call(2)
        SCALE = 2.0
        assert call(4)
    finally:
        SCALE = 2.0


def test_a_bad_index_is_refused_without_a_trace(tmp_path):
    check(*process(tmp_path), [(4, 12), (4, 7)])
    step, *others = process(tmp_path)
    x, y = batch(4, 9)
    x[1, 2] = 19
    with pytest.raises(treadle.RuntimeFailure, match=r"out of range.*0 to 18") as caught:
        step(x, y)
    assert step.compiled.untraced
    assert "self.tokens(x)" in str(caught.value)
    check(step, *others, [(4, 9)])


def test_places_beyond_a_table_are_refused_as_by_eager(tmp_path):
    """Which sizes are too large is a guard of what was compiled."""
    far = treadle.dynamic({"x": ("rows", "time"), "y": ("rows", "time")}, rows=(2, 8), time=(2, 60))
    check(*process(tmp_path, shapes=far), [(4, 12)])
    step, *others = process(tmp_path, shapes=far)
    assert untraced([step, *others], [(4, 40)]) == [True]
    with pytest.raises(treadle.RuntimeFailure, match="TR-407"):
        step(*batch(4, 41))
    assert untraced([step, *others], [(4, 39)]) == [True]


def test_sizes_are_not_taken_over_where_they_are_not_wanted(tmp_path):
    check(*process(tmp_path), [(4, 12), (4, 7)])
    second = process(tmp_path, dynamic=False)
    assert untraced(second, [(4, 9), (4, 12)]) == [False, True]
    with_path = process(tmp_path, made=lambda: Attention(width=4))
    assert untraced(with_path, [(4, 9)]) == [False]


def test_parts_of_longer_batches(tmp_path):
    """Where strides are not those of the sizes alone."""

    def next_token(n):
        tokens = torch.randint(19, (4, n + 1))
        return tokens[:, :-1], tokens[:, 1:]

    sizes = [(12,), (7,)]
    assert untraced(process(tmp_path), sizes, next_token) == [False, False]
    second = process(tmp_path)
    assert untraced(second, [(9,), (3,), (12,)], next_token) == [True] * 3
    assert untraced(second, [(4, 9)]) == [False]  # which lies in order: another step
