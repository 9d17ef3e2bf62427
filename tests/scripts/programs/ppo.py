"""Proximal policy optimization with minibatches by NumPy's permutations, annealed rate."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

import treadle


@dataclass
class Args:
    learning_rate: float = 2.5e-3
    num_steps: int = 16
    minibatch_size: int = 8
    update_epochs: int = 2
    num_iterations: int = 3
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_adv: bool = True
    clip_vloss: bool = True


args = Args()
np.random.seed(1)
torch.manual_seed(1)


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 3), std=0.01)
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)


def update(mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns, mb_values):
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, mb_actions)
    logratio = newlogprob - mb_logprobs
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    pg_loss1 = -mb_advantages * ratio
    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    newvalue = newvalue.view(-1)
    if args.clip_vloss:
        v_clipped = mb_values + torch.clamp(newvalue - mb_values, -args.clip_coef, args.clip_coef)
        v_max = torch.max((newvalue - mb_returns) ** 2, (v_clipped - mb_returns) ** 2)
        v_loss = 0.5 * v_max.mean()
    else:
        v_loss = 0.5 * ((newvalue - mb_returns) ** 2).mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return v_loss.detach(), pg_loss.detach(), approx_kl, clipfrac


update = treadle.compile(update, model=agent, optimizer=optimizer)
global_step = 0
clipfracs, losses = [], []
for iteration in range(1, args.num_iterations + 1):
    frac = 1.0 - (iteration - 1.0) / args.num_iterations
    optimizer.param_groups[0]["lr"] = frac * args.learning_rate
    obs = torch.randn(args.num_steps, 4)
    with torch.no_grad():
        actions, logprobs, _, values = agent.get_action_and_value(obs)
    rewards = (actions == (obs[:, 0] > 0).long()).float()
    global_step += args.num_steps
    values = values.view(-1)
    advantages, returns = rewards - values, rewards
    b_inds = np.arange(args.num_steps)
    for epoch in range(args.update_epochs):
        np.random.shuffle(b_inds)
        for start in range(0, args.num_steps, args.minibatch_size):
            mb_inds = b_inds[start : start + args.minibatch_size]
            v_loss, pg_loss, approx_kl, clipfrac = update(
                obs[mb_inds],
                actions[mb_inds],
                logprobs[mb_inds],
                advantages[mb_inds],
                returns[mb_inds],
                values[mb_inds],
            )
            clipfracs += [clipfrac.item()]
            losses.append(v_loss.item())
