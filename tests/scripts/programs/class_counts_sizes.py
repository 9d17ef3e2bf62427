"""Losses weighted by the counts of the batch's classes, labels picked by a range, top-k accuracy;
the last batch of an epoch is smaller, and so is that of each evaluation.

again: argument x: shape [16, 9] became [13, 9] (dim 0: 16 -> 13); compiled for x_0 in 2..16
again: argument x: shape [16, 9] became [13, 9] (dim 0: 16 -> 13); compiled for x_0 in 2..16
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import treadle

torch.manual_seed(7)
C = 6
net = nn.Sequential(nn.Linear(9, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, C))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def accuracy(out, y, topk=(1, 2)):
    pred = out.topk(max(topk), 1).indices.t()
    ok = pred.eq(y.view(1, -1).expand_as(pred))
    return [ok[:k].reshape(-1).float().sum(0).mul_(100.0 / y.size(0)) for k in topk]


def train(x, y):
    weight = 1.0 / torch.bincount(y, minlength=C).clamp(min=1).float()
    out = net(x)
    picked = out.log_softmax(1)[range(len(y)), y]
    ramp = torch.linspace(0.9, 1.1, len(y))
    loss = -(weight[y] * ramp * picked).sum() / weight[y].sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach(), accuracy(out, y)


@torch.no_grad()
def evaluate(x, y):
    out = net(x)
    return F.cross_entropy(out, y, reduction="sum"), accuracy(out, y)[0] * len(y)


train = treadle.compile(train, model=net, optimizer=opt)
evaluate = treadle.compile(evaluate, model=net)
data = DataLoader(TensorDataset(torch.randn(45, 9), torch.randint(0, C, (45,))), batch_size=16)
log = []
for _ in range(3):
    net.train()
    seen, total = 0, 0.0
    for x, y in data:
        loss, _ = train(x, y)
        total += loss.item() * len(x)
        seen += len(x)
    net.eval()
    found = [evaluate(x, y) for x, y in data]
    log.append((total / seen, *(sum(each).item() / seen for each in zip(*found, strict=True))))
