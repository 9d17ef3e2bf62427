"""Slot attention with GRU cell and random slots; a Sinkhorn matching loss with a fixed number of rounds."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(10)


class SlotAttention(nn.Module):
    def __init__(self, k, dim, iters=3):
        super().__init__()
        self.k, self.iters, self.scale = k, iters, dim**-0.5
        self.mu = nn.Parameter(torch.randn(1, 1, dim))
        self.logsigma = nn.Parameter(torch.zeros(1, 1, dim))
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.ReLU(inplace=True), nn.Linear(2 * dim, dim)
        )
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x, num_slots=None):
        b, n, d = x.shape
        ns = num_slots if num_slots is not None else self.k
        slots = self.mu.expand(b, ns, -1) + self.logsigma.exp() * torch.randn(b, ns, d)
        k, v = self.kv(self.n1(x)).chunk(2, -1)
        for _ in range(self.iters):
            prev = slots
            dots = torch.einsum("bid,bjd->bij", self.q(self.n2(slots)), k) * self.scale
            attn = dots.softmax(1) + 1e-8
            attn = attn / attn.sum(-1, keepdim=True)
            upd = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(upd.reshape(-1, d), prev.reshape(-1, d)).reshape(b, -1, d)
            slots = slots + self.mlp(self.n3(slots))
        return slots


def sinkhorn(c, eps=0.1, rounds=5):
    logp = -c / eps
    for _ in range(rounds):
        logp = logp - logp.logsumexp(-1, keepdim=True)
        logp = logp - logp.logsumexp(-2, keepdim=True)
    return (logp.exp() * c).sum((1, 2)).mean()


m = SlotAttention(4, 8)
opt = torch.optim.Adam(m.parameters(), 1e-3)
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3)


def step(x, t):
    s = m(x)
    loss = sinkhorn(torch.cdist(s, t) ** 2)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(m.parameters(), 0.1)
    opt.step()
    return loss.item()


step = treadle.compile(step, model=m, optimizer=opt)
r = []
for _ in range(4):
    r.append(step(torch.randn(3, 9, 8), torch.randn(3, 4, 8)))
    warm.step()
