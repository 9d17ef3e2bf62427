"""A step of one layer whose losses functions of its result and of one more argument give."""

import torch
from torch import nn

import treadle
from treadle.options import Options


def in_fours(names):
    """Names of functions that one step has together: what compiles it again is one of them."""
    names = list(names)
    return [tuple(names[at : at + 4]) for at in range(0, len(names), 4)]


def pair(*bodies):
    """The step compiled, and an eager one from the same parameters; each of ``bodies`` is called
    with ``(h, n)`` and is a loss of its own among the results."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, n):
            optimizer.zero_grad()
            h = model(x)
            losses = torch.stack([body(h, n).square().mean() for body in bodies])
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        return step, model, optimizer

    step, model, optimizer = make()
    options = Options(codegen=False)
    ours = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    return ours, make()[0]
