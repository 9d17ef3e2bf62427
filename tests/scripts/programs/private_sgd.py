"""Private SGD: gradients of each sample by vmap, noise from a generator, an accountant that replaces
its last entry, batches of changing sizes.

loose: 2e-3
again: dim 0
again: accountant.history
again: accountant.history
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

import treadle

torch.manual_seed(17)


class SimpleCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 4, 2, padding=1), nn.Conv2d(4, 6, 4, 2)
        self.gn = nn.GroupNorm(2, 4)
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.gn(self.conv1(x))), 2, 1)
        x = F.relu(self.conv2(x)).mean((2, 3))
        return self.fc2(F.relu(self.fc1(x)))


class Accountant:
    def __init__(self):
        self.history = []

    def step(self, noise_multiplier, sample_rate):
        if len(self.history) >= 1:
            last_noise, last_rate, n = self.history.pop()
            if last_noise == noise_multiplier and last_rate == sample_rate:
                self.history.append((last_noise, last_rate, n + 1))
            else:
                self.history.append((last_noise, last_rate, n))
                self.history.append((noise_multiplier, sample_rate, 1))
        else:
            self.history.append((noise_multiplier, sample_rate, 1))

    def epsilon(self, delta=1e-5):
        return sum(n * q / s * math.sqrt(2 * math.log(1.25 / delta)) for s, q, n in self.history)


model = SimpleCNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accountant, generator = Accountant(), torch.Generator().manual_seed(5)
MAX_GRAD_NORM, SIGMA, EXPECTED = 1.0, 0.7, 8


def compute_loss(params, buffers, sample, target):
    predictions = functional_call(model, (params, buffers), (sample.unsqueeze(0),))
    return F.cross_entropy(predictions, target.unsqueeze(0))


def train_step(data, targets):
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = {k: v.detach() for k, v in model.named_buffers()}
    per_sample = vmap(grad(compute_loss), in_dims=(None, None, 0, 0))(
        params, buffers, data, targets
    )
    norms = torch.stack(
        [g.reshape(len(data), -1).norm(2, dim=-1) for g in per_sample.values()], dim=1
    ).norm(2, dim=1)
    factor = (MAX_GRAD_NORM / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        g = torch.einsum("i,i...", factor, per_sample[name])
        g = g + torch.normal(mean=0, std=SIGMA * MAX_GRAD_NORM, size=g.shape, generator=generator)
        p.grad = g / EXPECTED
    optimizer.step()
    accountant.step(SIGMA, 0.1)
    with torch.no_grad():
        out = model(data)
        return (
            F.cross_entropy(out, targets),
            (out.argmax(1) == targets).float().mean(),
            norms.median(),
        )


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
log = []
for n in (8, 8, 8, 7):
    log.append([v.item() for v in train_step(torch.randn(n, 1, 12, 12), torch.randint(4, (n,)))])
eps, history = accountant.epsilon(), accountant.history
