"""A GAN with the hinge loss and spectral norms; D and G are steps of their own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import treadle

torch.manual_seed(4)


class D(nn.Module):
    def __init__(self, ch=4):
        super().__init__()
        self.c1 = spectral_norm(nn.Conv2d(1, ch, 3, 2, 1))
        self.out = spectral_norm(nn.Linear(ch, 1))

    def forward(self, x):
        h = F.leaky_relu(self.c1(x), 0.1)
        return self.out(h.sum((2, 3)))


class G(nn.Module):
    def __init__(self, ch=4):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(6, ch * 2 * 4)
        self.c1 = nn.Conv2d(ch * 2, ch, 3, 1, 1)
        self.c2 = nn.Conv2d(ch, 1, 3, 1, 1)

    def forward(self, z):
        h = self.fc(z).view(-1, self.ch * 2, 2, 2)
        h = F.relu(self.c1(F.interpolate(h, scale_factor=2, mode="nearest")))
        return torch.tanh(self.c2(F.interpolate(h, scale_factor=2, mode="bilinear")))


gen, dis = G(), D()
g_opt = torch.optim.Adam(gen.parameters(), 1e-3, (0.0, 0.9))
d_opt = torch.optim.Adam(dis.parameters(), 1e-3, (0.0, 0.9))


def d_step(real, z):
    fake = gen(z).detach()
    loss = F.relu(1 - dis(real)).mean() + F.relu(1 + dis(fake)).mean()
    d_opt.zero_grad()
    loss.backward()
    d_opt.step()
    return loss.detach()


def g_step(z):
    loss = -dis(gen(z)).mean()
    g_opt.zero_grad()
    loss.backward()
    g_opt.step()
    return loss.detach()


d_step = treadle.compile(d_step, model=[gen, dis], optimizer=d_opt)
g_step = treadle.compile(g_step, model=[gen, dis], optimizer=g_opt)
d_losses, g_losses = [], []
for i in range(4):
    d_losses.append(float(d_step(torch.rand(5, 1, 8, 8), torch.randn(5, 6))))
    g_losses.append(float(g_step(torch.randn(5, 6))))
