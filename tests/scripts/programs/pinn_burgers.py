"""A physics-informed network: residual of Burgers' equation by autograd.grad, boundary terms."""

import math

import torch
import torch.nn as nn

import treadle

torch.manual_seed(7)
nu = 0.01 / math.pi


class PINN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in zip(layers, layers[1:])])
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h)


u_net = PINN([2, 12, 1])
optimizer = torch.optim.Adam(u_net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def grad(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


x_f = torch.rand(40, 1) * 2 - 1
t_f = torch.rand(40, 1)
x_f.requires_grad_(True)
t_f.requires_grad_(True)
x_0 = torch.linspace(-1, 1, 20)[:, None]
u_0 = -torch.sin(math.pi * x_0)


def closure_free_step():
    u = u_net(x_f, t_f)
    u_t, u_x = grad(u, t_f), grad(u, x_f)
    u_xx = grad(u_x, x_f)
    residual = (u_t + u * u_x - nu * u_xx).pow(2).mean()
    initial = (u_net(x_0, torch.zeros_like(x_0)) - u_0).pow(2).mean()
    loss = residual + initial
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), residual.detach(), initial.detach()


step = treadle.compile(closure_free_step, model=u_net, optimizer=optimizer)
best = 1e9
for epoch in range(6):
    loss, residual, initial = step()
    scheduler.step()
    if loss.item() < best:
        best = loss.item()
    if epoch % 2 == 0:
        print(
            f"{epoch} loss {loss.item():.3e} pde {residual.item():.3e} lr {scheduler.get_last_lr()}"
        )
