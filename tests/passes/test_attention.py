"""Attention that is written out: what is found, what it becomes, and why the rest stays."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from testing import trace
from treadle.capture.step import capture
from treadle.compiler import cleaning
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.attention.fuse import FuseAttention, findings
from treadle.passes.attention.kernels import least_scores

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

aten = torch.ops.aten
CALL = aten._scaled_dot_product_flash_attention_for_cpu.default
GRADIENT = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ALWAYS = FuseAttention(everywhere=True)
MINUS = float("-inf")


def operands(b: int, h: int, t: int, s: int, d: int, dtype=torch.float32) -> tuple[Tensor, ...]:
    """Query, key, value, and the gradient of the result."""
    torch.manual_seed(0)
    sizes = ((b, h, t, d), (b, h, s, d), (b, h, s, d), (b, h, t, d))
    return tuple(torch.randn(size).to(dtype) for size in sizes)


def trained(attention: Callable[..., Tensor], more: int = 0) -> Callable[..., object]:
    """The result of ``attention`` and its gradients, for ``more`` operands beside the first."""

    def differentiate(query, key, value, gradient, *others):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        result = attention(*leaves, *others)
        return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

    def program(query, key, value, gradient):
        return differentiate(query, key, value, gradient)

    def masked(query, key, value, gradient, mask):
        return differentiate(query, key, value, gradient, mask)

    return masked if more else program


def cleaned(program: Callable[..., object], *inputs: Tensor) -> StepGraph:
    step = trace(program, *inputs)
    run_passes(step, cleaning.CLEAN)
    return step


def calls(step: StepGraph, target: object) -> int:
    return len(step.graph.find_nodes(op="call_function", target=target))


def numbers(program: Callable[..., object], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    found = program(*inputs)
    return list(found) if isinstance(found, tuple) else [found]


def doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in inputs)


def check_fused(
    program: Callable[..., object], inputs: tuple[Tensor, ...], *, gradient: bool = True
) -> StepGraph:
    """The pass fires once, finds nothing after, and its numbers are as near to the exact ones as
    eager's."""
    step = cleaned(program, *inputs)
    run_passes(step, [ALWAYS])
    assert calls(step, CALL) == 1
    assert calls(step, GRADIENT) == gradient
    assert calls(step, aten._softmax.default) == 0
    assert ALWAYS.run(step) == 0
    eager, exact = numbers(program, inputs), numbers(program, doubled(inputs))
    for new, old, true in zip(run_step(step, inputs), eager, exact, strict=True):
        assert new is not None
        check_near(new, old, true)
    return step


def check_near(new: Tensor, old: Tensor, true: Tensor) -> None:
    assert new.shape == old.shape
    assert new.dtype == old.dtype
    assert torch.equal(new.isnan(), old.isnan())
    new, old, true = (each.double().nan_to_num() for each in (new, old, true))
    rounding = 64 * torch.finfo(torch.float32).eps * (1 + true.abs().max())
    assert (new - true).abs().max() <= 2 * (old - true).abs().max() + rounding


def causal(t: int, s: int) -> Tensor:
    return torch.ones(t, s, dtype=torch.bool).tril()


def plain(query, key, value):
    return (query @ key.transpose(-2, -1) * 0.4).softmax(-1) @ value


def flat(query, key, value):
    """One product for all heads, scale on the query: ``nn.MultiheadAttention``."""
    b, h, t, d = query.shape
    q, k, v = (each.reshape(b * h, -1, d) for each in (query * d**-0.5, key, value))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(2), v).view(b, h, t, d)


def divided(query, key, value):
    """As a sum over indices, divided by a tensor that is one number."""
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / torch.full([], 2.5)
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), value)


def filled(query, key, value):
    scores = query @ key.transpose(-2, -1) * 0.4
    return scores.masked_fill(~causal(*scores.shape[-2:]), MINUS).softmax(-1) @ value


def chosen(query, key, value):
    scores = (query @ key.mT) / 2.5
    least = torch.finfo(scores.dtype).min
    return scores.where(causal(*scores.shape[-2:]), least).softmax(-1) @ value


def added(query, key, value):
    scores = query @ key.mT * 0.4
    zero = torch.zeros((), dtype=scores.dtype)
    mask = zero.where(causal(*scores.shape[-2:]), torch.finfo(scores.dtype).min)
    return (mask[None, None] + scores).softmax(-1) @ value


