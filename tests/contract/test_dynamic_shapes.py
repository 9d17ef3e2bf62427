"""One compile for every size of named dims: equal to eager at each size, in one pattern or more."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import Attention, Convolution, Words, clipped, training
from treadle.lower import padding
from treadle.targets import registry
from treadle.targets.cpu import CPU
from treadle.targets.cuda import CUDA

pytestmark = pytest.mark.usefixtures("own_cache")


def pair(model, loss_of, shapes, *, made=training, **options):
    """A compiled step and an eager one, from equal weights."""
    twin = copy.deepcopy(model)
    step, optimizer = made(model, loss_of)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, shapes=shapes, **options)
    return compiled, made(twin, loss_of)[0], model, twin


def alone(model, loss_of):
    """Training on ``loss_of(model(x), x)``."""
    step, optimizer = training(model, loss_of)
    return lambda x: step(x, x), optimizer


def check(compiled, eager, model, twin, batches):
    for batch in batches:
        torch.manual_seed(5)
        ours = compiled(*batch)
        torch.manual_seed(5)
        theirs = eager(*batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def tokens(*shape):
    return torch.randint(19, shape), torch.randint(19, shape)


def text_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


TEXT = treadle.dynamic({"x": ("batch", "time"), "y": ("batch", "time")}, batch=(1, 9), time=(1, 40))


def test_one_pattern_serves_every_batch_and_length():
    both = pair(Attention(), text_loss, TEXT, made=clipped)
    sizes = [(4, 13), (3, 7), (5, 40), (2, 2), (9, 31), (8, 19), (4, 8), (3, 3), (4, 13)]
    check(*both, [tokens(*each) for each in sizes])
    step = both[0]
    assert step.compiled.pattern is not None, step.recompiles
    assert len([note for note in step.recompiles if note.startswith("compiled for")]) == 1
    assert step.recompiles[0] == "compiled for batch in 1..9, time in 1..40"


def test_sizes_of_one_are_fixed_and_the_others_stay_dynamic():
    both = pair(Attention(), text_loss, TEXT)
    check(*both, [tokens(*each) for each in [(1, 13), (1, 20), (1, 2), (6, 1), (2, 1), (1, 1)]])
    assert "compiled for time in 1..40, with batch=1" in both[0].recompiles
    assert "compiled for batch in 1..9, with time=1" in both[0].recompiles


def test_batches_of_images():
    shapes = treadle.dynamic(
        {"x": {0: "n", 2: "h", 3: "w"}, "y": ("n",)}, n=(2, 8), h=(4, 20), w=(4, 20)
    )
    both = pair(Convolution(), F.cross_entropy, shapes)
    sizes = [(3, 8, 8), (4, 8, 10), (2, 13, 5), (8, 20, 20), (5, 4, 4), (3, 7, 19)]
    check(*both, [(torch.randn(n, 3, h, w), torch.randint(4, (n,))) for n, h, w in sizes])


def test_the_budget_holds_for_the_largest_sizes():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3)]
    model = nn.Sequential(*layers)
    shapes = treadle.dynamic({"x": ("n", None), "y": ("n", None)}, n=(2, 300))

    def batch(n):
        return torch.randn(n, 8), torch.randn(n, 8)

    free, *_ = pair(copy.deepcopy(model), F.mse_loss, shapes)
    free(*batch(300))
    budget = int(free.measure(*batch(300)).peak_bytes * 0.85)
    step, *rest = pair(model, F.mse_loss, shapes, memory=budget)
    check(step, *rest, [batch(5), batch(211), batch(300)])
    for n in (5, 211, 300):
        report = step.measure(*batch(n))
        assert report.peak_bytes <= step.compiled.artifact.peak_bytes <= budget
    assert step.compiled.pattern is not None, step.recompiles


def test_the_plan_does_not_depend_on_which_size_comes_first():
    """Memory is planned by the largest size, whether the first call is one of few rows or many."""
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    model = nn.Sequential(*layers)
    shapes = treadle.dynamic({"x": ("n", None), "y": ("n", None)}, n=(2, 300))
    peaks = []
    for n in (300, 2, 40):
        step, *_ = pair(copy.deepcopy(model), F.mse_loss, shapes, memory=0.3)
        step(torch.randn(n, 8), torch.randn(n, 8))
        peaks.append(step.summary().peak_of_any_call_bytes)
    assert len(set(peaks)) == 1


def test_a_loop_over_a_size_is_unrolled_for_that_size_only():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(6, 6)

        def forward(self, x):
            h = x[:, 0]
            for t in range(x.shape[1]):
                h = torch.tanh(self.cell(h) + x[:, t])
            return h

    shapes = treadle.dynamic(
        {"x": ("batch", "time", None), "y": ("batch", None)}, batch=(2, 9), time=(2, 6)
    )
    both = pair(Loop(), F.mse_loss, shapes)
    sizes = [(3, 4), (5, 4), (2, 5), (7, 5)]
    check(*both, [(torch.randn(n, t, 6), torch.randn(n, 6)) for n, t in sizes])


def test_an_index_of_two_tables_is_checked_where_they_are_as_long():
    """Two lengths are one number then, and so are the two checks."""
    model = nn.Linear(4, 4)

    def step(a, b, index):
        return (model(a)[index] * b[index]).sum()

    shapes = treadle.dynamic({"a": ("n", None), "b": ("m", None)}, n=(2, 64), m=(2, 64))
    compiled = treadle.compile(step, model=model, shapes=shapes)
    for n, m in ((5, 7), (7, 5), (6, 6)):
        tables, shorter = (torch.randn(n, 4), torch.randn(m, 4)), min(n, m)
        index = torch.randint(shorter, (3,))
        torch.testing.assert_close(compiled(*tables, index), step(*tables, index))
        with pytest.raises(treadle.RuntimeFailure, match="out of range"):
            compiled(*tables, torch.tensor([0, shorter, 1]))
    assert compiled.recompiles == ["compiled for n in 2..64, m in 2..64"]


def test_arguments_inside_a_dict_and_other_python_values():
    model = nn.Linear(5, 3)
    twin = copy.deepcopy(model)

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch, scale):
            loss = (model(batch["x"]) - batch["y"]).square().mean() * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss.detach(), "n": batch["x"].shape[0]}

        return step, optimizer

    step, optimizer = make(model)
    shapes = treadle.dynamic({"batch['x']": ("n", None), "batch['y']": ("n", None)}, n=(2, 100))
    compiled = treadle.compile(step, model=model, optimizer=optimizer, shapes=shapes)
    eager, _ = make(twin)
    for n, scale in [(4, 1.0), (50, 1.0), (100, 1.0), (7, 2.0), (4, 2.0)]:
        batch = {"x": torch.randn(n, 5), "y": torch.randn(n, 3)}
        ours, theirs = compiled(batch, scale), eager(batch, scale)
        torch.testing.assert_close(ours["loss"], theirs["loss"])
        assert ours["n"] == n
    torch.testing.assert_close(model.weight, twin.weight)


def test_a_transposed_argument_keeps_its_order():
    shapes = treadle.dynamic({"x": ("n", None), "y": ("n", None)}, n=(2, 30))
    both = pair(nn.Linear(6, 2), F.mse_loss, shapes)
    check(*both, [(torch.randn(6, n).t(), torch.randn(n, 2)) for n in (4, 9, 30)])
    check(*both, [(torch.randn(n, 6), torch.randn(n, 2)) for n in (9, 5)])
    assert both[0].recompiles == ["compiled for n in 2..30"] * 2


def test_a_saved_step_keeps_its_pattern(tmp_path):
    options = treadle.Options(cache_dir=tmp_path / "a")
    model = Words()
    step, optimizer = training(model, text_loss)
    first = treadle.compile(step, model=model, optimizer=optimizer, shapes=TEXT, options=options)
    first(*tokens(4, 13))
    first(*tokens(3, 9))
    first.save(tmp_path / "step")
    options = treadle.Options(cache_dir=tmp_path / "b")
    owned = {"model": model, "optimizer": optimizer, "shapes": TEXT, "options": options}
    again = treadle.load(tmp_path / "step", step, **owned)
    again(*tokens(4, 13))
    assert again.compiled.from_cache
    again(*tokens(7, 21))
    assert again.compiled.from_cache


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([(4, 41), (4, 41)], "time is 41 in x .dim 1., outside 1..40"),
        ([(4, 5), (3, 5)], "batch is 4 in x .dim 0. and 3 in y .dim 0."),
        ([(4,), (4,)], "x has 1 dims, not 2"),
    ],
)
def test_shapes_that_are_not_what_was_declared(batch, said):
    step, *_ = pair(Attention(), text_loss, TEXT)
    with pytest.raises(treadle.CaptureError, match=said) as caught:
        step(*(torch.zeros(shape, dtype=torch.int64) for shape in batch))
    assert caught.value.code == "TR-113"


def test_an_argument_that_is_not_there():
    shapes = treadle.dynamic({"z": ("n",)}, n=(1, 4))
    step, *_ = pair(nn.Linear(2, 2), F.mse_loss, shapes)
    with pytest.raises(treadle.CaptureError, match="no argument z"):
        step(torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("arguments", "ranges", "said"),
    [
        ({"x": ("n",)}, {}, "no range for n"),
        ({"x": ("n",)}, {"n": (1, 2), "m": (1, 2)}, "no dim is m"),
        ({"x": ("n",)}, {"n": (5, 2)}, "cannot range over 5..2"),
    ],
)
def test_declarations_that_cannot_be(arguments, ranges, said):
    with pytest.raises(treadle.TreadleError, match=said) as caught:
        treadle.dynamic(arguments, **ranges)
    assert caught.value.code == "TR-001"


def test_buckets_are_compiled_apart_and_planned_for_their_largest():
    shapes = treadle.dynamic({"x": ("n", None), "y": ("n", None)}, n=(1, 8, 64, 300))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    step, *rest = pair(model, F.mse_loss, shapes)
    sizes = (8, 3, 64, 9, 65, 300, 1)
    check(step, *rest, [(torch.randn(n, 8), torch.randn(n, 8)) for n in sizes])
    assert step.recompiles[:3] == [
        "compiled for n in 1..8",
        "compiled for n in 9..64",
        "compiled for n in 65..300",
    ]
    predicted = []
    for n in (8, 64, 300):
        step(torch.randn(n, 8), torch.randn(n, 8))
        predicted.append(step.compiled.artifact.arena_bytes)
    assert predicted[0] < predicted[1] < predicted[2]


@pytest.mark.parametrize("sizes", [(3,), (), (5, 4), (2, 8, 8), (2, 8, 7), (-1, 3)])
def test_ranges_that_are_none(sizes):
    with pytest.raises(treadle.TreadleError, match="TR-001"):
        treadle.dynamic({"x": ("n",)}, n=sizes)


def test_sizes_of_what_is_no_input_are_guarded():
    """Only the size of ``x`` is read: it is no input of the graph, and what was asked counts."""
    model = nn.Linear(4, 2)

    def step(x, y):
        many = torch.zeros(x.shape[0]) + 1 if x.shape[0] > 4 else torch.ones(3)
        return many.sum() + model(y).sum(), x.shape[0] * 2

    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(1, 16))
    compiled = treadle.compile(step, model=model, shapes=shapes)
    y = torch.randn(3, 4)
    for rows in (7, 3, 5, 4, 9, 1):
        found, expected = compiled(torch.ones(rows, 4), y), step(torch.ones(rows, 4), y)
        torch.testing.assert_close(found[0], expected[0].detach())
        assert found[1] == expected[1]


def attended(h, x, **how):
    return F.scaled_dot_product_attention(h[:, None], x[:, None], x[:, None], **how)


ORDINARY = {
    "mean": lambda h, x: h.square().mean(),
    "mean over time": lambda h, x: h.mean(1).square().sum(),
    "shifted by one": lambda h, x: (h[:, 1:] - x[:, :-1]).square().sum(),
    "mean of shifted": lambda h, x: F.mse_loss(h[:, 1:], x[:, :-1]),
    "without the ends": lambda h, x: (h[:, 1:-1] - x[:, 2:]).square().sum() + x.shape[1] * h.sum(),
    "every other": lambda h, x: h[:, ::2].square().mean(),
    "last": lambda h, x: h[:, -1].square().mean(),
    "first two": lambda h, x: h[:, :2].square().mean() + h[:, -2:].abs().mean(),
    "softmax over time": lambda h, x: (h @ x.transpose(1, 2)).softmax(-1).square().mean(),
    "attention": lambda h, x: attended(h, x).square().mean(),
    "causal attention": lambda h, x: attended(h, x, is_causal=True).square().mean(),
    "both in a row": lambda h, x: torch.cat([h, x], 1).square().mean(),
    "rolled": lambda h, x: (h.roll(1, 1) - x).square().mean(),
    "flipped": lambda h, x: (h.flip(1) - x).square().mean(),
    "running sum": lambda h, x: h.cumsum(1).square().mean(),
    "convolution": lambda h, x: F.conv1d(h.mT, torch.ones(4, 8, 3), padding=1).square().mean(),
    "pieces": lambda h, x: sum(each.square().mean() for each in h.chunk(2, -1)),
    "divided by the length": lambda h, x: h.sum().square() / h.shape[1],
    "times the length": lambda h, x: h.mean() * x.shape[1] * x.shape[1],
    "filled with the length": lambda h, x: (h * torch.full((1,), x.shape[1])).mean(),
    "weighted": lambda h, x: (h / torch.arange(1, h.shape[1] + 1)[:, None]).mean(),
}


MAY_BE_EMPTY = ("first two", "without the ends")  # of two


def assert_one_pattern(step, note):
    """One for all sizes but the smallest, of which a part may have one element."""
    assert step.recompiles[0] == note
    assert len(step.recompiles) <= 2, step.recompiles


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_losses_are_served_by_one_pattern(name):
    low = 3 if name in MAY_BE_EMPTY else 2
    shapes = treadle.dynamic({"x": (None, "time", None)}, time=(low, 32))
    both = pair(nn.Linear(8, 8), ORDINARY[name], shapes, made=alone)
    check(*both, [(torch.randn(3, time, 8),) for time in (5, 7, low, 32, 13, 3)])
    assert_one_pattern(both[0], f"compiled for time in {low}..32")


@pytest.fixture
def aligned(monkeypatch):
    """A target whose products of halves get room for whole units, as on GPUs, whatever they
    multiply."""
    target = replace(CPU, name="aligned", aligned_bytes=CUDA.aligned_bytes)
    monkeypatch.setitem(registry._TARGETS, "aligned", target)
    monkeypatch.setattr(padding, "_WORK", 1)


@pytest.mark.usefixtures("aligned")
@pytest.mark.parametrize("words", [101, 257])
def test_room_of_products_is_the_same_for_all_sizes(words):
    """Of what the model decides; an odd number of rows gets none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(words, 72), nn.Linear(72, words, bias=False))

    def loss_of(logits, x):
        return F.cross_entropy(logits.float().flatten(0, 1), x.flatten())

    def halves(model, loss_of):
        def step(x):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            loss = loss_of(logits, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return step, optimizer

    shapes = treadle.dynamic({"x": ("batch", "time")}, batch=(2, 9), time=(2, 32))
    options = treadle.Options(target="aligned")
    step, eager, *models = pair(model, loss_of, shapes, made=halves, options=options)
    for size in [(5, 17), (4, 16), (2, 2), (9, 31)]:
        x = torch.randint(words, size)
        torch.testing.assert_close(step(x), eager(x), rtol=0.02, atol=0.01)
    mine, theirs = (list(each.parameters()) for each in models)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=2e-3)
    assert step.recompiles == ["compiled for batch in 2..9, time in 2..32"]
    rooms = {buffer.shape[-1] for buffer in step.compiled.artifact.buffers.values() if buffer.shape}
    assert -(-words // 8) * 8 in rooms


NEXT_WORD = {
    "cut and reshaped": lambda h, x: F.cross_entropy(
        h[:, :-1].reshape(-1, 19), x[:, 1:].reshape(-1)
    ),
    "cut and turned": lambda h, x: F.cross_entropy(h[:, :-1].transpose(1, 2), x[:, 1:]),
    "smoothed": lambda h, x: F.cross_entropy(h.flatten(0, 1), x.flatten(), label_smoothing=0.1),
    "some ignored": lambda h, x: F.cross_entropy(h.flatten(0, 1), x.flatten(), ignore_index=3),
}


@pytest.mark.parametrize("name", NEXT_WORD)
def test_losses_of_the_next_word(name):
    shapes = treadle.dynamic({"x": ("batch", "time")}, batch=(2, 9), time=(2, 32))
    both = pair(Words(), NEXT_WORD[name], shapes, made=alone)
    sizes = [(4, 13), (3, 7), (5, 32), (2, 2), (9, 31), (4, 8)]
    check(*both, [(torch.randint(19, each),) for each in sizes])
    assert_one_pattern(both[0], "compiled for batch in 2..9, time in 2..32")


@pytest.mark.parametrize("most", [64, 40_000])
def test_sums_of_all_elements_of_few_and_of_many(most):
    """More than some are added up in parts, which one short call has one of."""
    model = nn.Linear(5, 3)

    def step(x):
        y = model(x)
        return y.square().mean(), y.amax(), (y - y.mean(0)).norm()

    declared = treadle.dynamic({"x": ("n",)}, n=(2, most))
    compiled = treadle.compile(step, model=model, shapes=declared)
    for n in (2, 3, 64, 5) + (40_000, 5461, 8192) * (most > 64):
        x = torch.randn(n, 5)
        for mine, theirs in zip(compiled(x), step(x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert compiled.recompiles == [f"compiled for n in 2..{most}"]
