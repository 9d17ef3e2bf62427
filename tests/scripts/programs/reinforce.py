"""Policy gradients on a toy walk: lists of rewards and log-probabilities filled between updates.

again: dim
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

import treadle

torch.manual_seed(543)
eps = 1e-8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(3, 12), nn.Linear(12, 2)
        self.rewards, self.states, self.actions = [], [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)


def select_action(state):
    with torch.no_grad():
        action = Categorical(policy(state[None])).sample()
    policy.states.append(state)
    policy.actions.append(action)
    return action.item()


def finish(states, actions, returns):
    returns = (returns - returns.mean()) / (returns.std() + eps)
    log_probs = Categorical(policy(states)).log_prob(actions)
    policy_loss = (-log_probs * returns).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
    return policy_loss.detach()


finish = treadle.compile(finish, model=policy, optimizer=optimizer)
running_reward, losses = 10, []
for i_episode in range(4):
    state, ep_reward = torch.tensor([0.1, 0.2, float(i_episode % 2)]), 0
    for t in range(6 if i_episode < 2 else 8):
        action = select_action(state)
        state = state + (0.1 if action else -0.1)
        reward = float(state[0] > 0)
        policy.rewards.append(reward)
        ep_reward += reward
    running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.9 * R
        returns.insert(0, R)
    losses.append(
        finish(torch.stack(policy.states), torch.cat(policy.actions), torch.tensor(returns)).item()
    )
    del policy.rewards[:], policy.states[:], policy.actions[:]
