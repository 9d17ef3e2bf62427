"""Sequences that grow with the epochs: each new length is one more compile, with its reason.

again: dim 1: 3 -> 4
again: dim 1: 4 -> 5
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(43)


class Copy(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.gru, self.out = (
            nn.Embedding(9, 12),
            nn.GRU(12, 12, batch_first=True),
            nn.Linear(12, 9),
        )

    def forward(self, x):
        return self.out(self.gru(self.emb(x))[0])


model = Copy()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)


def step(x):
    loss = F.cross_entropy(model(x)[:, 1:].flatten(0, 1), x[:, :-1].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optimizer)
curriculum = {0: 3, 1: 4, 2: 5}
losses = []
for epoch in range(3):
    length = curriculum[epoch]
    for _ in range(3):
        losses.append(step(torch.randint(9, (5, length))).item())
