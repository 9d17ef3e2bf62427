"""DPO then GRPO on a tiny LM: log-probs by gather, masks, KL to reference.

again: a branch on sch
"""

import copy
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle


class LM(nn.Module):
    def __init__(self, v=24, d=16):
        super().__init__()
        self.e, self.rnn, self.h = (
            nn.Embedding(v, d),
            nn.GRU(d, d, batch_first=True),
            nn.Linear(d, v),
        )

    def forward(self, x):
        return self.h(self.rnn(self.e(x))[0])


policy = LM()
ref = copy.deepcopy(policy).eval().requires_grad_(False)
opt = torch.optim.RMSprop(policy.parameters(), lr=2e-3)
sch = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda=lambda s: min(1.0, (s + 1) / 4))
metrics = defaultdict(list)


def logps(logits, labels, average=False):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != -100
    labels[labels == -100] = 0
    per = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per * mask).sum(-1) / mask.sum(-1) if average else (per * mask).sum(-1)


def get_batch_metrics(batch, beta=0.1, label_smoothing=0.1):
    n = batch["chosen"].shape[0]
    ids = torch.cat([batch["chosen"], batch["rejected"]])
    lab = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
    p = logps(policy(ids), lab)
    with torch.no_grad():
        r = logps(ref(ids), lab)
    pc, pr, rc, rr = p[:n], p[n:], r[:n], r[n:]
    logits = (pc - pr) - (rc - rr)
    losses = (
        -F.logsigmoid(beta * logits) * (1 - label_smoothing)
        - F.logsigmoid(-beta * logits) * label_smoothing
    )
    rewards = beta * (pc - rc).detach(), beta * (pr - rr).detach()
    m = {
        "acc": (rewards[0] > rewards[1]).float().tolist(),
        "margin": (rewards[0] - rewards[1]).numpy().tolist(),
        "loss": losses.detach().tolist(),
    }
    return losses.mean(), m


def dpo_step(batch):
    loss, m = get_batch_metrics(batch)
    loss.backward()
    for k, v in m.items():
        metrics[k].extend(v)
    g = nn.utils.clip_grad_norm_(policy.parameters(), 10.0).item()
    opt.step()
    sch.step()
    opt.zero_grad()
    metrics["grad_norm"].append(g)


def grpo_step(ids, mask, rewards, old):
    logp = torch.gather(policy(ids)[:, :-1].log_softmax(-1), 2, ids[:, 1:, None]).squeeze(-1)
    with torch.no_grad():
        rlogp = torch.gather(ref(ids)[:, :-1].log_softmax(-1), 2, ids[:, 1:, None]).squeeze(-1)
    g = rewards.view(-1, 4)
    adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)).view(-1)
    ratio = torch.exp(logp - old)
    a = adv.unsqueeze(1)
    obj = torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a)
    kl = torch.exp(rlogp - logp) - (rlogp - logp) - 1
    loss = -(((obj - 0.04 * kl) * mask).sum(1) / mask.sum(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    metrics["kl"].append(((kl * mask).sum(1) / mask.sum(1)).mean().item())
    return logp.detach()


dpo = treadle.compile(dpo_step, model={"p": policy, "r": ref}, optimizer=opt)
grpo = treadle.compile(grpo_step, model={"p": policy, "r": ref}, optimizer=opt)
for _ in range(5):
    b = {k: torch.randint(0, 24, (4, 9)) for k in ("chosen", "rejected")}
    for k in ("chosen", "rejected"):
        l = b[k].clone()
        l[:, :3] = -100
        b[k + "_labels"] = l
    dpo(b)
old = None
for _ in range(4):
    ids = torch.randint(0, 24, (8, 7))
    mask = torch.ones(8, 6)
    mask[::2, 4:] = 0
    with torch.no_grad():
        old = torch.gather(policy(ids)[:, :-1].log_softmax(-1), 2, ids[:, 1:, None]).squeeze(-1)
    last = grpo(ids, mask, torch.rand(8), old)
metrics = dict(metrics)
