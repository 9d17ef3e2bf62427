"""On a real GPU: masks that are proved, and the kernels that they leave the work to, beside eager.

Eager runs cuDNN's or the memory-efficient kernel with an explicit mask, treadle the same with a
flag. They round in different places: numbers are compared as those of two kernels are, and with
float64.
"""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.compiler import cleaning
from treadle.passes.attention.fuse import FuseAttention
from treadle.runtime.store.artifact import CallStep


def furthest(found, best):
    """The largest difference, in parts of the largest number."""
    best = best.double()
    return (found.double() - best).abs().max() / best.abs().max().clamp(min=1e-30)


def causal(rows, device):
    i = torch.arange(rows, device=device)
    return (i[None] <= i[:, None])[None, None]


def window(rows, device):
    i = torch.arange(rows, device=device)
    return ((i[None] <= i[:, None]) & (i[None] > i[:, None] - 17))[None, None]


def around(rows, device):
    i = torch.arange(rows, device=device)
    return ((i[None] <= i[:, None] + 7) & (i[None] >= i[:, None] - 5))[None, None]


def prefix(rows, device):
    i = torch.arange(rows, device=device)
    return ((i[None] <= i[:, None]) | (i[None] < 9))[None, None]


def documents(rows, device):
    i = torch.arange(rows, device=device)
    return ((i[None] <= i[:, None]) & (i[None] // 16 == i[:, None] // 16))[None, None]


def everything(rows, device):
    return torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device)


class Attends(nn.Module):
    """Attention with an explicit mask and heads of keys that several queries share, repeated as
    transformers' models do; ``rotates``: queries and keys pass through what lays them out anew."""

    def __init__(
        self, head, heads=4, groups=2, *, mask=causal, rotates=True, dropout=0.0, repeats=True
    ):
        super().__init__()
        self.repeats = repeats
        self.head, self.heads, self.groups = head, heads, groups
        self.mask, self.rotates, self.dropout = mask, rotates, dropout
        self.q = nn.Linear(256, heads * head)
        self.kv = nn.Linear(256, 2 * groups * head)
        self.out = nn.Linear(heads * head, 256)

    def forward(self, x):
        batch, rows, _ = x.shape
        q = self.q(x).view(batch, rows, self.heads, self.head).transpose(1, 2)
        k, v = (
            each.view(batch, rows, self.groups, self.head).transpose(1, 2)
            for each in self.kv(x).chunk(2, -1)
        )
        if self.rotates:
            q, k = (torch.cat([-each[..., ::2], each[..., 1::2]], -1) * 0.5 for each in (q, k))
        if self.repeats:
            k, v = (self.repeated(each) for each in (k, v))
        mask = None
        if self.mask is not None:
            mask = self.mask(rows, x.device).expand(batch, -1, -1, -1)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=not self.repeats,
        )
        return self.out(y.transpose(1, 2).reshape(batch, rows, -1))

    def repeated(self, x):
        batch, groups, rows, head = x.shape
        times = self.heads // groups
        return (
            x[:, :, None]
            .expand(batch, groups, times, rows, head)
            .reshape(batch, groups * times, rows, head)
        )