def joined(query, key, value):
    """A mask in the product, and a second one; heads apart from batches only before."""
    b, h, t, d = query.shape
    q, k, v = (each.reshape(b * h, -1, d) for each in (query, key, value))
    band = torch.zeros(t, k.shape[1], dtype=q.dtype).masked_fill(
        causal(t, k.shape[1]).logical_not(), MINUS
    )
    scores = torch.baddbmm(band[None], q, k.transpose(1, 2)) + torch.ones((), dtype=q.dtype)
    return (scores.softmax(-1) @ v).view(b, h, t, d)


def upcast(query, key, value):
    scores = query @ key.transpose(2, 3) * 0.4
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value


SPELLINGS = (plain, flat, filled, chosen, added, upcast)
SMALL = st.sampled_from([1, 2, 3, 5])
LONG = st.sampled_from([2, 7, 13, 33])
"""Products over one element are formulas by then (``passes/products/sums.py``)."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPELLINGS), SMALL, SMALL, LONG, LONG, LONG, st.booleans())
def test_any_spelling_of_any_size_becomes_a_call(attention, b, h, t, s, d, gradient):
    inputs = operands(b, h, t, s, d)
    if gradient:
        check_fused(trained(attention), inputs)
    else:
        check_fused(lambda q, k, v: attention(q, k, v), inputs[:3], gradient=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", [plain, filled, upcast])
def test_narrow_numbers_lose_less_than_in_eager(attention, dtype):
    check_fused(trained(attention), operands(2, 3, 17, 13, 8, dtype))


def test_a_sum_over_indices_divided_by_a_tensor():
    """Dims of size 1 are no product there."""
    check_fused(trained(divided), operands(2, 3, 5, 7, 4))


def test_a_mask_in_the_product_and_one_that_is_a_number():
    step = cleaned(trained(joined), *operands(2, 2, 5, 7, 4))
    (finding,) = findings(step, everywhere=True)
    assert finding.fused, finding.refused
    assert finding.masks == 2
    check_fused(trained(joined), operands(2, 2, 5, 7, 4))


def test_numbers_that_the_graph_holds():
    def attention(query, key, value):
        zero = torch.tensor(0.0)
        mask = zero.where(causal(query.shape[2], key.shape[2]), torch.finfo(torch.float32).min)
        return (query @ key.mT * 0.4 + mask).softmax(-1) @ value

    check_fused(trained(attention), operands(2, 2, 5, 5, 4))


@pytest.mark.parametrize("copied", [True, False])
def test_grouped_heads_repeated_or_expanded(copied):
    def program(query, key, value, gradient):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        q, k, v = leaves
        if copied:
            k, v = (each.repeat_interleave(3, dim=1) for each in (k, v))
        else:
            k, v = (each[:, :, None].expand(2, 2, 3, 7, 4).reshape(2, 6, 7, 4) for each in (k, v))
        result = filled(q, k, v)
        return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

    query, _, _, gradient = operands(2, 6, 5, 7, 4)
    _, key, value, _ = operands(2, 2, 5, 7, 4)
    check_fused(program, (query, key, value, gradient))


def test_grouped_heads_as_a_fifth_dim():
    def attention(query, key, value):
        grouped = query.unflatten(1, (2, 3))
        weights = (grouped @ key[:, :, None].mT * 0.4).softmax(-1)
        return (weights @ value[:, :, None]).flatten(1, 2)

    def program(query, key, value, gradient):
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        result = attention(*leaves)
        return (result.detach(), *torch.autograd.grad(result, leaves, gradient))

    query, _, _, gradient = operands(2, 6, 5, 7, 4)
    _, key, value, _ = operands(2, 2, 5, 7, 4)
    check_fused(program, (query, key, value, gradient))


def frozen_keys(query, key, value, gradient):
    leaf = query.detach().requires_grad_()
    result = plain(leaf, key, value)
    return (result.detach(), *torch.autograd.grad(result, [leaf], gradient))


def frozen_scores(query, key, value, gradient):
    leaf = value.detach().requires_grad_()
    result = plain(query, key, leaf)
    return (result.detach(), *torch.autograd.grad(result, [leaf], gradient))


@pytest.mark.parametrize("program", [frozen_keys, frozen_scores])
def test_only_some_gradients_are_wanted(program):
    check_fused(program, operands(2, 2, 5, 7, 4))


# Rows that are masked whole.


def by_input(query, key, value, mask):
    """A mask of which only a call knows what it leaves."""
    scores = query @ key.transpose(-2, -1) * 0.4
    return scores.masked_fill(mask, MINUS).softmax(-1) @ value


def by_input_kept(query, key, value, mask):
    scores = query @ key.transpose(-2, -1) * 0.4
    return scores.where(mask.logical_not(), MINUS).softmax(-1) @ value


def by_input_added(query, key, value, mask):
    scores = query @ key.transpose(-2, -1) * 0.4
    zeros = torch.zeros(mask.shape, dtype=scores.dtype)
    return (scores + zeros.masked_fill(mask, MINUS)).softmax(-1) @ value


BY_INPUT = (by_input, by_input_kept, by_input_added)
SHAPES = ((5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 1, 5, 1))


@pytest.mark.parametrize("attention", BY_INPUT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dead", [True, False])
def test_rows_that_are_masked_whole_are_eagers(attention, shape, dead):
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    if dead:
        mask.view(-1, shape[-2], shape[-1])[0, 0] = True
    inputs = (*operands(2, 3, 5, 7, 4), mask)
    assert numbers(trained(attention, 1), inputs)[0].isnan().any() == dead
    check_fused(trained(attention, 1), inputs)


@pytest.mark.parametrize("attention", BY_INPUT)
def test_dead_rows_without_a_gradient(attention):
    mask = torch.rand(5, 7) < 0.4
    mask[2] = True
    inputs = (*operands(2, 3, 5, 7, 4)[:3], mask)
    check_fused(lambda q, k, v, m: attention(q, k, v, m), inputs, gradient=False)


def finite_by_input(query, key, value, mask):
    scores = query @ key.mT * 0.4
    zero = torch.zeros((), dtype=scores.dtype)
    return (scores + zero.where(mask, torch.finfo(scores.dtype).min)).softmax(-1) @ value


def finite_by_input_filled(query, key, value, mask):
    scores = query @ key.mT * 0.4
    return scores.where(mask, torch.finfo(scores.dtype).min).softmax(-1) @ value


@pytest.mark.parametrize("attention", [finite_by_input, finite_by_input_filled])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_even_mixtures_are_eagers(attention, shape, dtype):
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = True
    mask.view(-1, shape[-2], shape[-1])[0, 0] = False
    inputs = (*operands(2, 3, 5, 7, 4, dtype), mask)
    check_fused(trained(attention, 1), inputs)
    program = lambda q, k, v, m: attention(q, k, v, m)  # noqa: E731
    check_fused(program, (*inputs[:3], mask), gradient=False)


def numbers_by_input(query, key, value, mask):
    return (query @ key.mT * 0.4 + mask).softmax(-1) @ value


def narrowed(query, key, value, mask):
    """What is finite in f32 and not in bf16 makes dead rows NaN."""
    zero = torch.zeros(())
    scores = query @ key.mT * 0.4 + zero.where(mask, torch.finfo(torch.float32).min)
    return scores.bfloat16().softmax(-1).float() @ value


@pytest.mark.parametrize("attention", [numbers_by_input, narrowed])
def test_masks_of_which_nothing_is_known(attention):
    mask = torch.randn(5, 7) if attention is numbers_by_input else torch.rand(5, 7) < 0.5
    inputs = (*operands(2, 3, 5, 7, 4), mask)
    for program, given_ in (
        (trained(attention, 1), inputs),
        (lambda q, k, v, m: attention(q, k, v, m), (*inputs[:3], mask)),
    ):
        (finding,) = findings(cleaned(program, *given_), everywhere=True)
        assert "may be a finite number in all of a row" in finding.refused


# What stays.


class Doubled(torch.autograd.Function):
    """The same, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def scores_of(query, key):
    return query @ key.mT * 0.4


