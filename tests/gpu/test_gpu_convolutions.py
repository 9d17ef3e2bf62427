"""On a real GPU: networks of convolutions in 16 bits, in either order of memory, against eager.
What lies between convolutions is channels-last."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import autocast_training


class Residual(nn.Module):
    """A stem, blocks with norms over the batch, a wide pool."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.first, self.second = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, 2, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))
        self.aside, self.head = nn.Conv2d(16, 32, 1, 2), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = F.relu(self.norms[0](self.first(x)))
        y = F.relu(self.norms[1](self.second(y)) + self.aside(x))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Segments(nn.Module):
    """Down and up again, with what was there on the way down beside it."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.grown, self.norm = nn.ConvTranspose2d(32, 16, 2, 2), nn.GroupNorm(4, 32)
        self.out = nn.Conv2d(48, 8, 1)

    def forward(self, x):
        x = F.gelu(self.down(x))
        y = F.silu(self.norm(self.deep(x)))
        z = torch.cat([x, self.grown(y), F.interpolate(y, scale_factor=2)[:, :16]], 1)
        return F.dropout2d(self.out(z), 0.0).mean((2, 3))


class Depthwise(nn.Module):
    """Convolutions with and without groups, and a norm over channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.up, self.low = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.wide(x).permute(0, 2, 3, 1))
        x = x + self.low(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return self.last(x).flatten(2).mean(2)


class Mobile(nn.Module):
    """Depthwise convolutions of three sizes with strides between those of one pixel, biases."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.deep = nn.ModuleList(
            nn.Conv2d(16, 16, size, stride, size // 2, groups=16, bias=size == 5)
            for size, stride in ((3, 1), (5, 2), (7, 1), (9, 1))
        )
        self.wide = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in self.deep)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in self.deep)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for deep, norm, wide in zip(self.deep, self.norms, self.wide, strict=True):
            x = F.silu(wide(norm(deep(x))))
        return self.head(x.mean((2, 3)))


def trained(model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return optimizer, autocast_training(model, optimizer, F.cross_entropy, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "last"),
    [
        (Residual, torch.bfloat16, False),
        (Residual, torch.float16, True),
        (Segments, torch.bfloat16, False),
        (Segments, torch.float16, True),
        (Depthwise, torch.bfloat16, False),
        (Mobile, torch.bfloat16, False),
        (Mobile, torch.float16, True),
    ],
)
def test_convolutions_are_eagers(kind, dtype, last):
    torch.manual_seed(0)
    order = torch.channels_last if last else torch.contiguous_format
    model = kind().cuda().to(memory_format=order)
    twin = copy.deepcopy(model)
    optimizer, train = trained(model, dtype)
    _, eager = trained(twin, dtype)
    step = treadle.compile(train, model=model, optimizer=optimizer)
    for _ in range(6):
        x = torch.randn(5, 3, 32, 32, device="cuda").contiguous(memory_format=order)
        y = torch.randint(8, (5,), device="cuda")
        loss, wanted = step(x, y), eager(x, y)
        torch.testing.assert_close(loss, wanted, rtol=0.05, atol=0.02)
    for (name, new), old in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert new.stride() == old.stride(), name
        torch.testing.assert_close(new, old, rtol=0.1, atol=0.03, msg=lambda text, n=name: n + text)
    if kind is Residual:
        calls = [line for line in step.graph().splitlines() if " = convolution(" in line]
        assert calls
        assert all("strides" in line for line in calls), calls
