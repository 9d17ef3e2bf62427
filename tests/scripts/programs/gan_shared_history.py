"""A gradient-penalty GAN whose two steps append to one dict of losses; the noise and an entry of a
list of weights decay in the loop of ``main``.
"""

import torch
import torch.nn as nn

import treadle


def main():
    torch.manual_seed(9)
    gen = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    disc = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    opt_g = torch.optim.Adam(gen.parameters(), 1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), 1e-3, betas=(0.5, 0.9))
    noise, weights = 0.1, [10.0, 5.0]
    history = {"d": [], "g": []}

    def d_step(real, z, shift, eps):
        fake = gen(z).detach()
        real, fake = real + noise * shift, fake + noise * shift
        mixed = (eps * real + (1 - eps) * fake).requires_grad_()
        grad = torch.autograd.grad(disc(mixed).sum(), mixed, create_graph=True)[0]
        loss = disc(fake).mean() - disc(real).mean()
        loss = loss + weights[0] * ((grad.norm(dim=1) - 1) ** 2).mean()
        opt_d.zero_grad()
        loss.backward()
        opt_d.step()
        history["d"].append(loss.item())

    def g_step(z):
        loss = -disc(gen(z)).mean()
        opt_g.zero_grad()
        loss.backward()
        opt_g.step()
        history["g"].append(loss.item())

    d = treadle.compile(d_step, model=[gen, disc], optimizer=opt_d)
    g = treadle.compile(g_step, model=[gen, disc], optimizer=opt_g)
    for _ in range(6):
        for _ in range(2):
            d(torch.randn(5, 2), torch.randn(5, 3), torch.randn(5, 2), torch.rand(5, 1))
        g(torch.randn(5, 3))
        noise = max(0.0, noise - 0.02)
        weights[0] = weights[0] * 0.9
    return history


history = main()
