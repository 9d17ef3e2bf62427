"""Recommendation by factors and biases, early stopping, the rating's mean as a plain number.

again: dim 0: 32 -> 16
"""

import numpy as np
import torch
from torch import nn

import treadle

np.random.seed(34)
torch.manual_seed(34)
n_users, n_items, n = 20, 15, 80
users = np.random.randint(0, n_users, n)
items = np.random.randint(0, n_items, n)
ratings = np.random.randint(1, 6, n).astype(np.float32)
global_mean = ratings.mean()


class MF(nn.Module):
    def __init__(self, factors=4):
        super().__init__()
        self.P, self.Q = nn.Embedding(n_users, factors), nn.Embedding(n_items, factors)
        self.bu, self.bi = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)

    def forward(self, u, i):
        dot = (self.P(u) * self.Q(i)).sum(-1)
        return dot + self.bu(u).squeeze(-1) + self.bi(i).squeeze(-1) + global_mean


model = MF()
opt = torch.optim.Adagrad(model.parameters(), lr=0.1, weight_decay=1e-4)


def fit_batch(u, i, r):
    pred = model(u, i)
    loss = ((pred - r) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()


fit_batch = treadle.compile(fit_batch, model=model, optimizer=opt)
best, patience, wait, history = np.inf, 2, 0, []
for epoch in range(3):
    order = np.random.permutation(n)
    total = 0.0
    for k in range(0, n, 32):
        idx = order[k : k + 32]
        loss = fit_batch(*(torch.as_tensor(a[idx]) for a in (users, items, ratings)))
        total += float(loss) * len(idx)
    rmse = float(np.sqrt(total / n))
    history.append(rmse)
    if rmse < best - 1e-4:
        best, wait = rmse, 0
    else:
        wait += 1
        if wait >= patience:
            break
