"""Sizes that nobody declared: the second one seen makes a dim dynamic. Equal to eager at each."""

import copy
import random
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import Attention, Convolution, clipped, training
from treadle.session.variants import many_sizes
from treadle.targets.cpu import CPU

pytestmark = pytest.mark.usefixtures("own_cache")


def of_classes(y, t):
    return F.cross_entropy(y.flatten(0, -2), t.flatten())


def language(made=training, **options):
    """A compiled step and an eager one, and what makes their batches."""
    torch.manual_seed(0)
    model = Attention()
    twin = copy.deepcopy(model)
    function, optimizer = made(model, of_classes)
    eager, _ = made(twin, of_classes)
    step = treadle.compile(function, model=model, optimizer=optimizer, **options)
    return step, eager, model, twin


def batch(rows, time):
    return torch.randint(19, (rows, time)), torch.randint(19, (rows, time))


def check(step, eager, model, twin, sizes, draw=batch):
    for number, size in enumerate(sizes):
        drawn = draw(*size)
        torch.manual_seed(number)
        loss = step(*drawn)
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager(*drawn), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_second_length_makes_one_name_of_both_arguments_dims():
    calls = language()
    step = calls[0]
    check(*calls, [(4, 12), (4, 7), (4, 12), (4, 3), (4, 11), (4, 2)])
    (why,) = step.recompiles
    assert why == (
        "argument x: shape [4, 12] became [4, 7] (dim 1: 12 -> 7); compiled for x_1 in 2..12, "
        "as treadle.dynamic({'x': {1: 'x_1'}, 'y': {1: 'x_1'}}, x_1=(2, 12)) declares"
    )


def test_a_larger_size_begins_a_bucket_that_ends_with_a_power_of_two():
    calls = language()
    check(*calls, [(4, 7), (4, 9), (4, 21), (4, 30), (4, 9), (4, 31), (4, 33)])
    found = [why.split("; ")[1].split(",")[0] for why in calls[0].recompiles]
    assert found == [f"compiled for x_1 in {each}" for each in ("2..9", "10..32", "33..64")]


def test_a_second_dim_that_changes():
    calls = language(made=clipped)
    check(*calls, [(4, 12), (4, 7), (3, 9), (2, 12), (3, 2), (4, 5)])
    assert len(calls[0].recompiles) == 2
    assert "compiled for x_0 in 2..4, x_1 in 2..12" in calls[0].recompiles[1]


def test_any_order_of_any_sizes():
    """One among them, which is another step."""
    mixed = random.Random(0)
    sizes = [(mixed.choice([1, 2, 3, 5]), mixed.choice([1, 2, 3, 7, 16, 31])) for _ in range(12)]
    calls = language()
    check(*calls, sizes)
    known = list(calls[0].recompiles)
    check(*calls, sizes)
    assert calls[0].recompiles == known


def test_dims_that_were_equal_and_are_not():
    """They get names of their own; no call is refused."""

    layer = nn.Linear(3, 3)

    def step(x, y):
        return layer(x).sum(0), (y + x.mean()).sum(0)

    compiled = treadle.compile(step, model=layer)
    for n, m in [(5, 5), (3, 3), (5, 2), (2, 5), (4, 4)]:
        x, y = torch.randn(n, 3), torch.randn(m, 3)
        torch.testing.assert_close(compiled(x, y), step(x, y))
    found = [why.split("; compiled for ")[1].split(", as")[0] for why in compiled.recompiles]
    assert found == ["x_0 in 2..5", "x_0 in 2..5, y_0 in 2..5"]


def test_the_end_of_an_epoch_is_compiled_by_itself():
    """After many calls of one size another one is taken for the last batch; the next for one of
    many."""
    calls = language()
    check(*calls, [(4, 6)] * 20 + [(3, 6)] + [(4, 6)] * 20 + [(3, 6)])
    assert calls[0].recompiles == ["argument x: shape [4, 6] became [3, 6] (dim 0: 4 -> 3)"]
    check(*calls, [(2, 6), (4, 6), (3, 6)])
    assert len(calls[0].recompiles) == 2
    assert "compiled for x_0 in 2..4" in calls[0].recompiles[1]