def training(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        gradients = [each.grad.clone() for each in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return y.detach(), *gradients

    return step, optimizer


def calls_compared(model, rows=96, dtype=torch.bfloat16, **options):
    """The calls of attention of the compiled step, after its numbers were compared with eager's."""
    model = model.cuda().to(dtype)
    exact = copy.deepcopy(model).double()
    twin = copy.deepcopy(model)
    (function, optimizer), (eager, _), (true, _) = map(training, (model, twin, exact))
    step = treadle.compile(function, model=model, optimizer=optimizer, **options)
    x = torch.randn(3, rows, 256, device="cuda", dtype=dtype)
    for ours, theirs, best in zip(step(x), eager(x), true(x.double()), strict=True):
        assert torch.equal(ours.isnan(), best.isnan())
        ours, theirs, best = (each.nan_to_num() for each in (ours, theirs, best))
        mine, other = (furthest(each, best) for each in (ours, theirs))
        assert mine <= 2 * other + 4e-3
    calls = [each for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    return [each for each in calls if "attention" in each.op]


def compared(model, rows=96, dtype=torch.bfloat16, **options):
    """The flags and masks of the compiled step's two calls."""
    found = calls_compared(model, rows, dtype, **options)
    assert len(found) == 2  # forward and backward
    return {str(named(each, "is_causal")) for each in found}, {
        str(named(each, "attn_bias")) for each in found
    }


def named(call, name):
    """An argument of a call."""
    library, operation, overload = call.op.split(".")
    schema = getattr(getattr(getattr(torch.ops, library), operation), overload)._schema
    names = [each.name for each in schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return given.get(name, schema.arguments[names.index(name)].default_value)


FLAG, NONE = ({"True"}, {"None"}), ({"False"}, {"None"})


@pytest.fixture(autouse=True)
def _seed(monkeypatch, tmp_path):
    """Attention written out is fused whatever its size, which is no part of a step's key."""
    torch.manual_seed(0)
    always = FuseAttention(everywhere=True)
    passes = [always if isinstance(each, FuseAttention) else each for each in cleaning.FUSE]
    monkeypatch.setattr(cleaning, "FUSE", tuple(passes))
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("head", [40, 64, 128])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("rows", [8, 96, 257])
def test_a_causal_mask_becomes_the_flag(head, rotates, rows):
    assert compared(Attends(head, rotates=rotates), rows) == FLAG


@pytest.mark.parametrize("mask", [causal, window, None])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (6, 2), (4, 4)])
def test_heads_are_shared(heads, groups, mask):
    found = calls_compared(Attends(64, heads, groups, mask=mask))
    assert len(found) == 2
    for call, name in itertools.product(found, ("key", "value")):
        dim = 2 if "_flash_attention" in call.op else 1  # windows: tokens before heads
        assert named(call, name).shape[dim] == groups
        assert named(call, "query").shape[dim] == heads


@pytest.mark.parametrize("head", [40, 64, 128])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("rows", [8, 96, 257])
def test_a_causal_call_is_cudnns(head, rotates, rows):
    """PyTorch calls the flash kernel for a model's own ``is_causal=True``."""
    assert compared(Attends(head, rotates=rotates, mask=None), rows) == FLAG


CHOSEN = {1: "flash", 2: "efficient", 3: "cudnn"}
"""By PyTorch's numbers the kernels that it chooses from; which comes first differs by version."""


def test_a_causal_call_stays_where_results_are_to_be_deterministic():
    heads = torch.randn(3, 4, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        chosen = CHOSEN[torch._fused_sdp_choice(heads, heads, heads, is_causal=True)]
        found = calls_compared(Attends(64, mask=None))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(chosen in each.op for each in found), [each.op for each in found]


@pytest.mark.parametrize("mask", [causal, None])
def test_heads_that_the_model_itself_shares(mask):
    calls_compared(Attends(64, mask=mask, repeats=False))


@pytest.mark.parametrize("mask", [causal, None])
def test_eager_rounding_repeats_heads(mask):
    found = calls_compared(Attends(64, mask=mask), numerics="eager")
    assert {named(call, "key").shape[1] for call in found} == {4}


def test_heads_that_no_kernel_takes():
    calls_compared(Attends(36))  # 72 bytes: PyTorch itself writes attention out


@pytest.mark.parametrize("memory", [0.0, 0.5, None])
def test_with_a_budget(memory):
    assert compared(Attends(64), memory=memory) == FLAG


def test_single_precision():
    assert compared(Attends(64), dtype=torch.float32) == FLAG


def test_a_mask_of_all_true_goes():
    assert compared(Attends(64, mask=everything)) == NONE


def test_other_masks_stay():
    flags, masks = compared(Attends(64, mask=prefix))
    assert flags == {"False"}
    assert "None" not in masks


def test_documents_of_one_length_are_a_batch_each():
    assert compared(Attends(64, mask=documents)) == FLAG


def pairs(first, second, *others):
    """Cases in which any two choices of any two lists meet; of the first two lists once."""
    cases = []
    for i, j in itertools.product(range(len(first)), range(len(second))):
        rest = (each[(i // 2**k + j) % len(each)] for k, each in enumerate(others))
        cases.append((first[i], second[j], *rest))
    return cases


@pytest.mark.parametrize(
    ("head", "rows", "mask", "rotates"),
    pairs([40, 64, 128, 256], [20, 96, 257], [window, around], [True, False]),
)
def test_windows_are_skipped(head, rotates, rows, mask):
    found = calls_compared(Attends(head, mask=mask, rotates=rotates), rows)
    assert [each.op for each in found] == [
        "aten._flash_attention_forward.default",
        "aten._flash_attention_backward.default",
    ]
    sides = {
        tuple(named(each, f"window_size_{side}") for side in ("left", "right")) for each in found
    }
    assert sides == {(16, 0) if mask is window else (5, 7)}


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_windows_within_a_budget(memory):
    found = calls_compared(Attends(64, mask=window), memory=memory)
    assert all("_flash_attention" in each.op for each in found)


class Checkpointed(nn.Module):
    """A module whose inside is computed again for the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("mask", [window, causal, None])
def test_kernels_are_exchanged_within_checkpointed_regions(mask):
    found = calls_compared(Checkpointed(Attends(64, mask=mask)))
    kernel = "_flash_attention" if mask is window else "cudnn"
    assert len(found) in (2, 3)  # the forward twice, or what it gave is kept
    assert all(kernel in each.op for each in found)


class WritesOut(nn.Module):
    """Attention as a textbook writes it; the softmax is in single precision."""

    def __init__(self, head, heads=4, groups=4, *, mask=None, fill=-torch.inf):
        super().__init__()
        self.head, self.heads, self.groups, self.mask, self.fill = head, heads, groups, mask, fill
        self.q = nn.Linear(256, heads * head)
        self.kv = nn.Linear(256, 2 * groups * head)
        self.out = nn.Linear(heads * head, 256)

    def forward(self, x):
        batch, rows, _ = x.shape
        q = self.q(x).view(batch, rows, self.heads, self.head).transpose(1, 2)
        k, v = (
            each.view(batch, rows, self.groups, self.head)
            .transpose(1, 2)
            .repeat_interleave(self.heads // self.groups, 1)
            for each in self.kv(x).chunk(2, -1)
        )
        scores = (q @ k.transpose(-1, -2) * self.head**-0.5).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask(x), self.fill)
        y = scores.softmax(-1).to(x.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(batch, rows, -1))


def written_causal(x):
    return causal(x.shape[1], x.device)


def written_window(x):
    return window(x.shape[1], x.device)


def padding(x):
    """What the batch decides, for each key."""
    return (x[:, :, 0] < 1.0)[:, None, None]


def padding_and_causal(x):
    """Some rows of which are empty."""
    return padding(x) & written_causal(x)


@pytest.mark.parametrize(
    ("mask", "rows", "head"),
    pairs([None, written_causal, written_window, padding], [8, 96, 197, 257], [40, 64, 128]),
)
def test_attention_written_out_is_a_call(head, rows, mask):
    found = calls_compared(WritesOut(head, mask=mask), rows)
    kernel = "flash" if mask is written_window and rows > 17 else "cudnn"
    assert len(found) == 2
    assert all(kernel in each.op for each in found)


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min])
def test_rows_that_a_mask_leaves_empty(fill):
    found = calls_compared(WritesOut(64, mask=padding_and_causal, fill=fill))
    assert len(found) == 2


@pytest.mark.parametrize("groups", [1, 2])
def test_written_out_with_shared_heads(groups):
    found = calls_compared(WritesOut(64, groups=groups, mask=written_causal))
    assert len(found) == 2


def test_written_out_in_single_precision_stays():
    assert not calls_compared(WritesOut(64, mask=written_causal), dtype=torch.float32)


def test_written_out_rounded_as_in_eager_stays():
    assert not calls_compared(WritesOut(64, mask=written_causal), numerics="eager")


def test_eager_rounding_keeps_the_mask():
    flags, masks = compared(Attends(64), numerics="eager")
    assert flags == {"False"}
    assert "None" not in masks


def test_dropout_draws_what_eager_draws():
    model = Attends(64, dropout=0.1).cuda().bfloat16()
    (function, optimizer), (eager, _) = training(model), training(copy.deepcopy(model))
    step = treadle.compile(function, model=model, optimizer=optimizer)
    x = torch.randn(3, 96, 256, device="cuda", dtype=torch.bfloat16)
    step.prepare(x)
    torch.manual_seed(1)
    ours = step(x)
    torch.manual_seed(1)
    for mine, theirs in zip(ours, eager(x), strict=True):
        assert furthest(mine, theirs) <= 3e-2


@pytest.mark.parametrize("rotates", [True, False])
def test_the_allocator_never_holds_more_than_was_promised(rotates, tmp_path):
    gc.collect()
    torch.cuda.empty_cache()
    outside = torch.cuda.memory_allocated()
    model = Attends(64, rotates=rotates).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = treadle.Options(cache_dir=tmp_path, replay=False)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    x = torch.randn(16, 1024, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        step(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - outside
    assert peak <= step.compiled.artifact.peak_bytes
