"""Optimizers that people write, on several ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import treadle
from treadle.options import Options


class Momentum(torch.optim.Optimizer):
    """Its own step and state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                state["buffer"].mul_(0.9).add_(p.grad)
                p.add_(state["buffer"], alpha=-group["lr"])


def trained():
    """The largest gap between a compiled run and an eager one, and who stepped outside."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
    twin = DistributedDataParallel(copy.deepcopy(net))
    optimizers = Momentum(net.parameters()), Momentum(twin.parameters())

    def step(model, optimizer, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        lambda x, y: step(net, optimizers[0], x, y),
        model=net,
        optimizer=optimizers[0],
        options=Options(codegen=False),
        parallel=treadle.DataParallel(),
    )
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        x, y = torch.randn(4, 7), torch.randn(4, 5)
        compiled(x, y)
        step(twin, optimizers[1], x, y)
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs), "TR-105" in compiled.explain()


def test_its_own_step_takes_mean_gradients(launch):
    for rank in launch(2, trained):
        gap, outside = rank.value
        assert gap < 1e-6, rank
        assert not outside
