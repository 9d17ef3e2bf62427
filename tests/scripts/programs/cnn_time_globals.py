"""A small convolutional network whose loop keeps clocks, counters and best values as globals."""

import time

import torch
from torch import nn, optim

import treadle

torch.manual_seed(2)
BATCH = 8
N_ITER = 6
LOG_EVERY = 2

net = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2, bias=False),
    nn.BatchNorm2d(6),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(6, 12, 5),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(48, 10),
)
criterion = nn.CrossEntropyLoss()
opt = optim.Adam(net.parameters(), lr=3e-3)


def update(images, targets):
    opt.zero_grad(set_to_none=True)
    loss = criterion(net(images), targets)
    loss.backward()
    opt.step()
    return loss.detach()


update = treadle.compile(update, model=net, optimizer=opt)

best = float("inf")
running_loss = 0.0
seen = 0
losses = []
start = time.time()
for it in range(N_ITER):
    t0 = time.time()
    x = torch.randn(BATCH, 1, 16, 16)
    y = torch.randint(0, 10, (BATCH,))
    loss = update(x, y).item()
    losses.append(loss)
    running_loss += loss
    seen += BATCH
    best = min(best, loss)
    elapsed = time.time() - t0
    if (it + 1) % LOG_EVERY == 0:
        print(f"{it + 1}: {running_loss / LOG_EVERY:.4f}, {seen} images in {elapsed:.3f} s")
        running_loss = 0.0
