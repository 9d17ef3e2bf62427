"""What a user's code reads while an operation of PyTorch's runs: it is read by the step."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import treadle

OPTIONS = treadle.Options(codegen=False, progress=False)


class Scales:
    """Its attribute is read inside an operation alone."""

    def __init__(self):
        self.hidden_scale = 2.0


SCALES = Scales()


def packs(x):
    def pack(value):
        return value * SCALES.hidden_scale

    with saved_tensors_hooks(pack, lambda value: value):
        return (x * x).sum()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * SCALES.hidden_scale if func is torch.tanh else result


def function_mode(x):
    with Functions():
        return torch.tanh(x).sum()


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * SCALES.hidden_scale if func is torch.ops.aten.tanh.default else result


def dispatch_mode(x):
    with Operations():
        return torch.tanh(x).sum()


class Number:
    def __index__(self):
        return int(SCALES.hidden_scale)


def number(x):
    return x.repeat(Number(), 1).sum()


@pytest.mark.parametrize("loss_of", [packs, function_mode, dispatch_mode, number])
def test_what_code_within_an_operation_reads_is_compared_at_each_call(loss_of):
    SCALES.hidden_scale = 2.0
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach(), model.weight.grad.clone()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
    x = torch.randn(2, 3)
    for scale in (2.0, 3.0):
        SCALES.hidden_scale = scale
        expected = step(x)
        for ours, eager in zip(compiled(x), expected, strict=True):
            torch.testing.assert_close(ours, eager)
