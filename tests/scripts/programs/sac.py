"""Soft actor-critic: three networks, an automatic temperature, targets moved by Polyak's average."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(16)
OBS, ACT, GAMMA, TAU = 5, 2, 0.99, 0.05


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(OBS + ACT, 16), nn.ReLU(), nn.Linear(16, 1))
        self.q2 = nn.Sequential(nn.Linear(OBS + ACT, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, s, a):
        x = torch.cat([s, a], 1)
        return self.q1(x), self.q2(x)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, 16), nn.ReLU())
        self.mean, self.log_std = nn.Linear(16, ACT), nn.Linear(16, ACT)

    def sample(self, s):
        h = self.trunk(s)
        mean, log_std = self.mean(h), self.log_std(h).clamp(-5, 2)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        action = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1, keepdim=True)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


critic, actor, temperature = Critic(), Actor(), Temperature()
critic_target = copy.deepcopy(critic)
critic_optim = torch.optim.Adam(critic.parameters(), lr=1e-3)
policy_optim = torch.optim.Adam(actor.parameters(), lr=1e-3)
alpha_optim = torch.optim.Adam([temperature.log_alpha], lr=1e-3)
target_entropy = -float(ACT)


def update_parameters(state, action, reward, next_state, mask):
    alpha = temperature.log_alpha.exp().detach()
    with torch.no_grad():
        next_action, next_log_pi = actor.sample(next_state)
        q1_next, q2_next = critic_target(next_state, next_action)
        target = reward + mask * GAMMA * (torch.min(q1_next, q2_next) - alpha * next_log_pi)
    q1, q2 = critic(state, action)
    q_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
    critic_optim.zero_grad()
    q_loss.backward()
    critic_optim.step()

    pi, log_pi = actor.sample(state)
    policy_loss = (alpha * log_pi - torch.min(*critic(state, pi))).mean()
    policy_optim.zero_grad()
    policy_loss.backward()
    policy_optim.step()

    alpha_loss = -(temperature.log_alpha * (log_pi + target_entropy).detach()).mean()
    alpha_optim.zero_grad()
    alpha_loss.backward()
    alpha_optim.step()
    with torch.no_grad():
        for target_param, param in zip(critic_target.parameters(), critic.parameters()):
            target_param.data.copy_(target_param.data * (1.0 - TAU) + param.data * TAU)
    return q_loss.detach(), policy_loss.detach(), alpha_loss.detach()


update_parameters = treadle.compile(
    update_parameters,
    model=[critic, critic_target, actor, temperature],
    optimizer=[critic_optim, policy_optim, alpha_optim],
)
updates, log = 0, []
for total_numsteps in range(5):
    s, a = torch.randn(8, OBS), torch.rand(8, ACT) * 2 - 1
    losses = update_parameters(s, a, torch.randn(8, 1), torch.randn(8, OBS), torch.ones(8, 1))
    log.append([x.item() for x in losses])
    updates += 1
