"""Unbalanced classes: weights from counts of the batch's labels, focal loss, a rate per epoch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(42)
NUM = 4


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target, weight):
        log_p = F.log_softmax(logits, dim=-1)
        ce = F.nll_loss(log_p, target, weight, reduction="none")
        pt = log_p.gather(1, target[:, None]).squeeze(1).exp()
        return ((1 - pt) ** self.gamma * ce).mean()


model = nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.Linear(16, NUM))
criterion = FocalLoss()
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)


def step(x, y):
    counts = torch.bincount(y, minlength=NUM).float()
    weight = counts.sum() / (NUM * counts.clamp(min=1))
    loss = criterion(model(x), y, weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optimizer)
losses = []
for epoch in range(6):
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * 0.9**epoch
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.07, 0.03]), 20, replacement=True)
    losses.append(step(torch.randn(20, 6), labels).item())
