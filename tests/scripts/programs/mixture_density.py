"""A mixture density network, trained with a NumPy learning-rate schedule read at each iteration."""

import numpy as np
import torch
import torch.nn as nn

import treadle

np.random.seed(58)
torch.manual_seed(58)
K = 4


class MDN(nn.Module):
    def __init__(self, n_hidden=16, n_gaussians=K):
        super().__init__()
        self.z_h = nn.Sequential(nn.Linear(1, n_hidden), nn.Tanh())
        self.z_pi, self.z_mu = nn.Linear(n_hidden, n_gaussians), nn.Linear(n_hidden, n_gaussians)
        self.z_sigma = nn.Linear(n_hidden, n_gaussians)

    def forward(self, x):
        h = self.z_h(x)
        return torch.softmax(self.z_pi(h), -1), torch.exp(self.z_sigma(h)), self.z_mu(h)


def mdn_loss(pi, sigma, mu, y):
    prob = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / sigma / np.sqrt(2.0 * np.pi)
    return torch.mean(-torch.log(torch.sum(prob * pi, dim=1)))


network = MDN()
optimizer = torch.optim.Adam(network.parameters())
lr_schedule = np.linspace(1e-2, 1e-3, 6)


def train(x, y):
    loss = mdn_loss(*network(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


train = treadle.compile(train, model=network, optimizer=optimizer)
for it in range(6):
    for g in optimizer.param_groups:
        g["lr"] = lr_schedule[it]
    y_data = np.random.uniform(-2, 2, (24, 1)).astype(np.float32)
    x_data = (
        y_data + 0.3 * np.sin(y_data * 4) + np.random.normal(size=(24, 1)).astype(np.float32) * 0.05
    )
    loss = train(torch.from_numpy(x_data), torch.from_numpy(y_data))
    if it % 2 == 0:
        print(it, loss.item())
