"""Sharpness-aware minimisation by hand: climb, take the gradient there, go back, step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(40)
model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
base_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rho = 0.05


def sam_step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
        eps = []
        for p in model.parameters():
            e_w = p.grad * (rho / (norm + 1e-12))
            p.add_(e_w)
            eps.append(e_w)
    base_optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, e_w in zip(model.parameters(), eps):
            p.sub_(e_w)
    base_optimizer.step()
    base_optimizer.zero_grad()
    return loss.detach()


sam_step = treadle.compile(sam_step, model=model, optimizer=base_optimizer)
losses = [sam_step(torch.randn(12, 6), torch.randint(3, (12,))).item() for _ in range(5)]
