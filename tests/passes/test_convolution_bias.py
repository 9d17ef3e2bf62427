import pytest
import torch
from torch.nn import functional as F

from testing import check_pass, trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import tensor_of
from treadle.passes.convolutions.bias import SplitConvolutionBias

aten = torch.ops.aten
PASS = SplitConvolutionBias(everywhere=True)
REST = "[1, 1], [1, 1], [1, 1], False, [0, 0], 1"


def training(convolve, shape):
    """Results and gradients of a convolution, as a program of the image, the filters and a bias."""

    def program(x, w, b):
        leaves = [each.detach().requires_grad_() for each in (x, w, b)]
        y = convolve(*leaves).relu()
        return y, *torch.autograd.grad(y.square().mean(), leaves)

    inputs = [torch.randn(each) for each in shape]
    return program, inputs


def test_a_bias_is_added_behind_the_convolution():
    def program(x, w, b):
        return aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu()

    check_pass(
        PASS,
        program,
        (torch.randn(2, 3, 5, 7), torch.randn(4, 3, 3, 3), torch.randn(4)),
        after=f"""
            x: f32[2, 3, 5, 7]
            w: f32[4, 3, 3, 3]
            b: f32[4]
            convolution: f32[2, 4, 5, 7] = convolution(x, w, None, {REST})
            view: f32[4, 1, 1] = view(b, [4, 1, 1])
            add: f32[2, 4, 5, 7] = add.Tensor(convolution, view)
            relu: f32[2, 4, 5, 7] = relu(add)
            return [relu]
        """,
        exact=False,
    )


def test_its_gradient_is_a_sum():
    def program(g, x, w):
        return aten.convolution_backward(
            g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, False, True]
        )[2]

    check_pass(
        PASS,
        program,
        (torch.randn(2, 4, 5, 7), torch.randn(2, 3, 5, 7), torch.randn(4, 3, 3, 3)),
        after="""
            g: f32[2, 4, 5, 7]
            x: f32[2, 3, 5, 7]
            w: f32[4, 3, 3, 3]
            sum: f32[4] = sum.dim_IntList(g, [0, 2, 3])
            return [sum]
        """,
        exact=False,
    )


@pytest.mark.parametrize(
    ("convolve", "shapes"),
    [
        (F.conv1d, ((2, 3, 9), (4, 3, 3), (4,))),
        (F.conv2d, ((1, 3, 1, 1), (4, 3, 1, 1), (4,))),
        (lambda *a: F.conv2d(*a, groups=2), ((0, 4, 5, 7), (6, 2, 3, 3), (6,))),
        (F.conv3d, ((2, 3, 4, 5, 3), (5, 3, 2, 2, 2), (5,))),
        (lambda *a: F.conv_transpose2d(*a, stride=2), ((2, 3, 4, 5), (3, 6, 2, 2), (6,))),
    ],
    ids=["1d", "one pixel", "groups, no images", "3d", "transposed"],
)
@pytest.mark.parametrize("last", [False, True])
def test_results_and_their_strides_are_the_same(convolve, shapes, last):
    program, inputs = training(convolve, shapes)
    if last and inputs[0].dim() == 4:
        inputs = [each.to(memory_format=torch.channels_last) for each in inputs[:2]] + inputs[2:]
    before, step = trace(program, *inputs), trace(program, *inputs)
    assert PASS.run(step) == 2
    assert PASS.run(step) == 0
    results = [each.graph.output_node().args[0] for each in (step, before)]
    for new, old in zip(*results, strict=True):
        assert tensor_of(new).stride() == tensor_of(old).stride()
    exact = program(*[each.double() for each in inputs])
    for ours, wide in zip(run_step(step, inputs), exact, strict=True):
        torch.testing.assert_close(ours.double(), wide, rtol=1e-5, atol=1e-6)


def test_without_a_bias_nothing_changes():
    program, inputs = training(
        lambda x, w, b: F.conv2d(x, w) * b.sum(), ((2, 3, 5, 7), (4, 3, 3, 3), (4,))
    )
    assert PASS.run(trace(program, *inputs)) == 0


def test_cpus_add_biases_inside():
    program, inputs = training(F.conv2d, ((2, 3, 5, 7), (4, 3, 3, 3), (4,)))
    assert SplitConvolutionBias().run(trace(program, *inputs)) == 0
