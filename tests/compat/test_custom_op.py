"""Records of operators of ours: what PyTorch is told, and that nothing is missing."""

from math import prod

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import treadle  # noqa: F401  # with the kernels that runtime has
from treadle.compat.operators.custom_op import CustomOp, Gradient, implement, no_second_derivative
from treadle.graph.custom_ops.table import CUSTOM_OPS
from treadle.util.errors import CaptureError

OWN = "treadle_record_tests"
NO_MORE = no_second_derivative("scaled", "scale once")


def keep(ctx, inputs, output):
    ctx.rest = inputs[1:]


def scaled_gradient(ctx, grad):
    return BACKWARD.op(grad, *ctx.rest), None


SCALED = CustomOp(
    "scaled(Tensor x, float by) -> Tensor",
    fake=lambda x: x.new_empty(x.shape),
    kernel=lambda x, by: x * by,
    gradient=Gradient(keep, scaled_gradient),
    flops=lambda x: prod(x),
    holds=lambda by, x: int(by) * prod(x.shape),
    namespace=OWN,
)
BACKWARD = CustomOp(
    "scaled_backward(Tensor grad, float by) -> Tensor",
    fake=lambda grad: grad.new_empty(grad.shape),
    gradient=NO_MORE,
    namespace=OWN,
)
implement("scaled_backward", lambda grad, by: grad * by, OWN)
X = torch.randn(3, 4)


def test_a_record_is_an_operator():
    x = X.clone().requires_grad_()
    y = SCALED.op(x, 2.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x * 2.5)
    assert torch.equal(gradient, torch.full_like(x, 2.5))


def test_functions_are_given_the_arguments_that_they_name():
    with FakeTensorMode() as mode:
        assert SCALED.op(mode.from_tensor(X), 2.0).shape == X.shape
    with FlopCounterMode(display=False) as counter:
        SCALED.op(X, 2.0)
    assert counter.get_total_flops() == 12
    assert SCALED.bytes_held([X, 3.0]) == 36


def test_a_name_that_the_schema_has_not_is_an_error():
    with pytest.raises(AssertionError, match="has not all of"):
        CustomOp("misnamed(Tensor x) -> Tensor", fake=lambda y: y, namespace=OWN)


def test_a_second_derivative_is_refused():
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(SCALED.op(x, 2.0).square().sum(), x, create_graph=True)
    with pytest.raises(
        CaptureError, match="the gradient of scaled is differentiated again"
    ) as caught:
        gradient.sum().backward()
    assert (caught.value.code, caught.value.remedy) == ("TR-140", "scale once")


@pytest.mark.parametrize("record", CUSTOM_OPS, ids=lambda each: each.op.name())
def test_what_stands_in_a_graph_has_its_kernel_and_its_types(record):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = record.op.name()
    assert has(name, "CompositeExplicitAutograd")
    assert record.fake is not None
