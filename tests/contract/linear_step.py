"""A step of one layer whose loss a function of its result and of one more argument gives."""

import torch
from torch import nn

import treadle
from treadle.options import Options


def pair(body):
    """The step compiled, and an eager one from the same parameters; ``body(h, n)``."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, n):
            optimizer.zero_grad()
            loss = body(model(x), n).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model, optimizer

    step, model, optimizer = make()
    options = Options(codegen=False)
    ours = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    return ours, make()[0]
