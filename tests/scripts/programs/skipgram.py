"""Word vectors with negative sampling, drawn by NumPy from unigram counts outside of the step."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

rng = np.random.RandomState(19)
torch.manual_seed(19)
corpus = rng.randint(0, 30, 300)
counts = np.bincount(corpus, minlength=30) ** 0.75
probabilities = counts / counts.sum()


class SkipGram(nn.Module):
    def __init__(self, emb_size, emb_dimension):
        super().__init__()
        self.u_embeddings = nn.Embedding(emb_size, emb_dimension)
        self.v_embeddings = nn.Embedding(emb_size, emb_dimension)
        initrange = 1.0 / emb_dimension
        nn.init.uniform_(self.u_embeddings.weight.data, -initrange, initrange)
        nn.init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v)
        score = -F.logsigmoid(torch.clamp(torch.sum(emb_u * emb_v, dim=1), max=10, min=-10))
        neg_score = torch.bmm(self.v_embeddings(neg_v), emb_u.unsqueeze(2)).squeeze(2)
        neg_score = -F.logsigmoid(-torch.clamp(neg_score, max=10, min=-10)).sum(dim=1)
        return torch.mean(score + neg_score)


model = SkipGram(30, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def iterate(pos_u, pos_v, neg_v):
    optimizer.zero_grad()
    loss = model(pos_u, pos_v, neg_v)
    loss.backward()
    optimizer.step()
    return loss.detach()


iterate = treadle.compile(iterate, model=model, optimizer=optimizer)
running_loss = 0.0
for i in range(8):
    at = rng.randint(2, 298, 16)
    loss = iterate(
        torch.from_numpy(corpus[at]),
        torch.from_numpy(corpus[at + rng.choice([-2, -1, 1, 2], 16)]),
        torch.from_numpy(rng.choice(30, (16, 4), p=probabilities)),
    )
    running_loss = running_loss * 0.9 + loss.item() * 0.1
    optimizer.param_groups[0]["lr"] = 0.5 * (1.0 - i / 8)
print("loss:", running_loss)
