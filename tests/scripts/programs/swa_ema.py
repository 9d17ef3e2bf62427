"""Averaged weights twice over: an EMA class of the author's own, and swa_utils from epoch 2 on."""

import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import treadle

torch.manual_seed(28)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters() if p.requires_grad}
        self.backup = {}

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                new = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new.clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data.clone()
            param.data.copy_(self.shadow[name])

    def restore(self):
        for name, param in self.model.named_parameters():
            param.data.copy_(self.backup[name])
        self.backup = {}


swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
swa_start = 2
ema = EMA(model, 0.9)
data = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(3)]


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
scores = []
for epoch in range(4):
    for x, y in data:
        loss = train_step(x, y)
        ema.update()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    ema.apply_shadow()
    model.eval()
    with torch.no_grad():
        scores.append(sum(nn.functional.mse_loss(model(x), y).item() for x, y in data))
    model.train()
    ema.restore()
update_bn((x for x, _ in data), swa_model)
