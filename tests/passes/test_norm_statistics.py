"""What norms of images give, computed from the statistics that they keep."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from sized_models import autocast_training
from testing import check_pass, trace
from treadle.compiler import cleaning
from treadle.graph.analysis.execute import run_step
from treadle.passes.convolutions.channels_last import ConvolveChannelsLast
from treadle.passes.convolutions.statistics import NormaliseFromStatistics

aten = torch.ops.aten
PASS = NormaliseFromStatistics(everywhere=True)


def test_a_group_norm_is_its_statistics_and_a_formula():
    check_pass(
        PASS,
        lambda x, w, b: F.silu(aten.native_group_norm(x, w, b, 2, 6, 12, 3, 1e-5)[0]),
        (torch.randn(2, 6, 3, 4), torch.randn(6), torch.randn(6)),
        after="""
            x: f32[2, 6, 3, 4]
            w: f32[6]
            b: f32[6]
            native_group_norm: (f32[2, 6, 3, 4], f32[2, 3], f32[2, 3]) = native_group_norm(x, w, b, 2, 6, 12, 3, 1e-05)
            getitem: f32[2, 3] = native_group_norm[1]
            unsqueeze: f32[2, 3, 1] = unsqueeze(getitem, 2)
            expand: f32[2, 3, 2] = expand(unsqueeze, [2, 3, 2])
            clone: f32[2, 3, 2] = clone(expand, memory_format=torch.contiguous_format)
            view: f32[2, 6, 1, 1] = view(clone, [2, 6, 1, 1])
            getitem.1: f32[2, 3] = native_group_norm[2]
            unsqueeze.1: f32[2, 3, 1] = unsqueeze(getitem.1, 2)
            expand.1: f32[2, 3, 2] = expand(unsqueeze.1, [2, 3, 2])
            clone.1: f32[2, 3, 2] = clone(expand.1, memory_format=torch.contiguous_format)
            view.1: f32[2, 6, 1, 1] = view(clone.1, [2, 6, 1, 1])
            sub: f32[2, 6, 3, 4] = sub.Tensor(x, view)
            mul: f32[2, 6, 3, 4] = mul.Tensor(sub, view.1)
            view.2: f32[6, 1, 1] = view(w, [6, 1, 1])
            mul.1: f32[2, 6, 3, 4] = mul.Tensor(mul, view.2)
            view.3: f32[6, 1, 1] = view(b, [6, 1, 1])
            add: f32[2, 6, 3, 4] = add.Tensor(mul.1, view.3)
            getitem.2: f32[2, 3] = native_group_norm[1]
            getitem.3: f32[2, 3] = native_group_norm[2]
            silu: f32[2, 6, 3, 4] = silu(add)
            return [silu]
        """,  # noqa: E501
        exact=False,
    )


def training(norm):
    """A norm's result and gradients."""

    def program(x, w, b):
        leaves = [each.detach().requires_grad_() for each in (x, w, b)]
        y = norm(*leaves)
        return y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)

    return program


NORMS = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch with statistics": lambda x, w, b: aten._native_batch_norm_legit_functional(
        x, w, b, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), True, 0.1, 1e-5
    )[0],
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
}


@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (1, 2, 1, 3), (2, 6, 1, 1)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_numbers_are_those_of_eager(name, shape):
    if name == "instance" and shape[2:] == (1, 1):
        pytest.skip("by design: PyTorch refuses to normalise one element")
    torch.manual_seed(0)
    inputs = torch.randn(shape) + 3, torch.randn(shape[1]), torch.randn(shape[1])
    step = trace(training(NORMS[name]), *inputs)
    assert PASS.run(step) == 1
    assert PASS.run(step) == 0, "once is enough"
    for new, old in zip(run_step(step, inputs), training(NORMS[name])(*inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: F.batch_norm(x, x.mean((0, 2, 3)), x.var((0, 2, 3)), training=False),
        lambda x: F.group_norm(x.double(), 2),
        lambda x: F.batch_norm(x[:, :, 0, 0], None, None, training=True),
    ],
    ids=["rows", "evaluation", "float64", "no plane"],
)
def test_other_norms_are_left_alone(program):
    assert PASS.run(trace(program, torch.randn(3, 4, 5, 7))) == 0


def test_statistics_that_alone_are_read_stay():
    step = trace(lambda x: aten.native_group_norm(x, None, None, 2, 6, 12, 3, 1e-5)[1],
                 torch.randn(2, 6, 3, 4))  # fmt: skip
    assert PASS.run(step) == 0


class Net(nn.Module):
    """A block of a network that removes noise: group norms between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm, self.inner = nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)

    def forward(self, x):
        y = self.first(F.silu(self.norm(x)))
        return x + self.last(F.silu(self.inner(y)))


@pytest.mark.parametrize("memory", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_train_as_in_eager(dtype, memory, monkeypatch, tmp_path):
    """Channels-last, where the statistics of groups are those of their channels."""
    everywhere = PASS, ConvolveChannelsLast(everywhere=True)
    kinds = {type(each): each for each in everywhere}
    monkeypatch.setattr(cleaning, "FUSE", tuple(kinds.get(type(e), e) for e in cleaning.FUSE))
    torch.manual_seed(0)
    model = nn.Sequential(Net(), Net())
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin))
    train = autocast_training(model, optimizer, F.mse_loss, dtype)
    eager = autocast_training(twin, other, F.mse_loss, dtype)
    options = treadle.Options(memory=memory, cache_dir=tmp_path)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    near = 1e-4 if dtype is torch.float32 else 2e-2
    for rows in (4, 4, 3, 1, 7):
        x = 2 + torch.randn(rows, 8, 6, 5)
        torch.testing.assert_close(step(x, x.tanh()), eager(x, x.tanh()), rtol=near, atol=near)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
