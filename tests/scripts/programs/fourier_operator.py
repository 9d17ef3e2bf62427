"""A Fourier neural operator: complex weights, rfft2, a relative error, a schedule inside of the step.

again: sched.last_epoch
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(2)


class SpectralConv2d(nn.Module):
    def __init__(self, i, o, m1, m2):
        super().__init__()
        self.m1, self.m2, self.o = m1, m2, o
        s = 1 / (i * o)
        self.w1 = nn.Parameter(s * torch.rand(i, o, m1, m2, dtype=torch.cfloat))
        self.w2 = nn.Parameter(s * torch.rand(i, o, m1, m2, dtype=torch.cfloat))

    def forward(self, x):
        ft = torch.fft.rfft2(x)
        out = torch.zeros(
            x.size(0), self.o, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device
        )
        out[:, :, : self.m1, : self.m2] = torch.einsum(
            "bixy,ioxy->boxy", ft[:, :, : self.m1, : self.m2], self.w1
        )
        out[:, :, -self.m1 :, : self.m2] = torch.einsum(
            "bixy,ioxy->boxy", ft[:, :, -self.m1 :, : self.m2], self.w2
        )
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class FNO(nn.Module):
    def __init__(self, width=6, modes=3):
        super().__init__()
        self.fc0 = nn.Linear(3, width)
        self.convs = nn.ModuleList(SpectralConv2d(width, width, modes, modes) for _ in range(2))
        self.ws = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(width, 16), nn.Linear(16, 1)

    def get_grid(self, shape, device):
        b, x, y = shape[0], shape[1], shape[2]
        gx = torch.linspace(0, 1, x, device=device).reshape(1, x, 1, 1).repeat(b, 1, y, 1)
        gy = torch.linspace(0, 1, y, device=device).reshape(1, 1, y, 1).repeat(b, x, 1, 1)
        return torch.cat((gx, gy), -1)

    def forward(self, x):
        x = torch.cat((x, self.get_grid(x.shape, x.device)), -1)
        x = self.fc0(x).permute(0, 3, 1, 2)
        for i, (c, w) in enumerate(zip(self.convs, self.ws)):
            x = c(x) + w(x)
            if i < 1:
                x = F.gelu(x)
        return self.fc2(F.gelu(self.fc1(x.permute(0, 2, 3, 1))))


model = FNO()
opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=10)


def rel(x, y):
    n = x.size(0)
    return ((x.reshape(n, -1) - y.reshape(n, -1)).norm(2, 1) / y.reshape(n, -1).norm(2, 1)).mean()


def step(a, u):
    opt.zero_grad()
    out = model(a).squeeze(-1)
    loss = rel(out, u)
    loss.backward()
    opt.step()
    sched.step()
    return loss.item()


step = treadle.compile(step, model=model, optimizer=opt)
ls = [step(torch.randn(3, 10, 12, 1), torch.randn(3, 10, 12)) for _ in range(5)]
