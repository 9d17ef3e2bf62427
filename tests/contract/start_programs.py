"""Scripts for two processes: each trains a few steps and tells what it found."""

HEAD = """
import sys
from pathlib import Path

import torch
from torch import nn

import treadle

sys.path.insert(0, str(Path(__file__).parent))
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
"""
TAIL = """
losses = [float(step(*batch)) for _ in range(3)]
print("losses", *(each.hex() for each in losses))
print("untraced", step.compiled.untraced)
print("start", step.compiled.start.words)
print("recompiles", step.recompiles)
"""
MODEL = """
class Net(nn.Module):
    scale = 1.5

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.slope = 0.5

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.leaky_relu(layer(x), self.slope) * self.scale + x
        return self.drop(self.norm(x))

FACTOR = 2.0
options = {"weight": 3.0}

def penalty(model):
    return sum(p.square().sum() for p in model.parameters()) * 1e-4

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x) * FACTOR, y) * options["weight"] + penalty(model)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()

batch = torch.randn(16, 8), torch.randn(16, 8)
"""
COMPILED = "step = treadle.compile(train, model=model, optimizer=optimizer)\n"
