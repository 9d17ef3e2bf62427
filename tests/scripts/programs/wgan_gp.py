"""WGAN with a gradient penalty: several steps of the critic for one of the generator."""

import torch
from torch import autograd, nn

import treadle

torch.manual_seed(3)
LAMBDA, CRITIC_ITERS, DIM, LATENT = 10.0, 2, 2, 4

generator = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, DIM))
critic = nn.Sequential(nn.Linear(DIM, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    (grad,) = autograd.grad(
        outputs=scores,
        inputs=mixed,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )
    return ((grad.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


def critic_step(real):
    opt_c.zero_grad()
    with torch.no_grad():
        fake = generator(torch.randn(real.size(0), LATENT))
    cost = critic(fake).mean() - critic(real).mean() + gradient_penalty(real, fake)
    cost.backward()
    opt_c.step()
    return cost.detach()


def generator_step(noise):
    for p in critic.parameters():
        p.requires_grad_(False)
    opt_g.zero_grad()
    cost = -critic(generator(noise)).mean()
    cost.backward()
    opt_g.step()
    for p in critic.parameters():
        p.requires_grad_(True)
    return cost.detach()


critic_step = treadle.compile(critic_step, model=[generator, critic], optimizer=opt_c)
generator_step = treadle.compile(generator_step, model=[generator, critic], optimizer=opt_g)
log = {"critic": [], "generator": []}
for iteration in range(4):
    for _ in range(CRITIC_ITERS):
        log["critic"].append(critic_step(torch.randn(8, DIM) + 2).item())
    log["generator"].append(generator_step(torch.randn(8, LATENT)).item())
