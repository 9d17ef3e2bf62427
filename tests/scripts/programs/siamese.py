"""A siamese network with the contrastive loss; pairs are drawn by Python's random numbers outside."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

random.seed(47)
torch.manual_seed(47)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn1 = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4)
        )
        self.fc1 = nn.Sequential(nn.Linear(4 * 36, 16), nn.ReLU(inplace=True), nn.Linear(16, 5))

    def forward_once(self, x):
        output = self.cnn1(x)
        output = output.view(output.size()[0], -1)
        return self.fc1(output)

    def forward(self, input1, input2):
        return self.forward_once(input1), self.forward_once(input2)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, label):
        d = F.pairwise_distance(output1, output2, keepdim=True)
        return torch.mean(
            (1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2)
        )


net = SiameseNetwork()
criterion = ContrastiveLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)


def step(img0, img1, label):
    optimizer.zero_grad()
    loss = criterion(*net(img0, img1), label)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=net, optimizer=optimizer)
counter, loss_history, iteration_number = [], [], 0
for i in range(4):
    labels = torch.tensor([[float(random.random() > 0.5)] for _ in range(6)])
    loss = step(torch.rand(6, 1, 6, 6), torch.rand(6, 1, 6, 6), labels)
    if i % 2 == 0:
        iteration_number += 2
        counter.append(iteration_number)
        loss_history.append(loss.item())
