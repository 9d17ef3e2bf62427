"""Node classification on one graph by message passing with index_add_, masks for the splits."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(21)
N, E, C = 30, 90, 3
edge_index = torch.randint(N, (2, E))
edge_index = torch.cat([edge_index, torch.arange(N).repeat(2, 1)], dim=1)
x, y = torch.randn(N, 7), torch.randint(C, (N,))
train_mask = torch.zeros(N, dtype=torch.bool)
train_mask[torch.randperm(N)[:18]] = True


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        row, col = edge_index
        deg = torch.zeros(x.size(0)).scatter_add_(0, col, torch.ones(col.size(0)))
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        h = self.lin(x)
        out = torch.zeros_like(h).index_add_(0, col, norm.unsqueeze(1) * h[row])
        return out + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(7, 16), GCNConv(16, C)

    def forward(self, x, edge_index):
        h = F.dropout(F.relu(self.conv1(x, edge_index)), p=0.5, training=self.training)
        return F.log_softmax(self.conv2(h, edge_index), dim=1)


model = GCN()
optimizer = torch.optim.Adam(
    [
        dict(params=model.conv1.parameters(), weight_decay=5e-4),
        dict(params=model.conv2.parameters(), weight_decay=0),
    ],
    lr=0.01,
)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index)
    loss = F.nll_loss(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def test():
    model.eval()
    pred = model(x, edge_index).argmax(dim=-1)
    return [float((pred[m] == y[m]).float().mean()) for m in (train_mask, ~train_mask)]


train = treadle.compile(train, model=model, optimizer=optimizer)
best_val_acc = test_acc = 0
for epoch in range(1, 7):
    loss = float(train())
    train_acc, val_acc = test()
    if val_acc > best_val_acc:
        best_val_acc, test_acc = val_acc, train_acc
    print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Val: {val_acc:.4f}")
