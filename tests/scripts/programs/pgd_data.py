"""Adversarial training whose attack moves ``delta.data`` and clears its gradient by hand."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(9)
epsilon, alpha, attack_iters = 0.2, 0.08, 2
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
criterion = nn.CrossEntropyLoss()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)


def step(x, y):
    delta = torch.zeros_like(x).uniform_(-epsilon, epsilon)
    delta.requires_grad = True
    for _ in range(attack_iters):
        loss = criterion(model(x + delta), y)
        loss.backward()
        grad = delta.grad.detach()
        delta.data = torch.clamp(delta + alpha * torch.sign(grad), -epsilon, epsilon)
        delta.grad.zero_()
    delta = delta.detach()
    loss = criterion(model(x + delta), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=opt)
losses = [step(torch.randn(12, 6), torch.randint(2, (12,))).item() for _ in range(5)]
print(losses)
