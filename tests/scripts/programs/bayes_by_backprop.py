"""Weights with a mean and a spread each: the evidence bound with several draws in a step."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(55)


class Gaussian:
    def __init__(self, mu, rho):
        self.mu, self.rho = mu, rho

    @property
    def sigma(self):
        return torch.log1p(torch.exp(self.rho))

    def sample(self):
        return self.mu + self.sigma * torch.randn(self.rho.size())

    def log_prob(self, x):
        z = (x - self.mu) ** 2 / (2 * self.sigma**2)
        return (-math.log(math.sqrt(2 * math.pi)) - torch.log(self.sigma) - z).sum()


class BayesianLinear(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight_mu = nn.Parameter(torch.empty(b, a).uniform_(-0.2, 0.2))
        self.weight_rho = nn.Parameter(torch.empty(b, a).uniform_(-5, -4))
        self.weight = Gaussian(self.weight_mu, self.weight_rho)
        self.log_prior = 0
        self.log_posterior = 0

    def forward(self, x):
        w = self.weight.sample()
        self.log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(w).sum()
        self.log_posterior = self.weight.log_prob(w)
        return F.linear(x, w)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = BayesianLinear(5, 10), BayesianLinear(10, 3)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))

    def sample_elbo(self, x, y, samples=2):
        total = 0.0
        for _ in range(samples):
            out = self(x)
            prior = self.l1.log_prior + self.l2.log_prior
            posterior = self.l1.log_posterior + self.l2.log_posterior
            total = total + (posterior - prior) / 20 + F.cross_entropy(out, y, reduction="sum")
        return total / samples


net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)


def train_step(x, y):
    net.zero_grad()
    loss = net.sample_elbo(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=net, optimizer=optimizer)
losses = [train_step(torch.randn(9, 5), torch.randint(3, (9,))).item() for _ in range(5)]
for layer in (net.l1, net.l2):
    layer.log_prior, layer.log_posterior = float(layer.log_prior), float(layer.log_posterior)
priors = [net.l1.log_prior, net.l2.log_posterior]
