"""Gradient accumulation as in many scripts: a flag of the loop decides whether the optimizer steps.

again: True
again: .grad
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(30)
accum_iter = 2
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def forward_backward(x, y, update):
    loss = F.cross_entropy(model(x), y) / accum_iter
    loss.backward()
    if update:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


forward_backward = treadle.compile(forward_backward, model=model, optimizer=optimizer)
total = 0.0
for data_iter_step in range(8):
    x, y = torch.randn(6, 8), torch.randint(3, (6,))
    update_grad = (data_iter_step + 1) % accum_iter == 0
    loss = forward_backward(x, y, update_grad)
    total += loss.item() * accum_iter
print("mean", total / 8)
