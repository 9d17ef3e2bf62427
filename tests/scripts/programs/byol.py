"""BYOL: a learner module that holds its own target encoder, made lazily, and a moving average."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import treadle

torch.manual_seed(17)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


def loss_fn(x, y):
    x, y = F.normalize(x, dim=-1, p=2), F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


def MLP(dim, hidden, out):
    return nn.Sequential(
        nn.Linear(dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out)
    )


class BYOL(nn.Module):
    def __init__(self, net, dim=8, moving_average_decay=0.9):
        super().__init__()
        self.online_encoder = nn.Sequential(net, MLP(dim, 16, 8))
        self.target_encoder = None
        self.target_ema_updater = EMA(moving_average_decay)
        self.online_predictor = MLP(8, 16, 8)

    def get_target_encoder(self):
        if self.target_encoder is None:
            self.target_encoder = copy.deepcopy(self.online_encoder)
            for p in self.target_encoder.parameters():
                p.requires_grad = False
        return self.target_encoder

    def update_moving_average(self):
        pairs = zip(self.online_encoder.parameters(), self.target_encoder.parameters())
        for current, ma in pairs:
            ma.data = self.target_ema_updater.update_average(ma.data, current.data)

    def forward(self, one, two):
        pred_one = self.online_predictor(self.online_encoder(one))
        pred_two = self.online_predictor(self.online_encoder(two))
        with torch.no_grad():
            target = self.get_target_encoder()
            t_one, t_two = target(one).detach(), target(two).detach()
        return (loss_fn(pred_one, t_two) + loss_fn(pred_two, t_one)).mean()


learner = BYOL(nn.Sequential(nn.Linear(6, 8), nn.ReLU()))
learner.get_target_encoder()
opt = torch.optim.Adam(learner.parameters(), lr=3e-4)


def train_step(one, two):
    loss = learner(one, two)
    opt.zero_grad()
    loss.backward()
    opt.step()
    learner.update_moving_average()
    return loss.detach()


train_step = treadle.compile(train_step, model=learner, optimizer=opt)
losses = []
for _ in range(5):
    images = torch.randn(8, 6)
    noisy = images + 0.1 * torch.randn_like(images)
    losses.append(train_step(images, noisy).item())
