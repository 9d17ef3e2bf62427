"""Functions that take a size as a plain number, or look at values for one, in a step for many
sizes: one compile for sizes up to the first two's larger one, equal to eager at each."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.capture.symbolic.functions.sized_functions import _linspace
from treadle.options import Options

pytestmark = pytest.mark.usefixtures("own_cache")
LIBRARY = Options(codegen=False)
SIZES = (9, 13, 7, 2, 11, 12, 13, 1, 5)
CLASSES = 5


def counted(model, x, y):
    counts = torch.bincount(y, minlength=CLASSES).float()
    return (model(x).softmax(1) / (counts + 1)).sum()


def counted_with_weights(model, x, y):
    return model(x).sum() + torch.bincount(y, weights=x[:, 0], minlength=CLASSES).square().sum()


def spaced(model, x, y):
    return (model(x) * torch.linspace(0, 1, len(x))[:, None]).sum()


def spaced_otherwise(model, x, y):
    places = torch.linspace(1.5, -2, steps=x.shape[0] // 2 + 1, dtype=torch.float64)
    return model(x).sum() * places.square().sum()


def picked(model, x, y):
    return -model(x).log_softmax(1)[range(len(y)), y].mean()


def picked_by_a_helper(model, x, y):
    return helper(model(x), y) + model(x)[range(0, x.shape[0], 1)].sum()


def helper(scores, y):
    return scores[range(len(scores)), y].sum()


def written(model, x, y):
    target = torch.zeros(len(x), CLASSES)
    target[range(y.shape[0]), y] = 1.0
    return (model(x) * target).sum()


def looped(model, x, y):
    """Where a range is no index it is one of numbers."""
    total = model(x).sum()
    for at in range(2):
        total = total * (at + 1) + model(x)[range(len(x)), y].sum()
    return total


STEPS = (
    counted, counted_with_weights, spaced, spaced_otherwise, picked, picked_by_a_helper, written,
    looped,
)  # fmt: skip


@pytest.mark.parametrize("function", STEPS)
def test_one_compile_serves_many_sizes(function):
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES)
    step = treadle.compile(lambda x, y: function(model, x, y), model=model)
    for size in SIZES:
        x, y = torch.randn(size, 4), torch.randint(CLASSES, (size,))
        torch.testing.assert_close(step(x, y), function(model, x, y), rtol=1e-5, atol=1e-5)
    many, alone = step.recompiles
    assert "compiled for x_0 in 2..13, as" in many
    assert alone == "argument x: shape [13, 4] became [1, 4] (dim 0: 13 -> 1)"


BOUNDS = [(0, 10), (-3, 7), (0, 100), (5, 2), (-10, 0), (1.5, -2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_evenly_spaced_numbers_are_eagers_to_the_last_place(dtype):
    for steps in range(60):
        for start, end in BOUNDS:
            exact = torch.linspace(start, end, steps, dtype=dtype)
            last_place = torch.finfo(dtype).eps * exact.abs().max() if steps else 0.0
            ours = _linspace(start, end, steps, dtype=dtype)
            torch.testing.assert_close(ours, exact, rtol=0.0, atol=float(last_place))


@pytest.mark.parametrize(("start", "end"), BOUNDS[:-1])
def test_evenly_spaced_whole_numbers_are_pytorchs_own(start, end):
    """CPUs and GPUs round them in different orders, so a formula of sizes would be wrong on one."""

    def spaced_whole(model, x):
        places = torch.linspace(start, end, len(x), dtype=torch.int64)
        return (model(x) * places[:, None]).sum(), places

    model = nn.Linear(4, 1)
    step = treadle.compile(lambda x: spaced_whole(model, x), model=model)
    for size in (16, 19, 7, 13, 15):
        x = torch.randn(size, 4)
        ours, theirs = step(x), spaced_whole(model, x)
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-4)


def test_labels_that_make_counts_longer():
    """Which no program for many sizes has: such a call is eager's."""
    model = nn.Linear(4, CLASSES)
    step = treadle.compile(lambda x, y: counted_any(model, x, y), model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size, most in ((6, 5), (9, 5), (9, 8), (4, 7), (9, 5), (6, 5)):
            x, y = torch.randn(size, 4), torch.randint(5, (size,))
            y[-1] = most - 1
            torch.testing.assert_close(step(x, y), counted_any(model, x, y))
        y[-1] = -1
        with pytest.raises(RuntimeError, match="negative"):
            step(x, y)
    assert "compiled for x_0 in 2..9" in step.recompiles[0]


def counted_any(model, x, y):
    counts = torch.bincount(y, minlength=CLASSES).float()
    return model(x).sum() * (counts * torch.arange(len(counts))).sum()


@pytest.mark.parametrize(
    "resize",
    [
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False),
        lambda x: F.interpolate(x, size=(5, 7), mode="bicubic", align_corners=True),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        lambda x: F.adaptive_avg_pool2d(x, (None, 1)),
        lambda x: F.adaptive_avg_pool1d(x.flatten(2), 4),
        lambda x: F.adaptive_max_pool2d(x, 2),
    ],
    ids=["bicubic", "bicubic corners", "average", "average rows", "average 1d", "largest"],
)
def test_images_that_are_resized(resize):
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1)
    step = treadle.compile(lambda x: backward(model, resize, x), model=model)
    for size in (9, 13, 7, 11, 3, 12):
        x = torch.randn(2, 2, size, size + 1)
        ours = step(x)
        theirs = backward(model, resize, x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(step.recompiles) == 1


def backward(model, resize, x):
    loss = resize(model(x)).square().sum()
    weight = torch.autograd.grad(loss, model.weight)[0]
    return loss.detach(), weight


@pytest.mark.parametrize("how", ["read", "length", "from_one", "written"])
def test_ranges_of_sizes_that_values_decide_are_indices(how):
    """``n`` rows are picked by a mask; one call picks none."""

    def of(how, scores, labels):
        n = len(scores) if how == "length" else scores.shape[0]
        if how == "from_one":
            return scores[range(1, n), labels[1:]].sum()
        if how == "written":
            target = torch.full_like(scores, 0.05)
            target[range(n), labels] = 0.95
            return (scores - target).square().sum()
        return scores[range(n), labels].sum()

    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Linear(3, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            keep = x.sum(1) > 0
            loss = model(x).square().mean() + of(how, model(x)[keep], y[keep])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        given = {"model": model, "optimizer": optimizer, "options": LIBRARY}
        made = treadle.compile(step, **given) if compiled else step
        losses = [
            made(x, torch.randint(0, 5, (len(x),)))
            for x in (torch.randn(7, 3), torch.randn(7, 3), torch.rand(7, 3), -torch.rand(7, 3))
            if how != "from_one" or (x.sum(1) > 0).any()
        ]
        return torch.stack([*losses, *(p.abs().sum() for p in model.parameters())])

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)
