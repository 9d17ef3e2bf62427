"""Click rates: embedding bags, a wide part, AUC by hand between epochs, BCE with logits."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(53)
field_dims = [10, 7, 12]


class WideAndDeep(nn.Module):
    def __init__(self, dims, embed=4):
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *dims[:-1]]).cumsum(0), persistent=False)
        self.wide = nn.Embedding(sum(dims), 1)
        self.embedding = nn.Embedding(sum(dims), embed)
        self.tags = nn.EmbeddingBag(9, embed, mode="mean")
        self.mlp = nn.Sequential(
            nn.Linear(embed * (len(dims) + 1), 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(16, 1),
        )

    def forward(self, x, tags):
        x = x + self.offsets.unsqueeze(0)
        deep = torch.cat([self.embedding(x).flatten(1), self.tags(tags)], 1)
        return (self.wide(x).sum(1) + self.mlp(deep)).squeeze(1)


model = WideAndDeep(field_dims)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)


def train_step(fields, tags, target):
    model.zero_grad()
    loss = criterion(model(fields, tags), target.float())
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)


def batch(n):
    fields = torch.stack([torch.randint(d, (n,)) for d in field_dims], 1)
    return fields, torch.randint(9, (n, 3)), torch.randint(2, (n,))


losses = [train_step(*batch(16)).item() for _ in range(5)]
model.eval()
with torch.no_grad():
    fields, tags, target = batch(30)
    scores = model(fields, tags)
    pos, neg = scores[target == 1], scores[target == 0]
    auc = (pos[:, None] > neg[None]).float().mean().item()
