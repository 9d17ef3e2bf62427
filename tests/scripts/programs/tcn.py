"""The adding problem by a temporal convolutional network with weight norm and chomped padding."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

import treadle

torch.manual_seed(1111)


class Chomp1d(nn.Module):
    def __init__(self, chomp_size):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x):
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_in, n_out, k, dilation, dropout=0.1):
        super().__init__()
        padding = (k - 1) * dilation
        layers = []
        for a in (n_in, n_out):
            conv = weight_norm(nn.Conv1d(a, n_out, k, padding=padding, dilation=dilation))
            layers += [conv, Chomp1d(padding), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers)
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, x):
        res = x if self.downsample is None else self.downsample(x)
        return F.relu(self.net(x) + res)


class TCN(nn.Module):
    def __init__(self, sizes, k=3):
        super().__init__()
        blocks = [TemporalBlock(a, b, k, 2**i) for i, (a, b) in enumerate(zip([2, *sizes], sizes))]
        self.tcn, self.linear = nn.Sequential(*blocks), nn.Linear(sizes[-1], 1)

    def forward(self, x):
        return self.linear(self.tcn(x)[:, :, -1])


model = TCN([6, 6])
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)


def data_generator(n, length=16):
    values, marks = torch.rand(n, 1, length), torch.zeros(n, 1, length)
    marks[:, :, 3] = marks[:, :, 9] = 1
    return torch.cat([values, marks], 1), (values * marks).sum(2)


def train_step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
total_loss, processed, batch_idx = 0, 0, 1
for i in range(0, 48, 8):
    x, y = data_generator(8)
    total_loss += train_step(x, y).item()
    batch_idx += 1
    processed += 8
    if batch_idx % 3 == 0:
        print(f"{processed}/48 loss {total_loss / 3:.6f} lr {optimizer.param_groups[0]['lr']}")
        total_loss = 0
