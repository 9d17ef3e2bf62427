"""A vision transformer with stochastic depth, a lambda schedule and an accuracy per epoch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(45)
WARMUP, TOTAL = 2, 8


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep


class Layer(nn.Module):
    def __init__(self, d, heads, p):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.drop = DropPath(p)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.n2(x)))


class ViT(nn.Module):
    def __init__(self, size=8, patch=4, d=12, depth=1, classes=3):
        super().__init__()
        self.patch = nn.Conv2d(3, d, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, d) * 0.02)
        self.layers = nn.ModuleList([Layer(d, 2, 0.1 * (i + 1)) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: s / WARMUP if s < WARMUP else max(0.0, (TOTAL - s) / (TOTAL - WARMUP))
)


def train_one(x, y):
    logits = model(x)
    loss = F.cross_entropy(logits, y, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach(), (logits.argmax(-1) == y).sum()


train_one = treadle.compile(train_one, model=model, optimizer=optimizer)
for epoch in range(2):
    total, hits = 0.0, 0
    for _ in range(3):
        loss, correct = train_one(torch.rand(6, 3, 8, 8), torch.randint(3, (6,)))
        scheduler.step()
        total += loss.item()
        hits += int(correct)
    print(f"epoch {epoch} loss {total / 3:.4f} acc {hits / 18:.3f}")
