"""Few-shot episodes with prototypes; one episode in each step, accuracy as a running mean."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(51)
way, shot, query = 4, 2, 3


def conv_block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)
    )


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(conv_block(1, 6))

    def forward(self, x):
        x = self.encoder(x)
        return x.view(x.size(0), -1)


def euclidean_metric(a, b):
    n, m = a.shape[0], b.shape[0]
    a = a.unsqueeze(1).expand(n, m, -1)
    b = b.unsqueeze(0).expand(n, m, -1)
    return -((a - b) ** 2).sum(dim=2)


model = Convnet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def episode(data):
    p = shot * way
    data_shot, data_query = data[:p], data[p:]
    proto = model(data_shot)
    proto = proto.reshape(shot, way, -1).mean(dim=0)
    label = torch.arange(way).repeat(query)
    logits = euclidean_metric(model(data_query), proto)
    loss = F.cross_entropy(logits, label)
    acc = (torch.argmax(logits, dim=1) == label).float().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), acc


episode = treadle.compile(episode, model=model, optimizer=optimizer)


class Averager:
    def __init__(self):
        self.n, self.v = 0, 0

    def add(self, x):
        self.v = (self.v * self.n + x) / (self.n + 1)
        self.n += 1


tl, ta = Averager(), Averager()
for epoch in range(1, 5):
    loss, acc = episode(torch.rand(way * (shot + query), 1, 8, 8))
    tl.add(loss.item())
    ta.add(acc.item())
    lr_scheduler.step()
