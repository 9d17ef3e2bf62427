"""Tables with small integers, missing values, bags, quantiles, survival times and ranks.

again: binemb.grad is set
again: (dim 0: 7 -> 5)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(23)
CFG = dict(cards=[5, 1, 3], bins=4, quantiles=(0.1, 0.5, 0.9), lr=1e-2)
edges = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)


class Tab(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(c + 1, 3, padding_idx=0) for c in CFG["cards"])
        self.bag = nn.EmbeddingBag(11, 4, mode="mean", padding_idx=0, include_last_offset=False)
        self.binemb = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))
        self.trunk = nn.Sequential(
            nn.Linear(9 + 4 + 2 + 2, 12),
            nn.BatchNorm1d(12, track_running_stats=False),
            nn.ReLU6(),
            nn.Dropout(0.1),
        )
        self.empty = nn.Linear(12, 0)
        self.q, self.hz, self.rank = nn.Linear(12, 3), nn.Linear(12, 1), nn.Bilinear(12, 2, 1)

    def forward(self, cats, vals, bag, off):
        e = torch.cat([m(cats[:, i].long() + 1) for i, m in enumerate(self.emb)], 1)
        miss = torch.isnan(vals)
        vals = vals.masked_fill(miss, 0.0)
        b = (
            self.binemb[torch.bucketize(vals[:, 0], edges, right=True)]
            * torch.searchsorted(edges, vals[:, 1].contiguous())[:, None]
        )
        x = torch.cat([e, self.bag(bag, off), b.float(), vals.float()], -1)
        h = self.trunk(x)
        h = torch.cat([h, self.empty(h)], 1)
        return self.q(h), self.hz(h).squeeze(-1), self.rank(h, vals.float()).view(-1)


def pinball(pred, y):
    q = pred.new_tensor(CFG["quantiles"])
    d = y.unsqueeze(1) - pred
    return torch.max((q - 1) * d, q * d).sum(1).mean()


def cox(h, t, ev):
    o = torch.argsort(t, descending=True)
    h, ev = h[o], ev[o]
    return -((h - torch.logcumsumexp(h, 0)) * ev).sum() / (ev.sum() + 1e-8)


def listnet(s, rel, k=3):
    top = torch.topk(s, min(k, s.numel()))
    m = torch.zeros_like(s, dtype=torch.bool)
    m[top.indices] = True
    return (
        -(F.softmax(rel.float(), 0) * F.log_softmax(s, 0)).sum()
        + torch.where(m, s, 0.0).sum() * 1e-2
    )


net = Tab()
opt = torch.optim.Rprop(net.parameters(), lr=CFG["lr"])
gstep = 0


def fit(batch):
    global gstep
    q, h, s = net(batch["cats"], batch["vals"], batch["bag"], batch["off"])
    y = batch["y"].to(q.dtype) / 255
    losses = {
        "pin": pinball(q, y),
        "cox": cox(h, batch["t"].float(), batch["ev"]),
        "rank": listnet(s, batch["rel"]),
    }
    total = sum(losses.values())
    opt.zero_grad(set_to_none=False)
    total.backward()
    for p in net.parameters():
        if p.grad is not None and p.grad.numel():
            p.grad[p.grad.abs() < 1e-6] = 0
    opt.step()
    gstep += 1
    return (
        {k: v.item() for k, v in losses.items()},
        (q.sort(1).values != q).any(),
        batch["y"].float().quantile(0.3),
        torch.cumsum(batch["ev"], 0),
    )


fit = treadle.compile(fit, model=net, optimizer=opt)
log = []
for n in [7, 7, 5, 7]:
    vals = torch.randn(n, 2, dtype=torch.float64)
    vals[torch.rand(n, 2) < 0.2] = float("nan")
    bag = torch.randint(0, 11, (3 * n,), dtype=torch.int32)
    off = torch.arange(0, 3 * n, 3, dtype=torch.int32)
    d, bad, qq, cs = fit(
        dict(
            cats=torch.stack([torch.randint(c, (n,)) for c in CFG["cards"]], 1).to(torch.int8),
            vals=vals,
            bag=bag,
            off=off,
            y=torch.randint(0, 255, (n,), dtype=torch.uint8),
            t=torch.randperm(n).to(torch.int16),
            ev=torch.rand(n) < 0.6,
            rel=torch.randint(4, (n,)),
        )
    )
    log.append((d, bad.item(), qq.item(), cs.tolist()))
del vals, d
