"""On a real GPU: gradients of a step in micro-batches, with the attention kernels that it has."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import treadle
from sized_models import autocast_training
from treadle.options import Options

WIDTH, HEADS, WORDS = 64, 4, 257
KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


class Block(nn.Module):
    def __init__(self, kernels):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.kernels = nn.Linear(WIDTH, WIDTH), kernels

    def forward(self, x):
        heads = self.into(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernels):
            attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def language_model(kernels):
    blocks = [Block(kernels) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("kernels", KERNELS)
def test_micro_batches_train_as_the_whole_batch(kernels, tmp_path):
    torch.manual_seed(0)
    model = language_model(KERNELS[kernels]).cuda()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    train = autocast_training(model, optimizer, loss_of, torch.bfloat16)
    eager = autocast_training(twin, other, loss_of, torch.bfloat16)
    options = Options(micro_batch=3, cache_dir=tmp_path)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    for _ in range(5):  # launched, and recorded
        x = torch.randint(WORDS, (8, 128), device="cuda")
        y = x.roll(-1, 1)
        y[0, :40] = -100
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=0.01, atol=0.01)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02)
    assert step.summary().micro_batches == "3 micro-batches of at most 3 of 8 rows, as asked"


def layered(rows, depth, **options):
    """A batch, and a step on it."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = autocast_training(model, optimizer, F.mse_loss)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=Options(**options))
    return torch.randn(rows, 512, device="cuda"), step


def test_a_budget_chooses_rows_that_fit(tmp_path):
    x, step = layered(8, 1, cache_dir=tmp_path)
    step(x, x)  # the first compile on a machine measures the GPU's rates
    del x, step
    gc.collect()
    x, step = layered(1 << 15, 8, memory="250MiB", micro_batch="auto", cache_dir=tmp_path)
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        step(x, x)
        assert torch.cuda.max_memory_allocated() <= 250 << 20
    assert "micro-batches of at most" in step.summary().micro_batches
