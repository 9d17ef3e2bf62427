"""A mixture of experts with top-k routing: each expert gets the rows that chose it."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(26)


class MoE(nn.Module):
    def __init__(self, dim, num_experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(num_experts)
        )

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        router_logits = self.gate(x)
        weights = F.softmax(router_logits, dim=1)
        weights, selected = torch.topk(weights, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, self.num_experts).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[i])
            current = expert(x[None, top_x].reshape(-1, shape[-1])) * weights[top_x, idx, None]
            out.index_add_(0, top_x, current)
        density = mask.float().sum(1).mean(1)
        aux = (density * F.softmax(router_logits, 1).mean(0)).sum() * self.num_experts
        return out.view(shape), aux


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.moe, self.head = nn.Embedding(20, 8), MoE(8, 3, 2), nn.Linear(8, 20)

    def forward(self, ids):
        h = self.emb(ids)
        mixed, aux = self.moe(h)
        return self.head(h + mixed), aux


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(ids, labels):
    logits, aux = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * aux
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), aux.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
losses = []
for step in range(6):
    ids = torch.randint(20, (3, 7))
    loss, aux = train_step(ids, ids.roll(1, 1))
    losses.append((loss.item(), aux.item()))
