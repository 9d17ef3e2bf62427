"""An energy-based model: short Langevin chains from a replay buffer of samples, within the step."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(56)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


ebm = Energy()
optimizer = torch.optim.Adam(ebm.parameters(), lr=1e-3, betas=(0.0, 0.999))


def langevin(x, steps=3, step_size=0.1, noise=0.005):
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        grad = torch.autograd.grad(ebm(x).sum(), x)[0]
        x = x - step_size * grad.clamp(-0.03, 0.03) + noise * torch.randn_like(x)
    return x.detach()


def train_step(real, start):
    fake = langevin(start)
    real_out, fake_out = ebm(real), ebm(fake)
    reg = 0.1 * (real_out**2 + fake_out**2).mean()
    loss = real_out.mean() - fake_out.mean() + reg
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ebm.parameters(), max_norm=0.1)
    optimizer.step()
    return loss.detach(), fake


train_step = treadle.compile(train_step, model=ebm, optimizer=optimizer)
examples = [torch.rand(8, 2) * 2 - 1]
losses = []
for i in range(5):
    loss, fake = train_step(torch.randn(8, 2) * 0.3 + 1, examples[-1])
    examples = ([*examples, fake])[-3:]
    losses.append(loss.item())