def test_it_can_be_turned_off(monkeypatch):
    calls = language(options=treadle.Options(dynamic=False))
    check(*calls, [(4, 12), (4, 7), (4, 9)])
    assert [why.split(" (")[0] for why in calls[0].recompiles] == [
        "argument x: shape [4, 12] became [4, 7]",
        "argument x: shape [4, 7] became [4, 9]",
    ]
    monkeypatch.setenv("TREADLE_NO_DYNAMIC", "1")
    assert not treadle.options.from_environment().dynamic


def test_a_device_of_its_own_is_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(many_sizes, "target_for", lambda *_: replace(CPU, on_host=False))
    calls = language(options=treadle.Options(cache_dir=tmp_path))
    check(*calls, [(4, 12), (4, 7), (4, 9)])
    assert len(calls[0].recompiles) == 1


def test_what_cannot_be_of_many_sizes_is_compiled_for_each_with_the_reason():
    layer = nn.Linear(3, 3)

    def step(x):
        return F.interpolate(layer(x)[None, None], scale_factor=(1.0, 1.7), mode="bilinear")

    compiled = treadle.compile(step, model=layer)
    for n in (4, 3, 5, 3):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), step(x))
    assert sum("each size is compiled separately" in why for why in compiled.recompiles) == 1
    assert len(compiled.recompiles) == 3


def words(n):
    return torch.randint(19, (5, n))


