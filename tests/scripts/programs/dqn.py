"""Deep Q-learning on a chain: a replay memory, epsilon by step, soft updates of the target."""

import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn

import treadle

random.seed(15)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward", "done"))
BATCH_SIZE, GAMMA, TAU = 8, 0.9, 0.05
EPS_START, EPS_END, EPS_DECAY = 0.9, 0.05, 20
N = 6


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(N, 16)
        self.layer2 = nn.Linear(16, 2)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = deque([], maxlen=100)
steps_done = 0


def select_action(state):
    global steps_done
    threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > threshold:
        with torch.no_grad():
            return int(policy_net(state[None]).argmax(1))
    return random.randrange(2)


def optimize_model(batch):
    q = policy_net(batch.state).gather(1, batch.action)
    with torch.no_grad():
        best = target_net(batch.next_state).max(1).values
    expected = best * GAMMA * (1 - batch.done) + batch.reward
    loss = nn.SmoothL1Loss()(q, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.detach()


optimize_model = treadle.compile(
    optimize_model, model=[policy_net, target_net], optimizer=optimizer
)
eye = torch.eye(N)
episode_durations, losses = [], []
for i_episode in range(4):
    position = N // 2
    for t in range(8):
        action = select_action(eye[position])
        moved = max(0, min(N - 1, position + (1 if action else -1)))
        done = float(moved == N - 1)
        memory.append(Transition(eye[position], torch.tensor([action]), eye[moved], done, done))
        position = moved
        if len(memory) >= BATCH_SIZE:
            rows = Transition(*zip(*random.sample(memory, BATCH_SIZE)))
            batch = Transition(
                torch.stack(rows.state),
                torch.stack(rows.action),
                torch.stack(rows.next_state),
                torch.tensor(rows.reward),
                torch.tensor(rows.done),
            )
            losses.append(optimize_model(batch).item())
            target, policy = target_net.state_dict(), policy_net.state_dict()
            for key in policy:
                target[key] = policy[key] * TAU + target[key] * (1 - TAU)
            target_net.load_state_dict(target)
        if done:
            break
    episode_durations.append(t + 1)
