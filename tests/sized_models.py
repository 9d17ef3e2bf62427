"""Models whose steps run for many sizes, and how they are trained."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Embedding, causal attention with dropout, a norm: sizes meet in products and masks."""

    def __init__(self, vocabulary=19, width=8):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(40, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        time = x.shape[1]
        h = self.tokens(x) + self.places(torch.arange(time))
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head(h + F.dropout(weights, 0.2, self.training) @ v)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.bn = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        h = F.relu(self.bn(self.conv(x)))
        return self.head(F.max_pool2d(h, 2).mean((2, 3)))


class Images(nn.Module):
    """Convolutions of 16 channels with norms over the batch, of as many images as come."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.deep, self.deep_norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = x + F.relu(self.deep_norm(self.deep(x)))
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """A language model without attention."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(19, 8), nn.LayerNorm(8), nn.Linear(8, 19)

    def forward(self, x):
        return self.head(self.norm(self.tokens(x)))


def training(model, loss_of, clip=False):
    """Sizes are those of batches: nothing of what an update does with parameters has one. ``clip``:
    with clipping and momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if clip else 0.0)

    def step(x, y):
        loss = loss_of(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def autocast_training(model, optimizer, loss_of, dtype=None):
    """A clipped step under autocast to ``dtype`` on the model's device; in float32 without one."""
    device = next(model.parameters()).device.type

    def step(x, y):
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clipped(model, loss_of):
    return training(model, loss_of, clip=True)
