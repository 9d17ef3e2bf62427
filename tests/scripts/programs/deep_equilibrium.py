"""A deep equilibrium layer: Anderson acceleration without gradients, and in a hook of the backward."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(12)


class ResNetLayer(nn.Module):
    def __init__(self, c, inner, k=3, g=4):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(c, inner, k, padding=1, bias=False),
            nn.Conv2d(inner, c, k, padding=1, bias=False),
        )
        self.norm1, self.norm2, self.norm3 = (
            nn.GroupNorm(g, inner),
            nn.GroupNorm(g, c),
            nn.GroupNorm(g, c),
        )
        self.conv1.weight.data.normal_(0, 0.01)
        self.conv2.weight.data.normal_(0, 0.01)

    def forward(self, z, x):
        y = self.norm1(F.relu(self.conv1(z)))
        return self.norm3(F.relu(z + self.norm2(x + self.conv2(y))))


def anderson(f, x0, m=3, lam=1e-4, max_iter=6, beta=1.0):
    bsz, d, H, W = x0.shape
    X = torch.zeros(bsz, m, d * H * W, dtype=x0.dtype)
    Fm = torch.zeros(bsz, m, d * H * W, dtype=x0.dtype)
    X[:, 0], Fm[:, 0] = x0.view(bsz, -1), f(x0).view(bsz, -1)
    X[:, 1], Fm[:, 1] = Fm[:, 0], f(Fm[:, 0].view_as(x0)).view(bsz, -1)
    H_ = torch.zeros(bsz, m + 1, m + 1, dtype=x0.dtype)
    H_[:, 0, 1:] = H_[:, 1:, 0] = 1
    y = torch.zeros(bsz, m + 1, 1, dtype=x0.dtype)
    y[:, 0] = 1
    res = []
    for k in range(2, max_iter):
        n = min(k, m)
        G = Fm[:, :n] - X[:, :n]
        H_[:, 1 : n + 1, 1 : n + 1] = (
            torch.bmm(G, G.transpose(1, 2)) + lam * torch.eye(n, dtype=x0.dtype)[None]
        )
        alpha = torch.linalg.solve(H_[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        X[:, k % m] = (
            beta * (alpha[:, None] @ Fm[:, :n])[:, 0]
            + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
        )
        Fm[:, k % m] = f(X[:, k % m].view_as(x0)).view(bsz, -1)
        res.append((Fm[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Fm[:, k % m].norm().item()))
    return X[:, k % m].view_as(x0), res


class DEQFixedPoint(nn.Module):
    def __init__(self, f, solver, **kwargs):
        super().__init__()
        self.f, self.solver, self.kwargs = f, solver, kwargs

    def forward(self, x):
        with torch.no_grad():
            z, self.forward_res = self.solver(
                lambda z: self.f(z, x), torch.zeros_like(x), **self.kwargs
            )
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad):
            g, self.backward_res = self.solver(
                lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad,
                grad,
                **self.kwargs,
            )
            return g

        z.register_hook(backward_hook)
        return z


f = ResNetLayer(4, 8)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1),
    nn.BatchNorm2d(4),
    DEQFixedPoint(f, anderson, max_iter=5, m=3),
    nn.BatchNorm2d(4),
    nn.AvgPool2d(4, 4),
    nn.Flatten(),
    nn.Linear(16, 5),
)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6, eta_min=1e-6)


def step(X, y):
    yp = model(X)
    loss = nn.CrossEntropyLoss()(yp, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return (yp.max(dim=1)[1] != y).sum().item(), loss.item() * X.shape[0]


step = treadle.compile(step, model=model, optimizer=opt)
total_loss, total_err = 0.0, 0.0
for i in range(5):
    e, l = step(torch.randn(4, 3, 8, 8).double().float(), torch.randint(5, (4,)))
    scheduler.step()
    total_err += e
    total_loss += l
fr, br = model[2].forward_res, model[2].backward_res