def biased(query, key, value):
    bias = query.sum(-1, keepdim=True)
    return (scores_of(query, key) + bias).softmax(-1) @ value


def returned(query, key, value):
    weights = scores_of(query, key).softmax(-1)
    return weights @ value + weights.sum()


REFUSED = {
    "softcap": (lambda q, k, v: scores_of(q, k).tanh().softmax(-1) @ v, "neither a product"),
    "other dim": (lambda q, k, v: scores_of(q, k).softmax(-2) @ v, "over their last dim"),
    "scores read": (
        lambda q, k, v: (s := scores_of(q, k)).softmax(-1) @ v + s.sum(),
        "are used by others",
    ),
    "weights read": (returned, "the probabilities are used by"),
    "weights alone": (
        lambda q, k, v: scores_of(q, k).softmax(-1).sum() * q + v.sum(),
        "the probabilities are used by",
    ),
    "wrong gradient": (
        lambda q, k, v: Doubled.apply(scores_of(q, k)).softmax(-1) @ v,
        "scores are scaled by 0.4, their gradient by 0.8",
    ),
    "learned bias": (biased, "a bias is learned, and the kernel computes no gradient"),
    "scaled mask": (
        lambda q, k, v: ((q @ k.mT + torch.ones(5, 7)) * 0.4).softmax(-1) @ v,
        "masks scores that are scaled after it",
    ),
    "scale by an operand": (
        lambda q, k, v: (q @ k.mT * v.sum().detach()).softmax(-1) @ v,
        "scales by no number that is known",
    ),
    "zero scale": (lambda q, k, v: (q @ k.mT * 0.0).softmax(-1) @ v, "scales by 0.0"),
    "near fill": (
        lambda q, k, v: scores_of(q, k).masked_fill(~causal(5, 7), -1e4).softmax(-1) @ v,
        "fills with -10000.0, which scores may come near",
    ),
    "transposed weights": (
        lambda q, k, v: (k @ q.mT).mT.softmax(-1) @ v,
        "takes queries and keys in another order",
    ),
    "added number": (
        lambda q, k, v: torch.add(scores_of(q, k), torch.ones(5, 7), alpha=2).softmax(-1) @ v,
        "scales what it adds",
    ),
    "dead constant row": (
        lambda q, k, v: (scores_of(q, k) + torch.full((5, 7), -1e9)).softmax(-1) @ v,
        "may be a finite number in all of a row",
    ),
    "NaN in a mask": (
        lambda q, k, v: (scores_of(q, k) + torch.full((5, 7), math.nan)).softmax(-1) @ v,
        "may be a finite number in all of a row",
    ),
    "wide softmax": (
        lambda q, k, v: scores_of(q, k).double().softmax(-1).float() @ v,
        "the softmax is of torch.float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_it_leaves_an_attention_alone(name):
    attention, reason = REFUSED[name]
    inputs = operands(2, 3, 5, 7, 4)
    if name == "transposed weights":
        inputs = operands(2, 3, 5, 5, 4)
    step = cleaned(trained(attention), *inputs)
    (finding,) = findings(step, everywhere=True)
    assert reason in finding.refused
    assert not finding.fused
    assert ALWAYS.run(step) == 0


def test_queries_as_columns_without_a_gradient():
    program = lambda q, k, v: (k @ q.mT).mT.softmax(-1) @ v  # noqa: E731
    (finding,) = findings(cleaned(program, *operands(2, 3, 5, 5, 4)[:3]), everywhere=True)
    assert "takes queries and keys in another order" in finding.refused


def test_sizes_and_dtypes_that_there_is_no_kernel_for():
    for inputs, reason in (
        (operands(2, 3, 5, 7, 4, torch.float64), "no fused kernel for torch.float64"),
        ((*operands(2, 3, 5, 7, 4)[:2], torch.randn(2, 3, 7, 6)), "4 features and values 6"),
        (operands(2, 3, 5, 0, 4)[:3], "one of the sizes is 0"),
        (operands(2, 0, 5, 7, 4)[:3], "one of the sizes is 0"),
    ):
        step = cleaned(lambda q, k, v: plain(q, k, v), *inputs[:3])
        (finding,) = findings(step, everywhere=True)
        assert reason in finding.refused


def test_weights_that_the_caller_gets():
    def program(query, key, value):
        weights = scores_of(query, key).softmax(-1)
        return weights @ value, weights

    (finding,) = findings(cleaned(program, *operands(2, 3, 5, 7, 4)[:3]), everywhere=True)
    assert "the probabilities are used by the caller" in finding.refused


def test_a_softmax_that_is_no_attention_is_not_listed():
    assert findings(cleaned(lambda x: x.softmax(-1), torch.randn(3, 4))) == ()


def test_only_where_it_was_measured_to_lose_nothing():
    inputs = operands(1, 1, 32, 32, 8)[:3]
    step = cleaned(lambda q, k, v: plain(q, k, v), *inputs)
    (finding,) = findings(step)
    assert finding.refused == (
        "32 x 32 scores of torch.float32: the call was measured to be slower"
    )
    assert FuseAttention().run(step) == 0
    assert least_scores(torch.float16, 64, masked=False) == 512 * 512
    assert least_scores(torch.float16, 256, masked=True) is None
    assert least_scores(torch.float32, 64, masked=True) is None
    assert least_scores(torch.bfloat16, 64, masked=False) is None


def test_no_output_shares_memory_that_did_not():
    def program(query, key, value, gradient):
        first, *others = trained(flat)(query, key, value, gradient)
        return first, first.transpose(1, 2).contiguous(), *others

    inputs = operands(1, 2, 5, 7, 4)
    step = check_fused(program, inputs)
    aliases = analyse(step)
    kept = [aliases.of[node] for node in step.returned if node is not None]
    assert len(frozenset().union(*kept)) == len(kept)


# Models.

FIRES = {"gpt2": (2, 2), "llama": (2, 2), "bert": (2, 2), "vit": (2, 2), "whisper": (6, 6)}


def without_dropout(model: nn.Module) -> nn.Module:
    for each in model.modules():
        for name, value in vars(each).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(each, name, 0.0)
    return model


def captured(name: str, *, train: bool, dropout: bool = False, padded: bool = False) -> StepGraph:
    architectures = pytest.importorskip("architectures")
    torch.manual_seed(0)
    model, batch = getattr(architectures, name)()
    model.set_attn_implementation("eager")
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    (model if dropout else without_dropout(model)).train(train)

    def step(**given):
        with torch.set_grad_enabled(train):
            loss = model(**given).loss
        if train:
            loss.backward()
        return loss.detach()

    found = capture(step, models={"": model}, optimizers={}, args=(), kwargs=batch)
    return cleaning.clean(found.step)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", FIRES)
def test_fires_on_ordinary_models(name, train):
    step = captured(name, train=train)
    found = findings(step, everywhere=True)
    assert (sum(each.fused for each in found), len(found)) == FIRES[name]
    assert {each.trained for each in found} == {train}
    run_passes(step, [ALWAYS])
    assert calls(step, CALL) == FIRES[name][0]
    assert calls(step, GRADIENT) == FIRES[name][0] * train
    assert ALWAYS.run(step) == 0


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_fires_where_the_batch_says_which_tokens_count(name, train):
    found = findings(captured(name, train=train, padded=True), everywhere=True)
    assert [each.refused for each in found] == ["", ""]
    assert {each.masks for each in found} == {1}


def test_dropout_is_drawn_from_eagers_stream():
    found = findings(captured("gpt2", train=True, dropout=True), everywhere=True)
    assert {each.refused for each in found} == {
        "dropout: its mask is of eager's random stream, drawn outside"
    }


def test_a_bias_that_is_learned_stays_and_what_is_beside_it_does_not():
    found = findings(captured("t5", train=True), everywhere=True)
    assert [each.fused for each in found] == [False, False, False, True, False, True]
    learned = {each.refused for each in found if each.refused}
    assert learned
    assert all(
        "the gradient of the scores is used by" in each
        and each.endswith("a bias is learned, and the kernel computes no gradient for it")
        for each in learned
    )


class Layer(nn.Module):
    """A layer of a language model with its mask in a buffer."""

    def __init__(self, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(heads * width, 3 * heads * width)
        self.outer = nn.Linear(heads * width, heads * width)
        self.register_buffer("kept", torch.ones(length, length).tril())

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        scores = q @ k.mT * 0.3
        scores = scores.masked_fill(self.kept == 0, MINUS)
        return x + self.outer((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


@dataclass
class Trained:
    losses: list[float]
    model: nn.Module
    step: Callable[..., Tensor]
    x: Tensor


def train(*, compiled: bool, folder: Path) -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(2, 4, 512), Layer(2, 4, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x = torch.randn(1, 512, 8)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if compiled:
        options = treadle.Options(cache_dir=folder, progress=False)
        step = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    return Trained([step(x).item() for _ in range(3)], model, step, x)


def test_training_is_eagers_and_the_plan_knows_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, "FUSE", (ALWAYS,))
    eager = train(compiled=False, folder=tmp_path)
    fused = train(compiled=True, folder=tmp_path)
    torch.testing.assert_close(fused.losses, eager.losses, rtol=1e-5, atol=1e-6)
    for new, old in zip(fused.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)
    artifact = fused.step.compiled.artifact
    attention = [each for each in artifact.steps if "flash" in getattr(each, "op", "")]
    assert len(attention) == 4
    assert fused.step.measure(fused.x).peak_bytes <= artifact.peak_bytes


def test_numbers_rounded_as_by_eager_are_left(tmp_path):
    exact = cleaning.cleaning_of(treadle.Options(numerics="eager"))
    assert not any(isinstance(each, FuseAttention) for each in exact)
    assert any(isinstance(each, FuseAttention) for each in cleaning.cleaning_of(treadle.Options()))
