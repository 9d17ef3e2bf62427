"""What the backend's graphs have from outside: scattered masks of attention, odd products."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from treadle import backend
from treadle.backend import treadle

DEVICE = "cuda"
HEADS, WIDTH = 8, 512


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """With a mask of one number for each row of weights, as libraries make for traced models."""

    def __init__(self):
        super().__init__()
        self.taken = nn.Linear(WIDTH, 3 * WIDTH)
        self.given = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rows):
        batch, length, _ = x.shape
        heads = self.taken(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = rows[:, None, :, None].expand(batch, 1, length, length)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.given(y.transpose(1, 2).reshape(batch, length, WIDTH))


@pytest.mark.parametrize("kept", [1.0, 0.7], ids=["all", "some rows"])
def test_a_scattered_mask_leaves_attention_fused(kept):
    model = Attention().to(DEVICE, torch.bfloat16)
    theirs = copy.deepcopy(model).float()
    ours = torch.compile(model, backend=treadle)
    batch, length = 4, 1024
    x = torch.randn(batch, length, WIDTH, device=DEVICE)
    rows = torch.rand(batch, length, device=DEVICE) < kept
    rows[:, 0] = True
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ours(x.bfloat16(), rows)
    weight = rows[..., None].float()  # a row that sees nothing is anything
    (y.float() * weight).square().mean().backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < batch * HEADS * length * length * 4  # the weights of attention in 32 bits
    expected = theirs(x, torch.ones_like(rows))
    (expected * weight).square().mean().backward()
    torch.testing.assert_close(y.float() * weight, expected * weight, rtol=2e-2, atol=2e-2)
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        scale = other.grad.abs().max()
        torch.testing.assert_close(mine.grad.float() / scale, other.grad / scale, rtol=0, atol=3e-2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [4099, 5001])
def test_odd_logits_that_are_returned(bias, vocabulary):
    head = nn.Linear(WIDTH, vocabulary, bias=bias).to(DEVICE, torch.bfloat16)
    theirs = copy.deepcopy(head).float()
    ours = torch.compile(head, backend=treadle)
    tokens = 4096
    x = torch.randn(tokens, WIDTH, device=DEVICE)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    mine, other = (x.to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32))
    logits = ours(mine)
    assert logits.stride() == (vocabulary, 1)
    expected = theirs(other)
    torch.testing.assert_close(logits.float(), expected, rtol=2e-2, atol=3e-2)
    for values in (logits, expected):
        F.cross_entropy(values.float(), targets, reduction="sum").backward()
    grads = (mine.grad, *(p.grad for p in head.parameters()))
    wanted = (other.grad, *(p.grad for p in theirs.parameters()))
    for one, two in zip(grads, wanted, strict=True):
        scale = math.sqrt(two.square().mean())
        torch.testing.assert_close(one.float() / scale, two / scale, rtol=3e-2, atol=5e-2)
    graph = max(backend.compiled(), key=lambda graph: graph.number)
    assert any("_piece" in name for name in graph._built.artifact.buffers)
