"""Mamba in plain PyTorch: a selective scan as a loop over time, a tied embedding; gradients of three
batches with a last smaller group, warm restarts in the step.

again: embedding.weight.grad is set now
again: a branch on argument i
again: a branch on argument i
again: a branch on sched.T_cur was
again: a branch on sched.T_cur, sched.T_i
again: a branch on sched.T_cur, sched.T_i
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(10)


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MambaBlock(nn.Module):
    def __init__(self, d=12, n=4, expand=2, k=4):
        super().__init__()
        self.d_inner, self.dt_rank, self.n = d * expand, math.ceil(d / 16), n
        self.in_proj = nn.Linear(d, self.d_inner * 2, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, k, groups=self.d_inner, padding=k - 1)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + n * 2, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        A = torch.arange(1, n + 1).float().repeat(self.d_inner, 1)
        self.A_log = nn.Parameter(torch.log(A))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d, bias=False)

    def forward(self, x):
        (b, l, d) = x.shape
        (x, res) = self.in_proj(x).split(split_size=[self.d_inner, self.d_inner], dim=-1)
        x = self.conv1d(x.transpose(1, 2))[:, :, :l].transpose(1, 2)
        y = self.ssm(F.silu(x)) * F.silu(res)
        return self.out_proj(y)

    def ssm(self, x):
        A = -torch.exp(self.A_log.float())
        D = self.D.float()
        (delta, B, C) = self.x_proj(x).split(split_size=[self.dt_rank, self.n, self.n], dim=-1)
        return self.selective_scan(x, F.softplus(self.dt_proj(delta)), A, B, C, D)

    def selective_scan(self, u, delta, A, B, C, D):
        (b, l, d_in) = u.shape
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        x = torch.zeros((b, d_in, A.shape[1]), device=deltaA.device)
        ys = []
        for i in range(l):
            x = deltaA[:, i] * x + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, C[:, i, :]))
        return torch.stack(ys, dim=1) + u * D


class Mamba(nn.Module):
    def __init__(self, v=17, d=12, L=1):
        super().__init__()
        self.embedding = nn.Embedding(v, d)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"norm": RMSNorm(d), "mixer": MambaBlock(d)}) for _ in range(L)]
        )
        self.norm_f, self.lm_head = RMSNorm(d), nn.Linear(d, v, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer["mixer"](layer["norm"](x)) + x
        return self.lm_head(self.norm_f(x))


model = Mamba()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2, T_mult=2)
accum, n_batches = 3, 8
log = []


def train_step(i, ids):
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 17), ids[:, 1:].reshape(-1))
    (loss / accum).backward()
    log.append({"iter": i, "loss": loss.item(), "ppl": math.exp(loss.item())})
    if (i + 1) % accum == 0 or (i + 1) == n_batches:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()


train_step = treadle.compile(train_step, model=model, optimizer=opt)
for epoch in range(2):
    for i in range(n_batches):
        train_step(i, torch.randint(17, (3, 8)))
