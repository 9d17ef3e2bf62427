"""Forecasts by an LSTM over sliding windows, early stopping, gradients clipped by value."""

import copy

import numpy as np
import torch
from torch import nn

import treadle

torch.manual_seed(54)
series = np.sin(np.arange(0, 12, 0.1)).astype("float32")
lookback = 8
X = torch.tensor(np.stack([series[i : i + lookback] for i in range(len(series) - lookback - 1)]))[
    ..., None
]
Y = torch.tensor(
    np.stack([series[i + 1 : i + lookback + 1] for i in range(len(series) - lookback - 1)])
)[..., None]


class AirModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=8, num_layers=1, batch_first=True)
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        x, _ = self.lstm(x)
        return self.linear(x)


model = AirModel()
optimizer = torch.optim.Adam(model.parameters())
loss_fn = nn.HuberLoss()


def train_batch(X_batch, y_batch):
    loss = loss_fn(model(X_batch), y_batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


train_batch = treadle.compile(train_batch, model=model, optimizer=optimizer)
best_rmse, best_weights, log = np.inf, None, []
for epoch in range(2):
    for start_at in range(0, 96, 32):
        train_batch(X[start_at : start_at + 32], Y[start_at : start_at + 32])
    with torch.no_grad():
        rmse = np.sqrt(loss_fn(model(X), Y).item())
    log.append(rmse)
    if rmse < best_rmse:
        best_rmse, best_weights = rmse, copy.deepcopy(model.state_dict())
model.load_state_dict(best_weights)
