"""Word vectors whose embeddings ask for sparse gradients, stepped by SparseAdam."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(20)


class Model(nn.Module):
    def __init__(self, n=25, d=6):
        super().__init__()
        self.u = nn.Embedding(n, d, sparse=True)
        self.v = nn.Embedding(n, d, sparse=True)

    def forward(self, centre, context, negative):
        u = self.u(centre)
        good = F.logsigmoid((u * self.v(context)).sum(1))
        bad = F.logsigmoid(-(self.v(negative) @ u.unsqueeze(2)).squeeze(2)).sum(1)
        return -(good + bad).mean()


model = Model()
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)


def step(centre, context, negative):
    optimizer.zero_grad()
    loss = model(centre, context, negative)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optimizer)
losses = []
for epoch in range(5):
    batch = torch.randint(25, (12,)), torch.randint(25, (12,)), torch.randint(25, (12, 3))
    losses.append(step(*batch).item())
