"""A step that counts, sums up and logs within itself, as loops do that were moved into a function."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(62)


class Learner:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.n_steps, self.running_loss, self.losses = 0, 0.0, []

    def step(self, x, y):
        self.opt.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.opt.step()
        self.n_steps += 1
        self.running_loss += loss.item()
        self.losses.append(loss.item())
        return loss.item()


learner = Learner()
learner.step = treadle.compile(learner.step, model=learner.model, optimizer=learner.opt)
seen = []
for i in range(5):
    seen.append(learner.step(torch.randn(8, 4), torch.randn(8, 1)))
mean, count = learner.running_loss / learner.n_steps, learner.n_steps
losses = learner.losses
