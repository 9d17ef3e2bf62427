"""A trainer's engine: meters, the rate by hand, an exit where the loss is not finite, a scaler.

again: optimizer._opt_called
again: if epoch >= warmup
"""

import math
import sys
from collections import defaultdict, deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(71)


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, float | int)
            self.meters[k].update(v)


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def __call__(self, loss, optimizer, parameters, clip_grad=1.0):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def adjust_learning_rate(optimizer, epoch, base=1e-2, warmup=1, epochs=3):
    lr = base * epoch / warmup
    if epoch >= warmup:
        lr = base * 0.5 * (1.0 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


model = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr_scale": 0.5},
    ],
    lr=1e-2,
)
scaler, logger = NativeScaler(), MetricLogger()
running = 0.0


def train_one_step(it, samples, targets, epoch, n):
    global running
    adjust_learning_rate(optimizer, it / n + epoch)
    loss = F.cross_entropy(model(samples), targets, label_smoothing=0.1)
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        print(f"Loss is {loss_value}, stopping training")
        sys.exit(1)
    optimizer.zero_grad()
    norm = scaler(loss, optimizer, model.parameters())
    running += np.float32(loss.detach().cpu().numpy())
    logger.update(loss=loss_value, norm=norm, lr=optimizer.param_groups[0]["lr"])


train_one_step = treadle.compile(train_one_step, model=model, optimizer=optimizer)
for epoch in range(3):
    for it in range(4):
        x = torch.randn(8, 12)
        train_one_step(it, x, x[:, :4].argmax(1), epoch, 4)
try:
    train_one_step(3, torch.full((8, 12), float("nan")), torch.zeros(8, dtype=torch.int64), 2, 4)
except SystemExit as stopped:
    code = stopped.code
meters = {name: (list(m.deque), m.total, m.count) for name, m in logger.meters.items()}
