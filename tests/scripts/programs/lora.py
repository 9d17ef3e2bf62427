"""Low-rank adapters put into a frozen model; only they are trained, saved and loaded again."""

import io
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(27)


class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(r, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A.T @ self.B.T) * self.scaling


model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 4))
for p in model.parameters():
    p.requires_grad = False
for i in (0, 2, 4):
    model[i] = LoRALinear(model[i])
trainable = [p for p in model.parameters() if p.requires_grad]
print(
    "trainable", sum(p.numel() for p in trainable), "of", sum(p.numel() for p in model.parameters())
)
optimizer = torch.optim.AdamW(trainable, lr=1e-2)


def step(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optimizer)
losses = []
for i in range(6):
    losses.append(step(torch.randn(10, 6), torch.randint(4, (10,))).item())
    if i == 2:
        file = io.BytesIO()
        adapters = {k: v for k, v in model.state_dict().items() if k.endswith((".A", ".B"))}
        torch.save({"adapters": adapters, "optimizer": optimizer.state_dict()}, file)
    if i == 4:
        file.seek(0)
        saved = torch.load(file)
        model.load_state_dict(saved["adapters"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
del file
