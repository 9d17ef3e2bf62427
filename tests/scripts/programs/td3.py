"""TD3 in one method: a delayed policy by a counter, weights of a prioritised buffer.

again: a branch on self.total_it
"""

import copy
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(20)
np.random.seed(20)
random.seed(20)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward", "not_done"))


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))


class TD3:
    def __init__(self, s, a, max_action=1.0):
        self.actor = nn.Sequential(mlp(s, a), nn.Tanh())
        self.actor_target = copy.deepcopy(self.actor)
        self.c1, self.c2 = mlp(s + a, 1), mlp(s + a, 1)
        self.critic = nn.ModuleList([self.c1, self.c2])
        self.critic_target = copy.deepcopy(self.critic)
        self.aopt = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.copt = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        (
            self.max_action,
            self.discount,
            self.tau,
            self.policy_noise,
            self.noise_clip,
            self.policy_freq,
        ) = max_action, 0.99, 0.05, 0.2, 0.5, 2
        self.total_it = 0
        self.train = treadle.compile(
            self.train,
            model=[self.actor, self.actor_target, self.critic, self.critic_target],
            optimizer=[self.aopt, self.copt],
        )

    def select(self, s):
        return self.actor(torch.FloatTensor(s.reshape(1, -1))).cpu().data.numpy().flatten()

    def train(self, state, action, next_state, reward, not_done, weights):
        self.total_it += 1
        with torch.no_grad():
            noise = (torch.randn_like(action) * self.policy_noise).clamp(
                -self.noise_clip, self.noise_clip
            )
            na = (self.actor_target(next_state) + noise).clamp(-self.max_action, self.max_action)
            tq = torch.min(*[c(torch.cat([next_state, na], 1)) for c in self.critic_target])
            tq = reward + not_done * self.discount * tq
        q1, q2 = [c(torch.cat([state, action], 1)) for c in self.critic]
        td = (q1 - tq).abs().detach()
        closs = (weights * F.smooth_l1_loss(q1, tq, reduction="none")).mean() + (
            weights * F.huber_loss(q2, tq, reduction="none", delta=0.7)
        ).mean()
        self.copt.zero_grad()
        closs.backward()
        self.copt.step()
        aloss = None
        if self.total_it % self.policy_freq == 0:
            aloss = -self.c1(torch.cat([state, self.actor(state)], 1)).mean()
            self.aopt.zero_grad()
            aloss.backward()
            self.aopt.step()
            for m, t in ((self.critic, self.critic_target), (self.actor, self.actor_target)):
                for p, tp in zip(m.parameters(), t.parameters()):
                    tp.data.copy_(self.tau * p.data + (1 - self.tau) * tp.data)
        return closs.item(), None if aloss is None else aloss.item(), td.squeeze(1)


policy = TD3(4, 2)
buffer, prio = deque(maxlen=64), deque(maxlen=64)
s = np.random.randn(4)
closs, aloss = [], []
for t in range(40):
    a = (
        np.random.uniform(-1, 1, 2)
        if t < 16
        else (policy.select(s) + np.random.normal(0, 0.1, 2)).clip(-1, 1)
    )
    ns = 0.9 * s + 0.1 * np.random.randn(4)
    ns[:2] += 0.1 * a
    buffer.append(Transition(s, a, ns, -float((ns**2).sum()), float(random.random() > 0.1)))
    prio.append(max(prio, default=1.0))
    s = ns
    if t >= 16 and t % 3 == 0:
        p = np.array(prio) ** 0.6
        p /= p.sum()
        idx = np.random.choice(len(buffer), 8, p=p)
        w = (len(buffer) * p[idx]) ** -0.4
        w /= w.max()
        b = Transition(*zip(*[buffer[i] for i in idx]))
        f = lambda x: torch.FloatTensor(np.array(x)).reshape(8, -1)
        c, al, td = policy.train(
            f(b.state), f(b.action), f(b.next_state), f(b.reward), f(b.not_done), f(w)
        )
        for i, v in zip(idx, td):
            prio[i] = v.item() + 1e-3
        closs.append(c)
        if al is not None:
            aloss.append(al)