CUTS = {
    "a part of each row": lambda n: (LONG[:, :n], LONG[:, :n]),
    "the next token": lambda n: (lambda t: (t[:, :-1], t[:, 1:]))(words(n + 1)),
    "neither end": lambda n: (lambda t: (t[:, 1:-1], t[:, 2:]))(words(n + 2)),
    "columns": lambda n: (torch.randint(19, (n, 5)).t(), torch.randint(19, (n, 5)).t()),
    "every other row": lambda n: (torch.randint(19, (2 * n, 7))[::2], torch.randint(19, (n, 7))),
    "one row for all": lambda n: (torch.randint(19, (7,)).expand(n, 7), torch.randint(19, (n, 7))),
}
LONG = torch.randint(19, (5, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_batches_that_are_parts_of_others(cut):
    """Strides follow from sizes, or stay: one compile serves them too."""
    step, *others = language()
    check(step, *others, [(n,) for n in (17, 11, 9, 16, 5, 11, 2)], cut)
    (why,) = step.recompiles
    assert "in 2..17" in why


def test_declared_sizes_of_columns():
    shapes = treadle.dynamic({"x": {1: "time"}, "y": {1: "time"}}, time=(2, 40))
    step, *others = language(shapes=shapes)
    check(step, *others, [(n,) for n in (17, 40, 3)], CUTS["columns"])
    assert step.recompiles == ["compiled for time in 2..40"]


def test_channels_last_images_of_any_size():
    def drawn(n):
        images = torch.randn(3, 3, n, n + 2).to(memory_format=torch.channels_last)
        return images, torch.randint(4, (3,))

    torch.manual_seed(0)
    model = Convolution()
    twin = copy.deepcopy(model)
    function, optimizer = training(model, F.cross_entropy)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    eager, _ = training(twin, F.cross_entropy)
    check(step, eager, model, twin, [(n,) for n in (16, 12, 9, 14)], drawn)
    assert len(step.recompiles) == 1


def test_a_step_that_asks_values_is_compiled_for_each_size():
    layer = nn.Linear(3, 3)

    def step(x):
        return layer(x) + 1 if x.sum() > 0 else layer(x) - 1

    compiled = treadle.compile(step, model=layer)
    for n, sign in [(4, 1), (3, 1), (3, -1), (4, -1), (5, 1), (5, -1)]:
        x = sign * torch.rand(n, 3)
        torch.testing.assert_close(compiled(x), step(x))


def test_numbers_that_change_with_the_sizes_are_inputs():
    """As they are without: nothing is compiled again for each of them."""

    layer = nn.Linear(3, 3)

    def step(x, scale):
        return layer(x) * scale

    compiled = treadle.compile(step, model=layer)
    for at in range(12):
        x = torch.randn(2 + at % 5, 3)
        torch.testing.assert_close(compiled(x, 0.5 + at), step(x, 0.5 + at))
    assert len(compiled.recompiles) <= 4


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), 1.0

    def forward(self, x):
        return self.layer(x) * self.scale


def test_what_is_read_outside_is_never_stale():
    model = Counted()

    def step(x):
        return model(x)

    compiled = treadle.compile(step, model=model)
    for at in range(10):
        model.scale = float(at // 3)
        x = torch.randn(2 + at % 4, 3)
        torch.testing.assert_close(compiled(x), step(x))


def images():
    """As ``language``, with the function that draws batches of so many images."""
    torch.manual_seed(0)
    model = Convolution()
    twin = copy.deepcopy(model)
    function, optimizer = training(model, F.cross_entropy)
    eager, _ = training(twin, F.cross_entropy)
    step = treadle.compile(function, model=model, optimizer=optimizer)

    def draw(n):
        return torch.randn(n, 3, 8, 8), torch.randint(4, (n,))

    return (step, eager, model, twin), draw


def test_images_of_any_number():
    calls, draw = images()
    check(*calls, [(4,), (3,), (8,), (5,), (2,)], draw)
    assert len(calls[0].recompiles) <= 2


def test_sizes_that_decide_what_runs_have_a_compile_on_either_side():
    """PyTorch convolves by oneDNN from 16 images on."""
    calls, draw = images()
    check(*calls, [(24,), (17,), (3,), (21,), (9,), (2,), (15,), (16,)], draw)
    large, small = calls[0].recompiles
    assert "compiled for x_0 in 2..24, as" in large
    assert "compiled for x_0 in 2..24, again: what runs depends on x_0, as" in small


def test_no_call_holds_more_than_the_largest_size_that_was_there():
    """Planned for the sizes that came, and not for twice as much."""
    static = language(options=treadle.Options(dynamic=False))[0]
    dynamic = language()[0]
    for size in [(4, 24), (4, 12), (4, 18)]:
        static(*batch(*size))
        dynamic(*batch(*size))
    most = static.summary().peak_of_any_call_bytes
    assert dynamic.summary().peak_of_any_call_bytes <= 1.1 * most


def test_a_batch_that_is_refused_leaves_what_serves_many_sizes():
    step, *others = language()
    check(step, *others, [(4, 12), (4, 7)])
    known = list(step.recompiles)
    with pytest.raises(treadle.RuntimeFailure, match="TR-407"):
        step(*batch(4, 41))
    count = len(step.recompiles)
    check(step, *others, [(4, 9), (4, 3), (4, 11)])
    assert step.recompiles[: len(known)] == known
    assert len(step.recompiles) == count


def test_calls_of_another_kind_have_the_dims_of_those_before():
    """What served sizes before ``eval()`` says which sizes change after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    twin = copy.deepcopy(model)
    step = treadle.compile(lambda x: model(x).square().mean(), model=model)
    calls = step, lambda x: twin(x).square().mean(), model, twin

    def draw(n):
        return (torch.randn(n, 5),)

    check(*calls, [(12,), (7,), (11,)], draw)
    for each in (model, twin):
        each.eval()
    check(*calls, [(9,), (10,), (5,), (40,)], draw)
    sizes, mode, larger = step.recompiles
    assert sizes.startswith("argument x: shape [12, 5] became [7, 5] (dim 0: 12 -> 7)")
    assert mode.startswith("1: switched to eval(); compiled for x_0 in 2..12")
    assert larger.startswith("argument x: shape [5, 5] became [40, 5] (dim 0: 5 -> 40); compiled")


def test_a_wrong_call_is_no_recompile_that_anyone_is_warned_of():
    """It is tried for all sizes first, which fails as the call itself does."""
    model = nn.Linear(4, 2)

    def step(x, y):
        loss = (model(x) * y).square().mean()
        loss.backward()
        return loss.detach()

    compiled = treadle.compile(step, model=model)
    for rows in (8, 6, 12, 1):
        compiled(torch.randn(rows, 4), torch.randn(rows, 2))
    known = list(compiled.recompiles)
    assert len(known) == 3  # one more is warned of
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="TR-132"):
            compiled(torch.randn(5, 7), torch.randn(5, 2))
    assert compiled.recompiles == known
