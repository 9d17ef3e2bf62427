"""Gradients of a step in micro-batches: the same numbers, in the memory of fewer rows."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from testing import show_plain
from treadle.capture.step import capture
from treadle.compiler.cleaning import cleaned
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options
from treadle.passes.chunks.batch_region import batch_region_of, rows_of
from treadle.passes.chunks.micro_batches import MicroBatch
from treadle.util.errors import PlanError, TreadleError
from treadle.util.refusals import NoMatch, attempt

aten = torch.ops.aten
EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 7


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(loss, model, optimizer):
    def step(*batch):
        optimizer.zero_grad()
        found = loss(model, *batch)
        (found[0] if isinstance(found, tuple) else found).backward()
        optimizer.step()
        return found

    return step


def captured(loss, model, batch, **options) -> StepGraph:
    optimizer = optimizer_of(model)
    step = step_of(loss, model, optimizer)
    found = capture(step, models={"m": model}, optimizers={"o": optimizer}, args=batch, kwargs={})
    return cleaned(found.step, Options(**options))


def split(step: StepGraph, rows: int) -> StepGraph:
    result = step.copy()
    (report,) = run_passes(result, [MicroBatch(rows)])
    assert report.matches == 1, attempt(batch_region_of, step)
    assert MicroBatch(rows).run(result) == 0, "a second run must find nothing to do"
    return result


def values(step: StepGraph, batch):
    torch.manual_seed(2)
    given = iter(batch)
    return [
        next(given)
        if role.role is Role.BATCH
        else (0.3 * torch.randn(tensor_of(node).shape, dtype=torch.float64)).to(
            tensor_of(node).dtype
        )
        for node, role in step.inputs()
    ]


def check(loss, model, batch, *, rows=(1, 5), **options) -> StepGraph:
    """Every result and every write is that of the whole batch; no micro-batch has more rows."""
    step = captured(loss, model, batch, **options)
    made = step
    for most in rows:
        made = split(step, most)
        given = values(step, batch)
        torch.manual_seed(3)
        expected = run_step(step, given)
        torch.manual_seed(3)
        for new, old in zip(run_step(made, given), expected, strict=True):
            exact = old.dtype == torch.float64
            close = {"rtol": 1e-11, "atol": 1e-12} if exact else {"rtol": 2e-5, "atol": 2e-6}
            torch.testing.assert_close(new, old, equal_nan=True, **close)
            assert new.stride() == old.stride()
    return made


# The models, and awkward batches.


class Block(nn.Module):
    def __init__(self, width, heads, drop):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(drop)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(self.norm_1(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=31, width=8, length=5, layers=2, drop=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 2, drop) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm_1, self.norm_2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm_1(self.first(x))), 2)
        return self.out(F.relu(self.norm_2(self.second(x))).flatten(1))


def perceptron():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def tokens(rows=ROWS, length=5, vocabulary=31):
    torch.manual_seed(1)
    x, y = torch.randint(vocabulary, (rows, length)), torch.randint(vocabulary, (rows, length))
    y[0, :4] = -100  # one row counts less than the others
    y[rows // 2] = -100  # and one not at all
    return x, y


def points(rows=ROWS, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(rows, 4, dtype=dtype), torch.randint(3, (rows,))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_language_model(dtype, drop):
    check(cross_entropy, LanguageModel(drop=drop).to(dtype), tokens())


def test_dropout_by_counters():
    check(cross_entropy, LanguageModel(drop=0.3), tokens(), rows=(3,), rng="counter")


def test_a_network_of_images():
    check(cross_entropy, Network(), (torch.randn(ROWS, 3, 4, 4), torch.randint(5, (ROWS,))))


@pytest.mark.parametrize("rows", [2, 6, 11, 13])
def test_a_perceptron(rows):
    sizes = sorted({1, 2, rows - 1} - {rows})
    check(cross_entropy, perceptron().double(), points(rows, torch.float64), rows=sizes)


def test_the_example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt import GPT, Config  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    config = Config(vocabulary=31, length=5, layers=2, heads=2, width=8)
    check(cross_entropy, GPT(config), tokens(), rows=(3,))


def test_attention_with_the_batch_behind_the_sequence():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, x):
            return self.layer(x)[:, 0]

    batch = torch.randn(ROWS, 5, 4), torch.randint(4, (ROWS,))
    check(cross_entropy, Encoder(), batch, rows=(3,))


LOSSES = {
    "a sum": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 4,
    "weights of classes": lambda m, x, y: F.cross_entropy(
        m(x), y, weight=torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype)
    ),
    "smoothed labels": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "a mask": lambda m, x, y: (
        (F.cross_entropy(m(x), y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "squares": lambda m, x, y: F.mse_loss(m(x), x[:, :3]),
    "a sum of squares": lambda m, x, y: F.mse_loss(m(x), x[:, :3], reduction="sum"),
    "squares of each": lambda m, x, y: F.mse_loss(m(x), x[:, :3], reduction="none").mean(),
    "distances": lambda m, x, y: F.l1_loss(m(x), x[:, :3]),
    "smooth distances": lambda m, x, y: F.smooth_l1_loss(m(x), x[:, :3], beta=0.5),
    "Huber": lambda m, x, y: F.huber_loss(m(x), x[:, :3], delta=0.7),
    "two classes": lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x)[:, 0], (y > 0).to(x.dtype)
    ),
    "a divergence": lambda m, x, y: F.kl_div(
        m(x).log_softmax(-1), x[:, :3].softmax(-1), reduction="batchmean"
    ),
    "two losses": lambda m, x, y: F.cross_entropy(m(x), y) + m(x).square().mean() / 8,
    "statistics of the batch": lambda m, x, y: F.cross_entropy(m((x - x.mean(0)) / x.std(0)), y),
    "a penalty": lambda m, x, y: F.cross_entropy(m(x), y) + m[0].weight.square().sum(),
    "results with rows": lambda m, x, y: (
        F.cross_entropy(m(x), y),
        (m(x).argmax(-1) == y).float().mean(),
        m(x),
        m(x).amax(),
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses(loss):
    check(loss, perceptron().double(), points(dtype=torch.float64), rows=(1, 3))


def test_norms_and_gates():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.RMSNorm(6), nn.SiLU(), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)
    )
    check(cross_entropy, model, points(), rows=(3,))


def test_clipped_gradients_are_those_of_the_whole_batch():
    def loss(m, x, y):
        return cross_entropy(m, x, y) * 50

    model = perceptron().double()
    optimizer = optimizer_of(model)

    def step(x, y):
        optimizer.zero_grad()
        found = loss(model, x, y)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return found

    batch = points(dtype=torch.float64)
    found = capture(step, models={"m": model}, optimizers={"o": optimizer}, args=batch, kwargs={})
    whole = cleaned(found.step, Options())
    made, given = split(whole, 3), values(whole, batch)
    for new, old in zip(run_step(made, given), run_step(whole, given), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-11, atol=1e-12)


def test_gradients_of_16_bits_are_added_up_in_32():
    model = perceptron().bfloat16()
    x, y = points()
    made = split(captured(cross_entropy, model, (x.bfloat16(), y)), 2)
    sums = [
        tensor_of(node).dtype
        for node in made.graph.nodes
        if info(node).chunk is not None
        and node.target in (aten.addmm.default, aten.add.Tensor)
        and tensor_of(node).shape in ((3, 6), (6, 4))
    ]
    assert sums
    assert {*sums} == {torch.float32}


GOLDEN = """
arg0_1: f32[1, 2]
arg1_1: f64[]
arg6_1: f32[3, 2]
arg7_1: f32[3, 1]
t: f32[2, 1] = t(arg0_1)
t.1: f32[1, 2] = t(t)
full: f32[] = full([], 1, dtype=f32, device=cpu)
slice: f32[2, 2] = slice.Tensor(arg6_1, 0, 0, 2)
mul: f32[2, 2] = mul.Tensor(slice, t.1)
sum: f32[2, 1] = sum.dim_IntList(mul, [1], True)
slice.1: f32[2, 1] = slice.Tensor(arg7_1, 0, 0, 2)
mse_loss: f32[] = mse_loss(sum, slice.1, 2)
mse_loss_backward: f32[2, 1] = mse_loss_backward(full, sum, slice.1, 2)
div: f32[2, 1] = div.Scalar(mse_loss_backward, 3)
t.2: f32[1, 2] = t(div)
t.3: f32[2, 1] = t(t.2)
mul.1: f32[2, 2] = mul.Tensor(t.3, slice)
sum.1: f32[1, 2] = sum.dim_IntList(mul.1, [0], True, dtype=f32)
slice.2: f32[1, 2] = slice.Tensor(arg6_1, 0, 2, 3)
mul.2: f32[1, 2] = mul.Tensor(slice.2, t.1)
sum.2: f32[1, 1] = sum.dim_IntList(mul.2, [1], True)
slice.3: f32[1, 1] = slice.Tensor(arg7_1, 0, 2, 3)
mse_loss.1: f32[] = mse_loss(sum.2, slice.3, 2)
add: f32[] = add.Tensor(mse_loss, mse_loss.1)
mse_loss_backward.1: f32[1, 1] = mse_loss_backward(full, sum.2, slice.3, 2)
div.1: f32[1, 1] = div.Scalar(mse_loss_backward.1, 3)
t.4: f32[1, 1] = t(div.1)
t.5: f32[1, 1] = t(t.4)
mul.3: f32[1, 2] = mul.Tensor(t.5, slice.2)
sum.3: f32[1, 2] = sum.dim_IntList(mul.3, [0], True, dtype=f32)
add.1: f32[1, 2] = add.Tensor(sum.1, sum.3)
div.2: f32[] = div.Tensor(add, 3)
neg: f64[] = neg(arg1_1)
mul.4: f32[1, 2] = mul.Tensor(add.1, neg)
add.2: f32[1, 2] = add.Tensor(arg0_1, mul.4)
return [div.2, add.1]
arg0_1 <- add.2
"""


def test_text():
    model = nn.Linear(2, 1, bias=False)

    def loss(m, x, y):
        return F.mse_loss(m(x), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = capture(
        step_of(loss, model, optimizer),
        models={"m": model},
        optimizers={"o": optimizer},
        args=(torch.randn(3, 2), torch.randn(3, 1)),
        kwargs={},
    )
    text = show_plain(split(cleaned(found.step, Options()), 2))
    assert text == GOLDEN.strip()


# Refusals.


def mixed(m, x, y):
    z = m(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


def scaled_by_itself(m, x, y):
    found = F.cross_entropy(m(x), y)
    return found * found.detach()


with_norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
REFUSED = {
    "BatchNorm": (cross_entropy, with_norm, "uses statistics of all rows"),
    "contrastive": (mixed, nn.Linear(4, 3), "mm combines rows with other rows"),
    "sorted": (
        lambda m, x, y: (m(x).sort(0)[0] * torch.arange(3)).mean(),
        nn.Linear(4, 3),
        "sort is not known to compute row by row",
    ),
    "neighbours": (
        lambda m, x, y: (m(x) - m(x).roll(1, 0)).square().mean(),
        nn.Linear(4, 3),
        "roll is not known to compute row by row",
    ),
    "its own loss": (scaled_by_itself, nn.Linear(4, 3), "is a sum over the batch, and"),
    "the largest": (lambda m, x, y: m(x).max(), nn.Linear(4, 3), "max is not known"),
    "a softmax": (
        lambda m, x, y: m(x).softmax(0).square().sum(),
        nn.Linear(4, 3),
        "_softmax combines the rows of the batch",
    ),
    "halves": (
        lambda m, x, y: (m(x)[:3] - m(x)[3:6]).square().mean(),
        nn.Linear(4, 3),
        "slice.Tensor combines the rows of the batch",
    ),
    "recurrent": (
        lambda m, x, y: m(x.view(-1, 2, 2))[0].square().mean(),
        nn.LSTM(2, 3, batch_first=True),
        "lstm is not known to compute row by row",
    ),
    "a batch that is split": (
        lambda m, x, y: m(x[:6].view(3, 2, 4)).square().mean(),
        nn.Linear(4, 3),
        "combines the rows of the batch",
    ),
}


@pytest.mark.parametrize(("loss", "model", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals(loss, model, reason):
    step = captured(loss, model, points())
    refused = attempt(batch_region_of, step)
    assert isinstance(refused, NoMatch)
    assert reason in refused.message
    assert "test_micro_batches.py" in refused.message
    before = len(step.graph.nodes)
    assert MicroBatch(2).run(step) == 0
    assert len(step.graph.nodes) == before


def test_a_step_without_a_batch():
    step = captured(lambda m: m.weight.square().mean(), nn.Linear(4, 3), ())
    assert rows_of(step) is None
    refused = attempt(batch_region_of, step)
    assert isinstance(refused, NoMatch)
    assert "no argument" in refused.message


@pytest.mark.parametrize("rows", [7, 8, 100])
def test_a_batch_that_is_small_enough_stays_whole(rows):
    step = captured(cross_entropy, perceptron(), points())
    assert MicroBatch(rows).run(step) == 0


# Compiled.


def compiled(loss, model, batch, **asked):
    optimizer = optimizer_of(model)
    return treadle.compile(
        step_of(loss, model, optimizer), model=model, optimizer=optimizer, **asked
    )


def trained(loss, model, batch, steps=3):
    """What eager makes of a copy of the model."""
    mine = copy.deepcopy(model)
    step = step_of(loss, mine, optimizer_of(mine))
    return [step(*batch).detach() for _ in range(steps)], mine


def compare(loss, model, batch, **asked):
    """A compiled step, after three calls that are eager's, within its promise."""
    expected, other = trained(loss, model, batch)
    step = compiled(loss, model, batch, **asked)
    exact = next(model.parameters()).dtype == torch.float64
    close = {"rtol": 1e-9, "atol": 1e-10} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for old in expected:
        torch.testing.assert_close(step(*batch).detach(), old, **close)
    for new, old in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(new, old, **close)
    step.measure(*batch)
    summary = step.summary()
    assert summary.peak_measured_bytes is not None
    assert summary.peak_measured_bytes <= summary.peak_predicted_bytes
    assert not step.recompiles
    return step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_language_model(dtype):
    torch.manual_seed(0)
    step = compare(cross_entropy, LanguageModel().to(dtype), tokens(), micro_batch=3)
    words = "3 micro-batches of at most 3 of 7 rows, as asked"
    assert step.summary().micro_batches == words
    assert f"micro-batches: {words}" in step.explain()


