"""Mixup by NumPy's beta outside of the step, label smoothing, the factor as an argument.

again: argument lam
"""

import numpy as np
import torch
import torch.nn as nn

import treadle

np.random.seed(41)
torch.manual_seed(41)
alpha = 0.4
net = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 5))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def mixup_criterion(pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def train_step(x, y, index, lam):
    mixed_x = lam * x + (1 - lam) * x[index, :]
    outputs = net(mixed_x)
    loss = mixup_criterion(outputs, y, y[index], lam)
    predicted = outputs.argmax(1)
    correct = lam * predicted.eq(y).sum().float() + (1 - lam) * predicted.eq(y[index]).sum().float()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), correct


train_step = treadle.compile(train_step, model=net, optimizer=optimizer)
train_loss = correct = total = 0
for batch_idx in range(6):
    inputs, targets = torch.randn(10, 7), torch.randint(5, (10,))
    lam = np.random.beta(alpha, alpha)
    loss, hits = train_step(inputs, targets, torch.randperm(10), lam)
    train_loss += loss.item()
    total += targets.size(0)
    correct += hits.item()
print(train_loss / 6, 100.0 * correct / total)
