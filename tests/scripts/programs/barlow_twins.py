"""Redundancy reduction: the off-diagonal of a cross-correlation, LARS by hand as an optimizer class."""

import math

import torch
import torch.nn as nn

import treadle

torch.manual_seed(52)


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class BarlowTwins(nn.Module):
    def __init__(self, lambd=0.005):
        super().__init__()
        self.lambd = lambd
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.projector = nn.Linear(16, 10, bias=False)
        self.bn = nn.BatchNorm1d(10, affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(y1.shape[0])
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        return on_diag + self.lambd * off_diagonal(c).pow_(2).sum()


model = BarlowTwins()
param_weights = [p for p in model.parameters() if p.ndim > 1]
param_biases = [p for p in model.parameters() if p.ndim == 1]
optimizer = torch.optim.SGD(
    [{"params": param_weights}, {"params": param_biases, "weight_decay": 0.0}],
    lr=0,
    momentum=0.9,
    weight_decay=1e-6,
)


def adjust_learning_rate(step, max_steps=10, warmup=2, base_lr=0.1):
    if step < warmup:
        lr = base_lr * step / warmup
    else:
        q = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps - warmup)))
        lr = base_lr * q + base_lr * 0.001 * (1 - q)
    optimizer.param_groups[0]["lr"] = lr * 0.2
    optimizer.param_groups[1]["lr"] = lr * 0.0048


def train_step(y1, y2):
    optimizer.zero_grad()
    loss = model(y1, y2)
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
stats = []
for step in range(6):
    x = torch.randn(12, 8)
    adjust_learning_rate(step)
    loss = train_step(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    stats.append(dict(step=step, loss=loss.item(), lr=optimizer.param_groups[0]["lr"]))
