"""A classifier of tables as a command-line script: argparse, tqdm, a test pass after each epoch.

again: dim 0: 16 -> 4
again: switched to eval()
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import treadle

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--dir", default="runs")
args = parser.parse_args()

torch.manual_seed(1)
features = torch.randn(52, 8)
labels = (features.sum(1) > 0).long()
train_loader = DataLoader(TensorDataset(features, labels), args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(features[:32], labels[:32]), args.batch_size)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 32)
        self.fc2 = nn.Linear(32, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(x))))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)


def train_step(data, target):
    optimizer.zero_grad()
    output = model(data)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()
    return loss.detach(), (output.argmax(1) == target).sum()


step = treadle.compile(train_step, model=model, optimizer=optimizer)

history = []
for epoch in range(args.epochs):
    model.train()
    running, correct = 0.0, 0
    for data, target in tqdm(train_loader, disable=True, desc=f"epoch {epoch}"):
        loss, hits = step(data, target)
        running += loss.item() * len(data)
        correct += hits.item()
    model.eval()
    with torch.no_grad():
        accuracy = sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader) / 32
    history.append((running / 52, correct / 52, accuracy))
    print(f"epoch {epoch}: loss {running / 52:.4f} accuracy {accuracy:.3f}")
