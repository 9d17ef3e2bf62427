"""A denoising diffusion model on points: an embedding of time, EMA weights, sampling at the end."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(6)
T = 20
betas = torch.linspace(1e-4, 0.2, T)
alphas = 1.0 - betas
alphas_bar = torch.cumprod(alphas, 0)


class Denoiser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.inp = nn.Linear(2, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 2))

    def forward(self, x, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        angles = t[:, None].float() * freqs[None]
        emb = torch.cat([angles.sin(), angles.cos()], -1)
        return self.out(self.inp(x) + self.time(emb))


model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)


def train_step(x0):
    t = torch.randint(0, T, (x0.shape[0],))
    noise = torch.randn_like(x0)
    a = alphas_bar[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = F.mse_loss(model(xt, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), ema.parameters()):
            q.mul_(0.9).add_(p, alpha=0.1)
    return loss.detach()


train_step = treadle.compile(train_step, model=[model, ema], optimizer=opt)

losses = []
for i in range(8):
    angle = torch.rand(32) * 2 * math.pi
    losses.append(train_step(torch.stack([angle.cos(), angle.sin()], 1)).item())


@torch.no_grad()
def sample(n):
    x = torch.randn(n, 2)
    for t in reversed(range(T)):
        eps = ema(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * eps) / alphas[t].sqrt()
        if t:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    return x


points = sample(5)
print("mean loss", sum(losses) / len(losses))
