"""Exact regression by a Gaussian process: the marginal likelihood by Cholesky, then a prediction."""

import math

import torch
from torch import nn

import treadle

torch.manual_seed(31)
train_x = torch.linspace(0, 1, 24)
train_y = torch.sin(train_x * 2 * math.pi) + torch.randn(24) * 0.2


class ExactGP(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.tensor(0.0))
        self.raw_outputscale = nn.Parameter(torch.tensor(0.0))
        self.raw_noise = nn.Parameter(torch.tensor(-2.0))
        self.mean = nn.Parameter(torch.tensor(0.0))

    def kernel(self, a, b):
        lengthscale = nn.functional.softplus(self.raw_lengthscale)
        d2 = (a[:, None] - b[None, :]).pow(2) / lengthscale.pow(2)
        return nn.functional.softplus(self.raw_outputscale) * torch.exp(-0.5 * d2)

    def neg_log_likelihood(self, x, y):
        n = x.shape[0]
        K = self.kernel(x, x) + (nn.functional.softplus(self.raw_noise) + 1e-4) * torch.eye(n)
        L = torch.linalg.cholesky(K)
        diff = (y - self.mean).unsqueeze(1)
        alpha = torch.cholesky_solve(diff, L)
        fit = 0.5 * (diff * alpha).sum()
        return (fit + L.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi)) / n

    @torch.no_grad()
    def predict(self, x, y, new):
        K = self.kernel(x, x) + (nn.functional.softplus(self.raw_noise) + 1e-4) * torch.eye(len(x))
        return self.mean + self.kernel(new, x) @ torch.linalg.solve(K, y - self.mean)


model = ExactGP()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)


def training_iteration():
    optimizer.zero_grad()
    loss = model.neg_log_likelihood(train_x, train_y)
    loss.backward()
    optimizer.step()
    return loss.detach()


training_iteration = treadle.compile(training_iteration, model=model, optimizer=optimizer)
training_iter = 8
for i in range(training_iter):
    loss = training_iteration()
    noise = nn.functional.softplus(model.raw_noise).item()
    print("Iter %d/%d - Loss: %.3f noise: %.3f" % (i + 1, training_iter, loss.item(), noise))
prediction = model.predict(train_x, train_y, torch.rand(5))
