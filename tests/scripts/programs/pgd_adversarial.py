"""Adversarial training against projected gradient descent, the inner loop in the step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(8)
EPS, ALPHA, STEPS = 0.1, 0.04, 3
model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def pgd_attack(x, y):
    x_adv = x.detach() + torch.empty_like(x).uniform_(-EPS, EPS)
    for _ in range(STEPS):
        x_adv.requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(model(x_adv), y)
        grad = torch.autograd.grad(loss, [x_adv])[0]
        x_adv = x_adv.detach() + ALPHA * torch.sign(grad.detach())
        x_adv = torch.min(torch.max(x_adv, x - EPS), x + EPS)
        x_adv = torch.clamp(x_adv, 0.0, 1.0)
    return x_adv


def train(x, y):
    x_adv = pgd_attack(x, y)
    opt.zero_grad()
    logits = model(x_adv)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    opt.step()
    return loss.detach(), (logits.argmax(1) == y).float().mean()


train = treadle.compile(train, model=model, optimizer=opt)
train_loss = train_acc = train_n = 0
for i in range(5):
    X, y = torch.rand(10, 1, 4, 4), torch.randint(3, (10,))
    loss, acc = train(X, y)
    train_loss += loss.item() * y.size(0)
    train_acc += acc.item() * y.size(0)
    train_n += y.size(0)
print("adversarial loss", train_loss / train_n, "accuracy", train_acc / train_n)
