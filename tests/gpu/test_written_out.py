"""Products written as multiplications and sums, on a GPU where PyTorch may round factors."""

import copy

import pytest
import torch
from torch import nn

import treadle

DEVICE = "cuda"


@pytest.fixture(params=["highest", "high"])
def precision(request):
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


class Scores(nn.Module):
    """Attention without softmax, rows between batch and heads."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 64))

    def forward(self, x):
        q, k, v = (x[:, :, None] * each for each in self.weights)
        scores = (q[:, :, None] * k[:, None]).sum(-1).tanh()
        return (scores[..., None] * v[:, None]).sum(2)


@pytest.mark.parametrize("autocast", [False, True])
def test_all_digits_are_multiplied(precision, autocast):
    torch.manual_seed(0)
    model = Scores().to(DEVICE)
    exact = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x):
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        y.square().mean().backward()
        optimizer.step()
        grads = [each.grad for each in model.parameters()]
        optimizer.zero_grad()
        return y.detach(), grads

    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    for _ in range(4):  # recorded from the third call on
        x = torch.randn(2, 256, 64, device=DEVICE)
        exact.load_state_dict(model.state_dict())
        y, (grad,) = compiled(x)
        expected = exact(x.double())
        expected.square().mean().backward()
        wanted, exact.weights.grad = exact.weights.grad, None
        assert (y.double() - expected).abs().max() < 2e-5 * expected.abs().max()
        assert (grad.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert torch.get_float32_matmul_precision() == precision
    name = "full_bmm(" if precision == "high" else "= bmm("
    assert compiled.graph("clean").count(name) == 6
