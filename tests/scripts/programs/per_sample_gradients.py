"""torch.func: inner loops of tasks under vmap, gradients of each sample, an ensemble."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap

import treadle

torch.manual_seed(13)
net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1))
inner_lr = nn.ParameterDict(
    {n.replace(".", "_"): nn.Parameter(torch.tensor(0.05)) for n, _ in net.named_parameters()}
)
opt = torch.optim.Adam([*net.parameters(), *inner_lr.values()], lr=1e-2)


def loss_fn(params, x, y):
    return F.mse_loss(functional_call(net, params, (x,)), y)


def task_loss(params, sx, sy, qx, qy):
    p = params
    for _ in range(2):
        g = grad(loss_fn)(p, sx, sy)
        p = {k: v - inner_lr[k.replace(".", "_")] * g[k] for k, v in p.items()}
    return loss_fn(p, qx, qy)


def meta_step(sx, sy, qx, qy):
    params = dict(net.named_parameters())
    losses = vmap(task_loss, in_dims=(None, 0, 0, 0, 0))(params, sx, sy, qx, qy)
    loss = losses.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach(), losses.detach()


meta = treadle.compile(meta_step, model=[net, inner_lr], optimizer=opt)
ls = []
for _ in range(4):
    a, ph = torch.rand(3, 1, 1) * 4, torch.rand(3, 1, 1) * 3
    sx, qx = torch.rand(3, 5, 1) * 10 - 5, torch.rand(3, 7, 1) * 10 - 5
    ls.append(meta(sx, a * torch.sin(sx + ph), qx, a * torch.sin(qx + ph))[0].item())
clf = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
opt2 = torch.optim.SGD(clf.parameters(), 0.3, momentum=0.9)
MAX, SIGMA = 1.0, 0.4


def sample_loss(params, buffers, x, y):
    return F.cross_entropy(
        functional_call(clf, (params, buffers), (x.unsqueeze(0),)), y.unsqueeze(0)
    )


ft = vmap(grad_and_value(sample_loss), in_dims=(None, None, 0, 0))


def dp_step(x, y):
    params = {k: v.detach() for k, v in clf.named_parameters()}
    g, l = ft(params, dict(clf.named_buffers()), x, y)
    norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
    c = (MAX / (norms + 1e-6)).clamp(max=1.0)
    for k, p in clf.named_parameters():
        p.grad = (
            torch.einsum("n,n...->...", c, g[k]) + torch.randn_like(p) * SIGMA * MAX
        ) / x.shape[0]
    opt2.step()
    return l.mean(), norms


dp = treadle.compile(dp_step, model=clf, optimizer=opt2)
for _ in range(4):
    l, norms = dp(torch.randn(9, 6), torch.randint(3, (9,)))
ens = [nn.Linear(4, 2) for _ in range(3)]
P, B = stack_module_state(ens)
opt3 = torch.optim.SGD(list(P.values()), 0.1)
base = nn.Linear(4, 2)


def fmodel(p, b, x):
    return functional_call(base, (p, b), (x,))


def ens_step(x, y):
    out = vmap(fmodel, in_dims=(0, 0, None))(P, B, x)
    l = F.cross_entropy(out.flatten(0, 1), y.repeat(3))
    opt3.zero_grad()
    l.backward()
    opt3.step()
    return l.detach()


es = treadle.compile(ens_step, optimizer=opt3)
for _ in range(3):
    el = es(torch.randn(5, 4), torch.randint(2, (5,)))
