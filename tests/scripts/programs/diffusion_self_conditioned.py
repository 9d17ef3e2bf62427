"""Diffusion that predicts velocities, with weights by the signal-to-noise ratio and the model's own
estimate as a condition of half of the steps: by ``random`` and its functions imported by name.

again: a branch on a random number was
"""

from functools import partial
from random import random, uniform

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

import treadle

torch.manual_seed(11)


def exists(x):
    return x is not None


def default(val, d):
    if exists(val):
        return val
    return d() if callable(d) else d


def extract(a, t, x_shape):
    b, *_ = t.shape
    out = a.gather(-1, t)
    return out.reshape(b, *((1,) * (len(x_shape) - 1)))


def cosine_beta_schedule(timesteps, s=0.008):
    t = torch.linspace(0, timesteps, timesteps + 1, dtype=torch.float64) / timesteps
    alphas_cumprod = torch.cos((t + s) / (1 + s) * torch.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    return torch.clip(1 - (alphas_cumprod[1:] / alphas_cumprod[:-1]), 0, 0.999)


class Net(nn.Module):
    def __init__(self, dim=6, hidden=24):
        super().__init__()
        self.self_condition = True
        self.time = nn.Embedding(50, hidden)
        self.inside, self.out = nn.Linear(2 * dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, time, x_self_cond=None):
        x_self_cond = default(x_self_cond, lambda: torch.zeros_like(x))
        h = self.inside(torch.cat((x_self_cond, x), dim=-1)) + self.time(time)
        return self.out(F.silu(h))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=50, gamma=5):
        super().__init__()
        self.model = model
        alphas_cumprod = torch.cumprod(1.0 - cosine_beta_schedule(timesteps), dim=0)
        self.num_timesteps = timesteps
        register_buffer = lambda name, val: self.register_buffer(name, val.to(torch.float32))  # noqa: E731
        register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))
        snr = alphas_cumprod / (1 - alphas_cumprod)
        register_buffer("loss_weight", snr.clone().clamp_(max=gamma) / (snr + 1))

    def predict_start_from_v(self, x_t, t, v):
        signal = extract(self.sqrt_alphas_cumprod, t, x_t.shape)
        return signal * x_t - extract(self.sqrt_one_minus_alphas_cumprod, t, x_t.shape) * v

    def p_losses(self, x_start, t, noise=None):
        noise = default(noise, lambda: torch.randn_like(x_start))
        signal = extract(self.sqrt_alphas_cumprod, t, x_start.shape)
        spread = extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape)
        x = signal * x_start + spread * noise
        x_self_cond = None
        if self.model.self_condition and random() < 0.5:
            with torch.no_grad():
                maybe_clip = partial(torch.clamp, min=-1.0, max=1.0)
                x_self_cond = maybe_clip(self.predict_start_from_v(x, t, self.model(x, t)))
                x_self_cond.detach_()
        model_out = self.model(x, t, x_self_cond)
        target = signal * noise - spread * x_start
        loss = F.mse_loss(model_out, target, reduction="none").mean(dim=1)
        return (loss * extract(self.loss_weight, t, loss.shape)).mean()

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (len(img),), device=img.device).long()
        return self.p_losses(img * uniform(1.6, 2.0) - 1, t)


diffusion = GaussianDiffusion(Net())
opt = Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99))


def train_step(data):
    loss = diffusion(data)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.item()


train_step = treadle.compile(train_step, model=diffusion, optimizer=opt)
losses = []
for _ in range(10):
    losses.append(train_step(torch.rand(4, 6)))
print(f"loss: {sum(losses) / len(losses):.4f}")
