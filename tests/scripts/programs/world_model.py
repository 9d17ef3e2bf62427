"""A world model in latent space (Dreamer): categorical states by straight-through, balanced KL with
free nats, imagined rollouts through frozen modules, lambda returns, three optimizers in a step.
"""

import torch
import torch.distributions as td
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(20)
S, K, H, A = 3, 4, 12, 2


class FreezeParameters:
    def __init__(self, modules):
        self.modules = modules
        self.param_states = [p.requires_grad for m in modules for p in m.parameters()]

    def __enter__(self):
        for m in self.modules:
            for p in m.parameters():
                p.requires_grad = False

    def __exit__(self, *exc):
        i = 0
        for m in self.modules:
            for p in m.parameters():
                p.requires_grad = self.param_states[i]
                i += 1


class RSSM(nn.Module):
    def __init__(self, obs=6):
        super().__init__()
        self.inp, self.cell = nn.Sequential(nn.Linear(S * K + A, H), nn.ELU()), nn.GRUCell(H, H)
        self.prior, self.post = nn.Linear(H, S * K), nn.Linear(H + obs, S * K)
        self.decode, self.reward = (
            nn.Sequential(nn.Linear(H + S * K, 16), nn.ELU(), nn.Linear(16, obs)),
            nn.Linear(H + S * K, 1),
        )

    def sample(self, logits):
        dist = td.OneHotCategoricalStraightThrough(logits=logits.view(-1, S, K))
        return dist.rsample().flatten(1)

    def imagine_step(self, h, z, a):
        h = self.cell(self.inp(torch.cat([z, a], -1)), h)
        logits = self.prior(h)
        return h, self.sample(logits), logits

    def observe(self, obs, act):
        B, T, _ = obs.shape
        h, z = torch.zeros(B, H), torch.zeros(B, S * K)
        out = {"h": [], "z": [], "prior": [], "post": []}
        for i in range(T):
            h, _, prior = self.imagine_step(h, z, act[:, i])
            post = self.post(torch.cat([h, obs[:, i]], -1))
            z = self.sample(post)
            for k, v in zip(out, (h, z, prior, post)):
                out[k].append(v)
        return {k: torch.stack(v, 1) for k, v in out.items()}


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(H + S * K, 16), nn.ELU(), nn.Linear(16, 2 * A))

    def forward(self, f):
        mean, std = self.net(f).chunk(2, -1)
        return td.Independent(
            td.TransformedDistribution(
                td.Normal(5 * torch.tanh(mean / 5), F.softplus(std) + 0.1),
                [td.TanhTransform(cache_size=1)],
            ),
            1,
        )


def kl(a, b):
    c = lambda l: td.Independent(td.OneHotCategorical(logits=l.view(*l.shape[:-1], S, K)), 1)
    return td.kl_divergence(c(a), c(b))


def lambda_return(reward, value, bootstrap, discount=0.95, lam=0.9):
    next_values = torch.cat([value[1:], bootstrap[None]], 0)
    target = reward + discount * next_values * (1 - lam)
    outputs, acc = [], bootstrap
    for i in range(reward.shape[0] - 1, -1, -1):
        acc = target[i] + discount * lam * acc
        outputs.append(acc)
    return torch.flip(torch.stack(outputs), [0])


world, actor = RSSM(), Actor()
value = nn.Sequential(nn.Linear(H + S * K, 16), nn.ELU(), nn.Linear(16, 1))
w_opt = torch.optim.Adam(world.parameters(), 6e-3)
a_opt, v_opt = (
    torch.optim.Adam(actor.parameters(), 8e-3),
    torch.optim.Adam(value.parameters(), 8e-3),
)


def update(obs, act, rew):
    out = world.observe(obs, act)
    feat = torch.cat([out["h"], out["z"]], -1)
    recon = -td.Independent(td.Normal(world.decode(feat), 1.0), 1).log_prob(obs).mean()
    rl = -td.Normal(world.reward(feat).squeeze(-1), 1.0).log_prob(rew).mean()
    left, right = kl(out["post"].detach(), out["prior"]), kl(out["post"], out["prior"].detach())
    free = torch.full_like(left.mean(), 0.1)
    kl_loss = 0.8 * torch.maximum(left.mean(), free) + 0.2 * torch.maximum(right.mean(), free)
    model_loss = recon + rl + kl_loss
    w_opt.zero_grad()
    model_loss.backward()
    nn.utils.clip_grad_norm_(world.parameters(), 100.0)
    w_opt.step()
    with torch.no_grad():
        h, z = out["h"].detach().flatten(0, 1), out["z"].detach().flatten(0, 1)
    with FreezeParameters([world]):
        feats, ents = [], []
        for _ in range(3):
            dist = actor(torch.cat([h, z], -1).detach())
            a = dist.rsample()
            ents.append(-dist.log_prob(a))
            h, z, _ = world.imagine_step(h, z, a)
            feats.append(torch.cat([h, z], -1))
        imag = torch.stack(feats)
    with FreezeParameters([world, value]):
        r, v = world.reward(imag).squeeze(-1), value(imag).squeeze(-1)
    ret = lambda_return(r[:-1], v[:-1], v[-1])
    actor_loss = -(ret.mean() + 1e-3 * torch.stack(ents).mean())
    a_opt.zero_grad()
    actor_loss.backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 100.0)
    a_opt.step()
    with torch.no_grad():
        vf, target = imag[:-1].detach(), ret.detach()
    v_loss = -td.Independent(td.Normal(value(vf), 1), 1).log_prob(target.unsqueeze(-1)).mean()
    v_opt.zero_grad()
    v_loss.backward()
    v_opt.step()
    return dict(
        model=model_loss.item(), kl=kl_loss.item(), actor=actor_loss.item(), value=v_loss.item()
    )


update = treadle.compile(update, model=[world, actor, value], optimizer=[w_opt, a_opt, v_opt])
metrics = [
    update(torch.randn(4, 5, 6), torch.rand(4, 5, 2) * 2 - 1, torch.randn(4, 5)) for _ in range(5)
]
