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

import treadle
from treadle.runtime.artifact import CallStep


def furthest(found, best):
    """The largest difference, in parts of the largest number."""
    return (found.double() - best.double()).abs().max() / best.double().abs().max()


def causal(rows, device):
    i = torch.arange(rows, device=device)
    return (i[None] <= i[:, None])[None, None]


def window(rows, device):
    i = torch.arange(rows, device=device)
    return ((i[None] <= i[:, None]) & (i[None] > i[:, None] - 17))[None, None]


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
def _seed():
    torch.manual_seed(0)


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
        assert named(call, name).shape[1] == groups
        assert named(call, "query").shape[1] == heads


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
    flags, masks = compared(Attends(64, mask=window))
    assert flags == {"False"}
    assert "None" not in masks


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
