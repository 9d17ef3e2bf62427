"""Two generators, two discriminators, cycles and an image pool kept by Python between the steps.

again: D_A.0.weight.grad is set
"""

import itertools
import random

import torch
import torch.nn as nn

import treadle

random.seed(57)
torch.manual_seed(57)


class ReplayBuffer:
    def __init__(self, max_size=6):
        self.max_size, self.data = max_size, []

    def push_and_pop(self, data):
        out = []
        for element in data:
            element = element.unsqueeze(0)
            if len(self.data) < self.max_size:
                self.data.append(element)
                out.append(element)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.max_size - 1)
                out.append(self.data[i].clone())
                self.data[i] = element
            else:
                out.append(element)
        return torch.cat(out)


def generator():
    return nn.Sequential(
        nn.ReflectionPad2d(1),
        nn.Conv2d(1, 4, 3, bias=False),
        nn.InstanceNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 1, 3, padding=1),
        nn.Tanh(),
    )


def discriminator():
    return nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, padding=1))


G_AB, G_BA, D_A, D_B = generator(), generator(), discriminator(), discriminator()
criterion_GAN, criterion_cycle = nn.MSELoss(), nn.L1Loss()
optimizer_G = torch.optim.Adam(
    itertools.chain(G_AB.parameters(), G_BA.parameters()), 2e-4, (0.5, 0.999)
)
optimizer_D = torch.optim.Adam(
    itertools.chain(D_A.parameters(), D_B.parameters()), 2e-4, (0.5, 0.999)
)


def generators(real_A, real_B):
    optimizer_G.zero_grad()
    fake_B, fake_A = G_AB(real_A), G_BA(real_B)
    pred_B, pred_A = D_B(fake_B), D_A(fake_A)
    loss = criterion_GAN(pred_B, torch.ones_like(pred_B)) + criterion_GAN(
        pred_A, torch.ones_like(pred_A)
    )
    loss = loss + 10.0 * (
        criterion_cycle(G_BA(fake_B), real_A) + criterion_cycle(G_AB(fake_A), real_B)
    )
    loss.backward()
    optimizer_G.step()
    return loss.detach(), fake_A.detach(), fake_B.detach()


def discriminators(real_A, real_B, fake_A, fake_B):
    optimizer_D.zero_grad()
    loss = 0
    for D, real, fake in ((D_A, real_A, fake_A), (D_B, real_B, fake_B)):
        r, f = D(real), D(fake)
        loss = loss + 0.5 * (
            criterion_GAN(r, torch.ones_like(r)) + criterion_GAN(f, torch.zeros_like(f))
        )
    loss.backward()
    optimizer_D.step()
    return loss.detach()


models = {"G_AB": G_AB, "G_BA": G_BA, "D_A": D_A, "D_B": D_B}
generators = treadle.compile(generators, model=models, optimizer=optimizer_G)
discriminators = treadle.compile(discriminators, model=models, optimizer=optimizer_D)
pool_A, pool_B = ReplayBuffer(), ReplayBuffer()
log = []
for i in range(4):
    real_A, real_B = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8)
    loss_G, fake_A, fake_B = generators(real_A, real_B)
    loss_D = discriminators(
        real_A, real_B, pool_A.push_and_pop(fake_A), pool_B.push_and_pop(fake_B)
    )
    log.append((loss_G.item(), loss_D.item()))
