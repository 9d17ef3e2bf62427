"""Keyword spotting whose batches are NumPy arrays with indices by np.random.choice, and an epoch number.

again: argument epoch: 0 became 1
loose: 2e-3
"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

rng = np.random.default_rng(64)
torch.manual_seed(64)
waves = torch.from_numpy(rng.standard_normal((40, 1, 64)).astype(np.float32))
labels = torch.from_numpy(rng.integers(0, 4, 40))


class M5(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(1, 8, 9, stride=4, bias=False), nn.BatchNorm1d(8)
        self.conv2, self.bn2 = nn.Conv1d(8, 8, 3, bias=False), nn.BatchNorm1d(8)
        self.fc1 = nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return F.log_softmax(self.fc1(F.avg_pool1d(x, x.shape[-1]).squeeze(-1)), dim=1)


model = M5()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)


def train_step(idx, epoch):
    data, target = waves[idx], labels[idx]
    data = data + 0.01 * (epoch + 1) * torch.randn_like(data)
    loss = F.nll_loss(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
losses = []
for epoch in range(4):
    for _ in range(2):
        losses.append(train_step(rng.choice(40, 8, replace=False), epoch).item())
