"""On a real GPU: one compile for many sizes. Sizes in random order, against eager."""

import copy
import gc
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.compat.switches import clear_workspaces

WORDS, WIDTH, HEADS, LAYERS, LONGEST = 1003, 128, 4, 2, 512


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in rows)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Language(nn.Module):
    """GPT-2's plan, smaller: tied embeddings of an odd number of words, learned positions."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.words(tokens) + self.places(places), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language(dtype):
    model = Language().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def step(tokens, labels):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def shapes(batch=(1, 8), time=(2, LONGEST)):
    named = {"tokens": ("batch", "time"), "labels": ("batch", "time")}
    return treadle.dynamic(named, batch=batch, time=time)


def sizes(seed):
    """Every kind of length, in any order: the smallest, primes, multiples of 8 and 16, the
    longest."""
    lengths = [2, 3, 5, 16, 24, 31, 64, 127, 128, 200, 256, 257, 384, 509, 512]
    random.Random(seed).shuffle(lengths)
    return [(2 + n % 7, length) for n, length in enumerate(lengths)]


def batches(seed):
    for rows, length in sizes(seed):
        yield [torch.randint(WORDS, (rows, length), device="cuda") for _ in range(2)]


def like(model, optimizer, other, others):
    """``other`` with the parameters and the state of ``model``."""
    other.load_state_dict(model.state_dict())
    others.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_of_any_size_is_eager(dtype):
    """Dropout draws what eager draws; a step of each size starts from eager's parameters."""
    torch.manual_seed(0)
    model, optimizer, train = language(dtype)
    twin, others, eager = language(dtype)
    step = treadle.compile(train, model=model, optimizer=optimizer, shapes=shapes())
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.02}
    like(model, optimizer, twin, others)
    for number, batch in enumerate(batches(0)):
        torch.manual_seed(number)
        loss = step(*batch)
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager(*batch), **close)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=2e-3)
        like(twin, others, model, optimizer)
    assert step.recompiles == [f"compiled for batch in 1..8, time in 2..{LONGEST}"]


def test_no_size_holds_more_than_is_promised():
    torch.manual_seed(0)
    gc.collect()
    clear_workspaces()
    others = torch.cuda.memory_allocated()
    model, optimizer, train = language(torch.bfloat16)
    step = treadle.compile(train, model=model, optimizer=optimizer, shapes=shapes())
    for seed in range(3):  # some are recorded
        for batch in batches(seed):
            step(*batch)
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for seed in range(3, 5):
        for batch in batches(seed):
            step(*batch)
    torch.cuda.synchronize()
    gc.collect()
    peak = torch.cuda.max_memory_allocated() - others
    clear_workspaces()
    assert torch.cuda.memory_allocated() <= before + (1 << 20), "nothing comes to what is held"
    assert peak <= 1.01 * step.summary().peak_of_any_call_bytes, step.explain()
    assert len(step.recompiles) == 1


def test_a_kernel_is_compiled_for_classes_of_sizes(monkeypatch):
    """Never for each size: those of 16 come together, and so do others."""
    triton = pytest.importorskip("triton")
    compiled = []

    def compiles(**said):
        compiled.append(said["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiles)
    torch.manual_seed(0)
    model, optimizer, train = language(torch.float32)
    step = treadle.compile(train, model=model, optimizer=optimizer, shapes=shapes((4, 4)))
    for length in (64, 63, 32, 31):
        step(*(torch.randint(WORDS, (4, length), device="cuda") for _ in range(2)))
    known = len(compiled)
    assert known
    for length in (48, 256, 496, 33, 101, 509, 16, 2):
        step(*(torch.randint(WORDS, (4, length), device="cuda") for _ in range(2)))
    assert compiled[known:] == []


def test_sizes_that_come_often_are_recorded():
    torch.manual_seed(0)
    model, optimizer, train = language(torch.bfloat16)
    step = treadle.compile(train, model=model, optimizer=optimizer, shapes=shapes())
    for _ in range(6):
        for length in (32, 48):
            step(*(torch.randint(WORDS, (4, length), device="cuda") for _ in range(2)))
    recorded = [each for each in step.summary().variants if each.is_recorded]
    assert len(recorded) == 2, step.explain()


def test_a_budget_holds_for_every_size():
    torch.manual_seed(0)
    model, optimizer, train = language(torch.bfloat16)
    kind = shapes((4, 8), (16, 256))
    free = treadle.compile(train, model=model, optimizer=optimizer, shapes=kind)
    batch = [torch.randint(WORDS, (8, 256), device="cuda") for _ in range(2)]
    free(*batch)
    wanted = int(free.summary().peak_of_any_call_bytes * 0.95)
    model, optimizer, train = language(torch.bfloat16)
    step = treadle.compile(train, model=model, optimizer=optimizer, shapes=kind, memory=wanted)
    for rows, length in [(8, 256), (4, 16), (5, 31)]:
        batch = [torch.randint(WORDS, (rows, length), device="cuda") for _ in range(2)]
        assert torch.isfinite(step(*batch))
    assert step.summary().peak_of_any_call_bytes <= wanted
    assert len(step.recompiles) == 1


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(()))

    def forward(self, x):
        """Reductions down and along, of what is as large as the call says."""
        h = (x * self.factor).softmax(-1)
        return h.sum(0), (h - h.mean(-1, keepdim=True)).square().sum(), h.argmax(-1)


@pytest.mark.parametrize("most", [100, 40_000])
def test_reductions_over_sizes_that_change(most):
    torch.manual_seed(0)
    model = Scale().cuda()
    declared = treadle.dynamic({"x": ("n", "m")}, n=(2, most), m=(2, 9))
    step = treadle.compile(lambda x: model(x), model=model, shapes=declared)
    for n, m in [(2, 2), (3, 9), (97, 7), (64, 8), (100, 2)] + [(39_999, 9)] * (most > 100):
        x = torch.randn(n, m, device="cuda")
        for mine, theirs in zip(step(x), model(x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert len(step.recompiles) == 1
