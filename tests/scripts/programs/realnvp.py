"""A normalising flow of coupling layers with alternating masks, two moons, sampling backwards."""

import numpy as np
import torch
from torch import distributions, nn

import treadle

np.random.seed(32)
torch.manual_seed(32)
nets = lambda: nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2), nn.Tanh())
nett = lambda: nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 2))
masks = torch.from_numpy(np.array([[0, 1], [1, 0]]).astype(np.float32))
prior = distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))


class RealNVP(nn.Module):
    def __init__(self, nets, nett, mask, prior):
        super().__init__()
        self.prior = prior
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.t = nn.ModuleList([nett() for _ in range(len(masks))])
        self.s = nn.ModuleList([nets() for _ in range(len(masks))])

    def g(self, z):
        x = z
        for i in range(len(self.t)):
            x_ = x * self.mask[i]
            s = self.s[i](x_) * (1 - self.mask[i])
            t = self.t[i](x_) * (1 - self.mask[i])
            x = x_ + (1 - self.mask[i]) * (x * torch.exp(s) + t)
        return x

    def f(self, x):
        log_det_J, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s = self.s[i](z_) * (1 - self.mask[i])
            t = self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det_J -= s.sum(dim=1)
        return z, log_det_J

    def log_prob(self, x):
        z, logp = self.f(x)
        return self.prior.log_prob(z) + logp


flow = RealNVP(nets, nett, masks, prior)
optimizer = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=1e-3)


def train(batch):
    loss = -flow.log_prob(batch).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    return loss.detach()


train = treadle.compile(train, model=flow, optimizer=optimizer)
losses = []
for t in range(5):
    angles = np.random.rand(20) * np.pi
    noisy_moons = np.stack([np.cos(angles), np.sin(angles)], 1) + 0.1 * np.random.randn(20, 2)
    losses.append(train(torch.from_numpy(noisy_moons.astype(np.float32))).item())
samples = flow.g(prior.sample((6,))).detach()
