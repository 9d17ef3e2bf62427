"""Derivatives in forward mode: ``jvp``, ``jacfwd``, ``hessian``, ``linearize``, dual numbers."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import treadle

FIRST = """
import torch, treadle
from torch import nn
from torch.func import jvp

model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

def step(x):
    _, slope = jvp(model, (x,), (torch.ones_like(x),))
    return slope.square().mean()

x = torch.randn(3, 2)
compiled = treadle.compile(step, model=model, strict=True)
found = compiled(x)
torch.testing.assert_close(found, step(x))
"""


def test_the_first_tangent_of_a_process_may_be_in_a_step():
    """PyTorch loads its rules for tangents then, and compiles them with TorchScript."""
    folders = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", FIRST],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DERIVATIVES = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "dual": dual,
    "jacfwd of each": lambda f, x: vmap(jacfwd(f))(x),
    "hessian of each": lambda f, x: vmap(hessian(f))(x),
    "hessian": lambda f, x: hessian(lambda z: f(z).sum())(x[0]),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(f))(x[0]),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(f))(x[0]),
    "jvp of grad": lambda f, x: jvp(grad(lambda z: f(z).sum()), (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_gradients_of_tangents(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))

    def step(x):
        model.zero_grad()
        loss = DERIVATIVES[name](model, x).square().mean()
        loss.backward()
        return loss.detach()

    compiled = treadle.compile(step, model=model)
    for _ in range(2):
        x = torch.randn(3, 2)
        loss = step(x)
        slopes = [p.grad for p in model.parameters()]
        torch.testing.assert_close(compiled(x), loss)
        found = [p.grad for p in model.parameters()]
        torch.testing.assert_close(found, slopes, atol=1e-6, rtol=1e-4)
    assert not compiled.recompiles
