"""N-BEATS with trend and seasonality bases, sMAPE, warm restarts stepped inside."""

import numpy as np
import torch
from torch import nn

import treadle


def seasonality(thetas, t):
    p = thetas.size()[-1]
    assert p <= thetas.shape[1]
    p1, p2 = (p // 2, p // 2) if p % 2 == 0 else (p // 2, p // 2 + 1)
    s1 = torch.tensor(np.array([np.cos(2 * np.pi * i * t) for i in range(p1)])).float()
    s2 = torch.tensor(np.array([np.sin(2 * np.pi * i * t) for i in range(p2)])).float()
    return thetas.mm(torch.cat([s1, s2]))


def trend(thetas, t):
    p = thetas.size()[-1]
    T = torch.tensor(np.array([t**i for i in range(p)])).float()
    return thetas.mm(T)


class Block(nn.Module):
    def __init__(self, kind, units, back, fore, p):
        super().__init__()
        self.kind, self.back, self.fore = kind, back, fore
        self.fc = nn.Sequential(
            nn.Linear(back, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()
        )
        self.theta_b, self.theta_f = (
            nn.Linear(units, p, bias=False),
            nn.Linear(units, p, bias=False),
        )
        self.tb = np.arange(-back, 0) / back
        self.tf = np.arange(0, fore) / fore

    def forward(self, x):
        h = self.fc(x)
        fn = {"trend": trend, "seasonality": seasonality}[self.kind]
        return fn(self.theta_b(h), self.tb), fn(self.theta_f(h), self.tf)


class NBeats(nn.Module):
    def __init__(self, back=20, fore=5):
        super().__init__()
        self.fore = fore
        self.stacks = nn.ModuleList(
            [
                nn.ModuleList([Block(k, 16, back, fore, p) for _ in range(2)])
                for k, p in (("trend", 3), ("seasonality", 4))
            ]
        )

    def forward(self, x):
        forecast = torch.zeros(size=(x.size()[0], self.fore))
        for stack in self.stacks:
            for block in stack:
                b, f = block(x)
                x, forecast = x - b, forecast + f
        return x, forecast


net = NBeats()
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=4, T_mult=2)
best, grad_step, lrs = {"smape": 1e9, "at": -1}, 0, []


def smape(f, y):
    return 200 * ((f - y).abs() / (f.abs() + y.abs() + 1e-8)).mean()


def step(x, y):
    global grad_step
    opt.zero_grad()
    _, forecast = net(torch.as_tensor(x, dtype=torch.float))
    loss = smape(forecast, torch.as_tensor(y, dtype=torch.float))
    loss.backward()
    opt.step()
    grad_step += 1
    return loss.item()


step = treadle.compile(step, model=net, optimizer=opt)
t = np.linspace(0, 50, 600)
series = np.sin(t) + 0.1 * t
for it in range(12):
    at = np.random.randint(0, 570, 16)
    x = np.stack([series[i : i + 20] for i in at])
    y = np.stack([series[i + 20 : i + 25] for i in at])
    v = step(x, y)
    sched.step()
    lrs.append(opt.param_groups[0]["lr"])
    if v < best["smape"]:
        best.update(smape=v, at=it)
