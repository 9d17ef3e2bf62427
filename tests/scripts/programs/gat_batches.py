"""Graphs of different sizes in one batch, pooled by scatter: each batch has its own edges.

again: dim
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(22)


def scatter_softmax(score, index, n):
    top = torch.full((n,), -1e9).scatter_reduce(0, index, score, "amax")
    e = (score - top[index]).exp()
    total = torch.zeros(n).index_add(0, index, e)
    return e / (total[index] + 1e-9)


class GATLayer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.w, self.att = nn.Linear(a, b), nn.Linear(2 * b, 1)

    def forward(self, x, src, dst):
        h = self.w(x)
        score = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], 1)).squeeze(1), 0.2)
        alpha = scatter_softmax(score, dst, x.shape[0])
        return torch.zeros_like(h).index_add(0, dst, alpha[:, None] * h[src])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gat, self.out = GATLayer(4, 8), nn.Linear(8, 1)

    def forward(self, x, src, dst, graph, n_graphs):
        h = F.elu(self.gat(x, src, dst))
        pooled = torch.zeros(n_graphs, 8).index_add(0, graph, h)
        sizes = torch.bincount(graph, minlength=n_graphs).clamp(min=1)
        return self.out(pooled / sizes[:, None]).squeeze(1)


net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-2)


def step(x, src, dst, graph, target):
    opt.zero_grad()
    loss = F.l1_loss(net(x, src, dst, graph, target.shape[0]), target)
    loss.backward()
    opt.step()
    return loss.detach()


step = treadle.compile(step, model=net, optimizer=opt)
losses = []
for i in range(4):
    nodes, edges = 20 + 5 * (i % 2), 60 + 10 * (i % 2)
    graph = torch.arange(4).repeat_interleave(nodes // 4)
    graph = torch.cat([graph, graph.new_full((nodes - len(graph),), 3)])
    ends = torch.randint(nodes, (2, edges))
    losses.append(step(torch.randn(nodes, 4), *ends, graph, torch.randn(4)).item())
