"""Numbers and products of float8 on a GPU."""

import copy

import pytest
import torch
from torch import nn

import treadle
from float8_numbers import FLOAT8, numbers, same_bits
from float8_products import in_float8, no_further_from_exact, products, training

HAS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS, reason="no GPU that multiplies float8")


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_conversions_are_eagers(dtype, source):
    x = numbers(dtype).to(source).cuda()
    x = x[: x.numel() // 16 * 16].view(16, -1)
    run = lambda x: (x.to(dtype), x.to(dtype).to(source), x.to(dtype).t().clone())  # noqa: E731
    step = treadle.compile(run, model=nn.Linear(1, 1).cuda(), strict=True)
    for ours, eagers in zip(step(x), run(x), strict=True):
        same_bits(ours.cpu(), eagers.cpu())


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self, width, hidden, classes, depth):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x))


@pytest.mark.parametrize("memory", [None, 0.5])
def test_a_step_is_the_one_with_layers_of_float8(memory):
    torch.manual_seed(0)
    model = Net(1024, 4096, 100, 2).cuda()
    other, exact = copy.deepcopy(model), copy.deepcopy(model)
    in_float8(other.blocks)
    step, optimizer = training(model, "cuda")
    compiled = treadle.compile(
        step, model=model, optimizer=optimizer, numerics="fp8", memory=memory, strict=True
    )
    eager, full = training(other, "cuda")[0], training(exact, "cuda", exact=True)[0]
    for _ in range(4):
        x = torch.randn(8192, 1024, device="cuda")
        y = torch.randint(0, 100, (8192,), device="cuda")
        (loss, grads), (other_loss, other_grads) = compiled(x, y), eager(x, y)
        torch.testing.assert_close(loss, other_loss, rtol=1e-3, atol=0)
        no_further_from_exact(grads, other_grads, full(x, y)[1], most=1.2)
    assert products(compiled)[0] >= 16