def test_compiled_network():
    torch.manual_seed(0)
    batch = torch.randn(5, 3, 4, 4), torch.randint(5, (5,))
    compare(cross_entropy, Network().double(), (batch[0].double(), batch[1]), micro_batch=2)


def large():
    """A model whose activations are larger than its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())
    model.append(nn.Linear(32, 3))
    return model.double(), (torch.randn(12, 40, 4).double(), torch.randint(3, (12, 40)))


def test_dropout_is_what_it_is_without():
    torch.manual_seed(0)
    model, batch = LanguageModel(drop=0.3), tokens()
    other = copy.deepcopy(model)
    steps = [
        compiled(cross_entropy, each, batch, micro_batch=rows)
        for each, rows in ((model, 2), (other, None))
    ]
    for seed in range(2):
        losses = []
        for step in steps:
            torch.manual_seed(seed)
            losses.append(step(*batch).detach())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def least(rows):
    """The smallest peak of a plan with that many rows."""
    model, batch = large()
    optimizer = optimizer_of(model)
    plan = treadle.plan(
        step_of(cross_entropy, model, optimizer),
        *batch,
        model=model,
        optimizer=optimizer,
        memory="1KiB",
        options=Options(micro_batch=rows),
        points=2,
    )
    return plan.peak_bytes


def test_a_budget_chooses_the_largest_micro_batch_that_fits():
    whole, half = least(None), least(6)
    assert whole > half > least(3)
    for budget, rows in ((whole, 12), (whole - 1, 6), (half - 1, 3)):
        model, batch = large()
        step = compare(cross_entropy, model, batch, micro_batch="auto", memory=budget)
        assert step.summary().peak_measured_bytes <= budget
        said = step.summary().micro_batches
        if rows == 12:
            assert said == "the whole batch, which fits the budget"
        else:
            assert f"at most {rows} of 12 rows: {2 * rows} rows do not fit the budget" in said


def test_a_budget_that_nothing_fits_names_the_smallest():
    model, batch = large()
    with pytest.raises(PlanError, match="TR-202") as found:
        compiled(cross_entropy, model, batch, micro_batch="auto", memory="1KiB")(*batch)
    size = str(found.value).split('memory="')[1].split('"')[0]
    model, batch = large()
    step = compiled(cross_entropy, model, batch, micro_batch="auto", memory=size)
    step.prepare(*batch)
    assert "12 micro-batches of at most 1 of 12 rows" in step.summary().micro_batches


def test_without_a_budget_auto_is_the_whole_batch():
    step = compare(cross_entropy, perceptron(), points(), micro_batch="auto")
    assert step.summary().micro_batches == "the whole batch, without a budget"
    step = compare(cross_entropy, perceptron(), points(), micro_batch="auto", memory=0.5)
    assert step.summary().micro_batches == "the whole batch, which fits the budget"


def test_auto_says_why_a_batch_stays_whole():
    model = copy.deepcopy(with_norm)
    step = compiled(cross_entropy, model, points(), micro_batch="auto", memory=1.0)
    step(*points())
    said = step.summary().micro_batches
    assert said.startswith("the whole batch, which cannot be split: ")
    assert "uses statistics of all rows (" in said
    assert "test_micro_batches.py" in said


def test_a_cached_step_says_it_as_well():
    for _ in range(2):
        step = compiled(cross_entropy, perceptron(), points(), micro_batch=3)
        step(*points())
        assert "3 micro-batches of at most 3 of 7 rows" in step.explain()


def test_a_number_of_rows_is_refused_with_the_line():
    with pytest.raises(PlanError, match="TR-212") as found:
        compiled(mixed, nn.Linear(4, 3), points(), micro_batch=2)(*points())
    assert "mm combines rows with other rows" in str(found.value)
    assert "test_micro_batches.py" in str(found.value)


def test_more_parts_than_a_step_may_have():
    batch = points(rows=40)
    with pytest.raises(PlanError, match="TR-212") as found:
        compiled(cross_entropy, perceptron(), batch, micro_batch=2)(*batch)
    assert "micro_batch=3" in str(found.value)


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, "4", "largest"])
def test_what_is_no_number_of_rows(rows):
    with pytest.raises(TreadleError, match="TR-001"):
        Options(micro_batch=rows)


def test_each_size_is_compiled_separately():
    model = perceptron().double()
    step = compiled(cross_entropy, model, None, micro_batch=3)
    for rows in (7, 8, 2):
        batch = points(rows, torch.float64)
        (old, *_), _ = trained(cross_entropy, model, batch, steps=1)
        torch.testing.assert_close(step(*batch).detach(), old, rtol=1e-10, atol=1e-12)
    shapes = treadle.dynamic({"x": {0: "n"}, "y": {0: "n"}}, n=(2, 8))
    optimizer = optimizer_of(model)

    def with_names(x, y):
        found = cross_entropy(model, x, y)
        found.backward()
        optimizer.step()
        return found

    declared = treadle.compile(
        with_names, model=model, optimizer=optimizer, shapes=shapes, micro_batch=3
    )
    for rows in (5, 4):
        batch = points(rows, torch.float64)
        with torch.no_grad():
            expected = cross_entropy(model, *batch)
        torch.testing.assert_close(declared(*batch).detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_last_batch_that_is_short_stays_whole(rows):
    """Of one row nothing says which dims count rows: that is not asked of a batch that fits."""
    model = perceptron().double()
    step = compiled(cross_entropy, model, None, micro_batch=4)
    for count in (10, rows):
        batch = points(count, torch.float64)
        (old, *_), _ = trained(cross_entropy, model, batch, steps=1)
        torch.testing.assert_close(step(*batch).detach(), old, rtol=1e-10, atol=1e-12)
    assert step.summary().micro_batches == f"the whole batch: {rows} of at most 4 rows"


def test_the_plan_says_it():
    model, batch = large()
    optimizer = optimizer_of(model)
    step = step_of(cross_entropy, model, optimizer)
    asked = Options(micro_batch="auto")
    plan = treadle.plan(
        step, *batch, model=model, optimizer=optimizer, memory="1KiB", options=asked, points=2
    )
    assert not plan.fits
    assert "12 micro-batches of at most 1 of 12 rows" in plan.micro_batches
    again = treadle.plan(
        step,
        *batch,
        model=model,
        optimizer=optimizer,
        memory=plan.peak_bytes,
        options=asked,
        points=2,
    )
    assert again.fits
    assert f"micro-batches: {again.micro_batches}" in again.table()
    fixed = replace(asked, micro_batch=4)
    plan = treadle.plan(step, *batch, model=model, optimizer=optimizer, options=fixed, points=2)
    assert plan.micro_batches == "3 micro-batches of at most 4 of 12 rows, as asked"
