"""``torch._grouped_mm`` in whole steps: PyTorch's values, gradients, strides and refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.graph.custom_ops.grouped import grouped_mm
from treadle.options import from_environment

ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)


def _ends(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


FITTING = {
    "rows and matrices": lambda: (_randn(10, 8), _randn(3, 8, 12), ENDS),
    "matrices of the other order": lambda: (_randn(10, 8), _randn(3, 12, 8).mT, ENDS),
    "a width of rows that are filled up": lambda: (_randn(10, 8), _randn(3, 5, 8).mT, ENDS),
    "half": lambda: (_randn(10, 8, dtype=torch.half), _randn(3, 8, 16, dtype=torch.half), ENDS),
    "columns": lambda: (_randn(3, 8, 12), _randn(12, 12), ENDS[[0, 1, 2]] + _ends(0, 0, 2)),
    "a sum in groups": lambda: (_randn(12, 8).t(), _randn(12, 4), _ends(3, 3, 12)),
    "batches": lambda: (_randn(3, 8, 4), _randn(3, 4, 8), None),
}
UNFIT = {
    "float64": lambda: (_randn(10, 8).double(), _randn(3, 8, 12).double(), ENDS),
    "two dtypes": lambda: (_randn(10, 8), _randn(3, 8, 16).half(), ENDS),
    "another inner size": lambda: (_randn(10, 8), _randn(3, 12, 8), ENDS),
    "another number of groups": lambda: (_randn(10, 8), _randn(2, 8, 12), ENDS),
    "ends as int64": lambda: (_randn(10, 8), _randn(3, 8, 12), ENDS.long()),
    "no ends": lambda: (_randn(10, 8), _randn(3, 8, 12), None),
    "ends of batches": lambda: (_randn(3, 8, 4), _randn(3, 4, 8), ENDS),
    "rows of 20 bytes": lambda: (_randn(10, 8), _randn(3, 8, 5), ENDS),
    "one row": lambda: (_randn(8), _randn(3, 8, 4), ENDS),
    "columns that are not dense": lambda: (_randn(10, 16)[:, ::2], _randn(3, 8, 4), ENDS),
}


def _untouched(value):
    """Of the same type and strides, without numbers."""
    if value is None:
        return None
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@pytest.mark.parametrize("name", FITTING)
def test_the_type_is_that_of_the_result(name):
    given = FITTING[name]()
    made = torch._grouped_mm(*given)
    known = grouped_mm(*map(_untouched, given))
    assert (known.shape, known.stride(), known.dtype) == (made.shape, made.stride(), made.dtype)


@pytest.mark.parametrize("name", UNFIT)
def test_what_the_kernel_refuses_has_no_type(name):
    given = UNFIT[name]()
    with pytest.raises(RuntimeError):
        torch._grouped_mm(*given)
    with pytest.raises(RuntimeError):
        grouped_mm(*map(_untouched, given))


class Experts(nn.Module):
    """Rows go to the expert that a router says, and come back in their order."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.up = nn.Parameter(0.3 * torch.randn(3, width, 8))
        self.down = nn.Parameter(0.3 * torch.randn(3, 8, width))

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 3).sum(0).cumsum(0).to(torch.int32)
        h = F.grouped_mm(x[order], self.up.mT, offs=ends)
        y = F.grouped_mm(F.silu(h), self.down.mT, offs=ends)
        return torch.zeros_like(x).index_copy(0, order, y) * weight[:, None]


@pytest.mark.parametrize("codegen", [False, True])
def test_steps_equal_eager(codegen):
    torch.manual_seed(0)
    ours = Experts(16)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ours, theirs)]

    def make(model, optimizer):
        def step(x):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    options = replace(from_environment(), codegen=codegen)
    step = treadle.compile(
        make(ours, optimizers[0]), model=ours, optimizer=optimizers[0], options=options
    )
    eager = make(theirs, optimizers[1])
    for _ in range(4):
        x = torch.randn(20, 8)
        torch.testing.assert_close(step(x), eager(x))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert not step.recompiles


def test_a_width_that_the_kernel_refuses_is_refused_with_the_line():
    model = Experts(15)

    def step(x):
        return model(x).sum()

    with pytest.raises(RuntimeError):
        step(torch.randn(20, 8))
    with pytest.raises(treadle.CaptureError, match=r"TR-132.*16 bytes"):
        treadle.compile(step, model=model)(torch.randn(20, 8))
