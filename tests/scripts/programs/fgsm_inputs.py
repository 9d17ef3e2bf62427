"""Fast gradient signs: the batch itself asks for a gradient within the step."""

import torch
import torch.nn.functional as F
from torch import nn

import treadle

torch.manual_seed(10)
net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def fgsm_step(x, y, eps):
    x.requires_grad_(True)
    F.cross_entropy(net(x), y).backward()
    x_adv = (x + eps * x.grad.sign()).detach()
    x.requires_grad_(False)
    x.grad = None
    optimizer.zero_grad()
    loss = 0.5 * F.cross_entropy(net(x), y) + 0.5 * F.cross_entropy(net(x_adv), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(fgsm_step, model=net, optimizer=optimizer)
curve = []
for i in range(5):
    x, y = torch.randn(9, 5), torch.randint(4, (9,))
    curve.append(step(x, y, 0.1).item())
    assert not x.requires_grad
