"""Metric learning with the hardest triplets of each batch; the fraction of active ones is logged."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(24)
config = {"margin": 0.3, "lr": 3e-4, "log_dir": "runs/triplet", "P": 4, "K": 3}


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x):
        return nn.functional.normalize(self.net(x))


def batch_hard_triplet_loss(labels, embeddings, margin):
    dist = torch.cdist(embeddings, embeddings)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    not_self = ~torch.eye(len(labels), dtype=torch.bool)
    hardest_positive = (dist * (same & not_self)).max(1)[0]
    hardest_negative = (dist + dist.max().detach() * same).min(1)[0]
    losses = torch.relu(hardest_positive - hardest_negative + margin)
    return losses.mean(), (losses > 1e-16).float().mean()


model = Embedder()
optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])


def train_step(x, labels):
    model.train()
    loss, fraction = batch_hard_triplet_loss(labels, model(x), config["margin"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "active": fraction}


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
meters = {}
for it in range(5):
    labels = torch.arange(config["P"]).repeat_interleave(config["K"])
    out = train_step(torch.randn(len(labels), 10) + labels[:, None], labels)
    for key, value in out.items():
        meters.setdefault(key, []).append(value.item())
