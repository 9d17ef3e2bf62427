"""Closures by partial, chained schedulers, averages of the state, noise annealed by a counter.

again: dim 0: 6 -> 4
again: meter has other entries
"""

import collections
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(31)


class Meter(collections.defaultdict):
    def __init__(self):
        super().__init__(lambda: collections.deque(maxlen=4))

    def log(self, **kw):
        for k, v in kw.items():
            self[k].append(float(v))

    def mean(self):
        return {k: sum(v) / len(v) for k, v in self.items()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(5, 9),
            nn.utils.parametrizations.orthogonal(nn.Linear(9, 9)),
            nn.Linear(9, 4),
        )
        self.calls, self.ln = 0, nn.LayerNorm(9, bias=False)
        self.register_buffer("ema_loss", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int32))

    def forward(self, x):
        self.calls += 1
        h = F.hardtanh(self.a(x))
        h = self.ln(h + F.glu(torch.cat([self.b(h), h], -1)))
        return self.c(h)


net = Net()
shadow = {k: v.clone() for k, v in net.state_dict().items()}
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sch = {
    "warm": torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3),
    "cos": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
}
seq = torch.optim.lr_scheduler.SequentialLR(opt, [sch["warm"], sch["cos"]], [3])
crit = functools.partial(F.multi_margin_loss, p=1, margin=0.7)
meter = Meter()
global_step = 0


def update_ema(decay):
    with torch.no_grad():
        for k, v in net.state_dict().items():
            if v.dtype.is_floating_point:
                shadow[k].mul_(decay).add_(v, alpha=1 - decay)
            else:
                shadow[k].copy_(v)


def step(x, y, *, noise=0.01, penalty=functools.partial(torch.norm, p=2)):
    global global_step
    out = net(x)
    loss = crit(out, y)
    reg = sum(penalty(p) for n, p in net.named_parameters() if n.endswith("weight"))
    (loss + 1e-4 * reg).backward()
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=noise / (1 + global_step) ** 0.55)
        net.ema_loss.mul_(0.9).add_(0.1 * loss)
        net.seen.index_add_(0, y, torch.ones_like(y, dtype=torch.int32))
    nn.utils.clip_grad_norm_(net.parameters(), 2.0, foreach=True)
    opt.step()
    net.zero_grad(set_to_none=True)
    global_step += 1
    meter.log(
        loss=loss.item(),
        acc=(out.argmax(-1) == y).float().mean().item(),
        lr=opt.param_groups[0]["lr"],
    )
    return loss


step = treadle.compile(step, model=net, optimizer=opt)
X, Y = torch.randn(22, 5), torch.randint(4, (22,))
for epoch in range(2):
    for i, idx in enumerate(torch.randperm(22).split(6)):
        l = step(X[idx], Y[idx], noise=0.02)
        seq.step()
        update_ema(0.95)
        if i % 2 == 0:
            print(f"{epoch} {i} {meter.mean()} {l:.3f}")
