"""PPO's update whose clip range and entropy weight are globals that a loop anneals; the best of a
statistic is kept with ``max``.
"""

import torch
import torch.nn as nn
from torch.distributions import Categorical

import treadle

torch.manual_seed(6)
ENT_COEF, CLIP, VF = 0.02, 0.2, 0.5


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pi, self.v = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, obs):
        h = torch.tanh(self.body(obs))
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


net = ActorCritic()
opt = torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-5)
stats = {"kl": [], "clipfrac": [], "most": 0.0}


def update(obs, act, logp, ret, adv, old_v):
    dist, v = net(obs)
    ratio = (dist.log_prob(act) - logp).exp()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    pg = -torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
    clipped = old_v + (v - old_v).clamp(-CLIP, CLIP)
    vl = torch.max((v - ret) ** 2, (clipped - ret) ** 2).mean()
    loss = pg + VF * vl - ENT_COEF * dist.entropy().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    opt.step()
    with torch.no_grad():
        kl = (logp - dist.log_prob(act)).mean()
        stats["kl"].append(kl.item())
        stats["clipfrac"].append(((ratio - 1).abs() > CLIP).float().mean().item())
        stats["most"] = max(stats["most"], abs(kl.item()))
    return kl


update = treadle.compile(update, model=net, optimizer=opt)
for it in range(4):
    frac = 1.0 - it / 4
    ENT_COEF = 0.02 * frac
    CLIP = 0.2 * frac
    opt.param_groups[0]["lr"] = 3e-4 * frac
    obs = torch.randn(12, 5)
    with torch.no_grad():
        dist, v = net(obs)
    act = dist.sample()
    logp, ret = dist.log_prob(act), torch.randn(12)
    for _ in range(3):
        kl = update(obs, act, logp, ret, ret - v, v)
        if kl > 0.5:
            break
