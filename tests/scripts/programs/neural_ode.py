"""A neural differential equation fitted to a spiral, by Euler's steps of a fixed size."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(33)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
times = torch.linspace(0.0, 0.5, 21)


def odeint(func, y0, t):
    ys = [y0]
    for t0, t1 in zip(t[:-1], t[1:]):
        ys.append(ys[-1] + (t1 - t0) * func(t0, ys[-1]))
    return torch.stack(ys)


with torch.no_grad():
    true_y = odeint(lambda t, y: y**3 @ true_A, torch.tensor([[2.0, 0.0]]), times)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.nfe = 0
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


def get_batch(batch_time=4, batch_size=5):
    s = torch.randperm(len(times) - batch_time)[:batch_size]
    return true_y[s], times[:batch_time], torch.stack([true_y[s + i] for i in range(batch_time)])


class RunningAverageMeter:
    def __init__(self, momentum=0.99):
        self.momentum, self.val, self.avg = momentum, None, 0

    def update(self, val):
        self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)


def train_step(batch_y0, batch_t, batch_y):
    optimizer.zero_grad()
    pred_y = odeint(func, batch_y0, batch_t)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=func, optimizer=optimizer)
loss_meter = RunningAverageMeter(0.97)
for itr in range(1, 6):
    loss_meter.update(train_step(*get_batch()).item())
    if itr % 2 == 0:
        with torch.no_grad():
            test_loss = torch.mean(torch.abs(odeint(func, true_y[0], times) - true_y))
            print(f"Iter {itr:04d} | Total Loss {test_loss.item():.6f}")
