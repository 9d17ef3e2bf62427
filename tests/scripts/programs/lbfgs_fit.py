"""Polynomial regression by LBFGS with a closure, the whole step compiled.

again: weight.grad is set
"""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(63)
x = torch.linspace(-1, 1, 30)[:, None]
y = x**3 - 0.5 * x + 0.02 * torch.randn_like(x)
features = torch.cat([x, x**2, x**3], 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)


def fit(features, y):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), y)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


fit = treadle.compile(fit, model=model, optimizer=optimizer)
losses = [fit(features, y).item() for _ in range(3)]
