import pytest
import torch

from testing import check_pass, trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import tensor_of
from treadle.passes.convolutions.depthwise import ConvolveDepthwiseGradient

aten = torch.ops.aten
PASS = ConvolveDepthwiseGradient(everywhere=True)


def derivative(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=8, mask=(True, True, False)):
    """The derivative of a convolution as a program; results without a gradient are left out."""

    def program(grad, x, w):
        made = aten.convolution_backward(
            grad, x, w, [8], stride, padding, dilation, False, [0, 0], groups, mask
        )
        return [each for each in made if each is not None]

    return program


def tensors(size=3, channels=8, rows=5, columns=7, padding=1, batch=2, dtype=torch.bfloat16):
    """The gradient, the image and the filters of a depthwise convolution of one step."""
    x = torch.randn(batch, channels, rows, columns)
    w = torch.randn(channels, 1, size, size) / size
    shape = [n + 2 * padding - size + 1 for n in (rows, columns)]
    return tuple(each.to(dtype) for each in (torch.randn(batch, channels, *shape), x, w))


def laid(inputs, formats):
    kinds = {"l": torch.channels_last, "c": torch.contiguous_format}
    grad, x, w = inputs
    return (
        grad.to(memory_format=kinds[formats[0]]),
        x.to(memory_format=kinds[formats[1]]),
        w,
    )


def test_it_becomes_a_convolution_with_flipped_filters():
    check_pass(
        PASS,
        derivative(padding=(0, 0)),
        tensors(padding=0),
        after="""
            grad: bf16[2, 8, 3, 5]
            x: bf16[2, 8, 5, 7]
            w: bf16[8, 1, 3, 3]
            flip: bf16[8, 1, 3, 3] = flip(w, [2, 3])
            convolution: bf16[2, 8, 5, 7] = convolution(grad, flip, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 8)
            convolution_backward: (NoneType, bf16[8, 1, 3, 3], NoneType) = convolution_backward(grad, x, w, [8], [1, 1], [0, 0], [1, 1], False, [0, 0], 8, [False, True, False])
            getitem: bf16[8, 1, 3, 3] = convolution_backward[1]
            return [convolution, getitem]
        """,  # noqa: E501
        exact=False,
    )


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("formats", ["cc", "cl", "lc", "ll"])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (True, False, True)])
def test_results_and_their_strides_are_the_same(size, formats, mask):
    padding = size // 2
    inputs = laid(tensors(size, padding=padding), formats)
    program = derivative(padding=(padding, padding), mask=mask)
    before, step = trace(program, *inputs), trace(program, *inputs)
    assert PASS.run(step) == 1
    assert PASS.run(step) == 0
    inside = step.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert len(inside) == any(mask[1:])
    results = [each.graph.output_node().args[0] for each in (step, before)]
    assert len(results[0]) == sum(mask)
    for new, old in zip(*results, strict=True):
        assert tensor_of(new).stride() == tensor_of(old).stride()
    wide = [each.double() for each in inputs]
    for ours, exact in zip(run_step(step, inputs), program(*wide), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_paddings_and_small_images(rows, padding):
    if rows + 2 * padding < 3:
        return
    inputs = tensors(rows=rows, padding=padding, batch=1)
    step = trace(derivative(padding=(padding, padding)), *inputs)
    assert PASS.run(step) == 1
    exact = derivative(padding=(padding, padding))(*[each.double() for each in inputs])
    torch.testing.assert_close(run_step(step, inputs)[0].double(), exact[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({"mask": (False, True, False)}, {}),
        ({}, {"dtype": torch.float32}),
        ({}, {"dtype": torch.float16}),
        ({"padding": (3, 3)}, {"padding": 3}),
        ({"padding": (4, 4)}, {"size": 9, "padding": 4, "rows": 9, "columns": 9}),
    ],
    ids=[
        "not asked for",
        "float32",
        "small filters in float16",
        "padding past the filter",
        "large",
    ],
)
def test_other_derivatives_are_left_alone(changes, shapes):
    assert PASS.run(trace(derivative(**changes), *tensors(**shapes))) == 0


def test_strides_and_groups_are_left_alone():
    grad, x, w = tensors()
    strided = trace(derivative(stride=(2, 2)), grad[:, :, ::2, ::2].contiguous(), x, w)
    assert PASS.run(strided) == 0
    spread = trace(derivative(groups=4), grad, x, w.expand(8, 2, 3, 3).contiguous())
    assert PASS.run(spread) == 0


def test_cpus_have_their_own_derivative():
    assert ConvolveDepthwiseGradient().run(trace(derivative(), *tensors())) == 0
