"""A Hamiltonian network: the field is a gradient with respect to the inputs, cast by a symplectic matrix."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(59)


class HNN(nn.Module):
    def __init__(self, dim=2, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.M = torch.eye(dim)
        self.M = torch.cat([self.M[dim // 2 :], -self.M[: dim // 2]])

    def time_derivative(self, x):
        F2 = self.net(x)
        dF2 = torch.autograd.grad(F2.sum(), x, create_graph=True)[0]
        return dF2 @ self.M.t()


model = HNN()
optim = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
L2_loss = lambda u, v: (u - v).pow(2).mean()


def step(x, dxdt):
    x = x.clone().requires_grad_()
    dxdt_hat = model.time_derivative(x)
    loss = L2_loss(dxdt, dxdt_hat)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optim)
stats = {"train_loss": []}
for i in range(5):
    q = torch.randn(10, 2)
    stats["train_loss"].append(step(q, torch.stack([q[:, 1], -q[:, 0]], 1)).item())
