import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import treadle
from sized_models import Images, autocast_training
from testing import check_pass, trace
from treadle.compiler import cleaning
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.convolutions.channels_last import ConvolveChannelsLast

aten = torch.ops.aten
PASS = ConvolveChannelsLast(everywhere=True)
REST = "None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1"
"""How ``convolved`` prints: no bias, stride, padding, dilation."""


def halves(*shape):
    return torch.randn(*shape).bfloat16()


def convolved(x, w, groups=1):
    return aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)


def test_what_lies_between_convolutions_stays_channels_last():
    def program(x, v, w):
        return (convolved(convolved(x, v).relu(), w) + 1).flatten(1)

    check_pass(
        PASS,
        program,
        (halves(2, 16, 5, 7), halves(8, 16, 3, 3), halves(8, 8, 3, 3)),
        after=f"""
            x: bf16[2, 16, 5, 7]
            v: bf16[8, 16, 3, 3]
            w: bf16[8, 8, 3, 3]
            clone: bf16[2, 16, 5, 7] = clone(x, memory_format=torch.channels_last)
            clone.1: bf16[8, 16, 3, 3] = clone(v, memory_format=torch.channels_last)
            convolution: bf16[2, 8, 5, 7] = convolution(clone, clone.1, {REST})
            relu: bf16[2, 8, 5, 7] = relu(convolution)
            clone.2: bf16[8, 8, 3, 3] = clone(w, memory_format=torch.channels_last)
            convolution.1: bf16[2, 8, 5, 7] = convolution(relu, clone.2, {REST})
            add: bf16[2, 8, 5, 7] = add.Tensor(convolution.1, 1)
            clone.3: bf16[2, 8, 5, 7] = clone(add, memory_format=torch.contiguous_format)
            view: bf16[2, 280] = view(clone.3, [2, 280])
            return [view]
        """,
        exact=False,
    )


def test_gradients_of_weights_lie_as_weights_do():
    def program(x, w, grad):
        y = convolved(x, w).relu()
        grads = aten.convolution_backward(
            grad * y, x, w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        return y, *grads

    inputs = halves(2, 16, 5, 7), halves(8, 16, 3, 3), halves(2, 8, 5, 7)
    step = changed(program, inputs)
    assert [tensor_of(each).is_contiguous() for each in results(step)] == [True] * 4
    inside = [n for n in step.graph.nodes if n.target is aten.convolution_backward.default]
    assert last_operands(inside[0]) == 3


@pytest.mark.parametrize(
    ("shape", "weight", "groups", "dtype"),
    [
        ((2, 16, 5, 7), (16, 4, 3, 3), 4, torch.bfloat16),
        ((2, 16, 11, 9), (16, 1, 9, 9), 16, torch.bfloat16),
        ((2, 12, 5, 7), (12, 1, 3, 3), 12, torch.bfloat16),
        ((2, 16, 5, 7), (8, 16, 3, 3), 1, torch.float32),
        ((2, 16, 5, 7), (7, 16, 3, 3), 1, torch.bfloat16),
        ((2, 12, 5, 7), (8, 12, 3, 3), 1, torch.bfloat16),
    ],
    ids=[
        "groups",
        "large filters",
        "twelve of depth",
        "float32",
        "seven results",
        "twelve channels",
    ],
)
def test_other_convolutions_are_left_alone(shape, weight, groups, dtype):
    inputs = torch.randn(shape).to(dtype), torch.randn(weight).to(dtype)
    step = trace(lambda x, w: convolved(x, w, groups).relu(), *inputs)
    assert PASS.run(step) == 0


def test_depthwise_convolutions_are_channels_last_too():
    def program(x, v, w):
        return (convolved(convolved(x, v, 16).relu(), w),)

    inputs = halves(2, 16, 5, 7), halves(16, 1, 3, 3), halves(8, 16, 3, 3)
    step = changed(program, inputs)
    inside = [n for n in step.graph.nodes if n.target is aten.convolution.default]
    assert [last_operands(each) for each in inside] == [2, 2]


def test_cpus_convolve_what_they_are_given():
    inputs = halves(2, 16, 5, 7), halves(16, 16, 3, 3)
    step = trace(lambda x, w: convolved(convolved(x, w).relu(), w), *inputs)
    assert ConvolveChannelsLast().run(step) == 0


def test_a_users_own_channels_last_model_is_left_alone():
    inputs = halves(2, 16, 5, 7), halves(16, 16, 3, 3)
    last = [each.to(memory_format=torch.channels_last) for each in inputs]
    step = trace(lambda x, w: convolved(convolved(x, w).relu(), w), *last)
    assert PASS.run(step) == 0


def test_copies_that_no_convolution_pays_for_are_not_made():
    step = trace(lambda x, w: convolved(x, w).flatten(2), halves(1, 8, 9, 9), halves(8, 8, 3, 3))
    assert PASS.run(step) == 0


def norm(x):
    scale, start = torch.ones(x.shape[1]), torch.zeros(x.shape[1])
    return aten._native_batch_norm_legit_functional(
        x, scale, start, start + 0.5, scale * 2, True, 0.1, 1e-5
    )[0]


def padded(x):
    return F.pad(x, (0, 1))[..., :-1]


def turned(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


OPERATIONS = {
    "relu": torch.relu,
    "norm": norm,
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "average": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "flat": lambda x: x.flatten(1).sin().view_as(x),
    "narrow": lambda x: torch.cat([x[:, :3], x[:, 3:]], 1),
    "sum": lambda x: x * x.sum((2, 3), keepdim=True).tanh(),  # six of these must not overflow
    "softmax": lambda x: x.softmax(1),
    "padded": padded,
    "turned": turned,
    "moved": lambda x: x.permute(0, 2, 3, 1).mul(2).permute(0, 3, 1, 2),
    "float": lambda x: x.float().tanh().bfloat16(),
}


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=6),
    at=st.integers(0, 6),
    size=st.sampled_from([(1, 1), (5, 7), (4, 1)]),
)
def test_results_and_their_strides_are_the_same(names, at, size):
    """Of chains of any operations, with a second branch that is added."""

    def program(x, w, v):
        y = convolved(convolved(x, w), v)
        branch = x
        for number, name in enumerate(names):
            y = OPERATIONS[name](y)
            if number == at:
                branch = y
        y = convolved(y, v) + branch
        return y, convolved(y, v).mean((2, 3))

    torch.manual_seed(0)
    inputs = halves(2, 8, *size), halves(8, 8, 3, 3), halves(8, 8, 3, 3) / 8
    before = trace(program, *inputs)
    step = changed(program, inputs)
    for new, old in zip(results(step), results(before), strict=True):
        assert tensor_of(new).stride() == tensor_of(old).stride()


def changed(program, inputs) -> StepGraph:
    """The step after the pass; it computes what eager does, but for sums in another order."""
    step = trace(program, *inputs)
    run_passes(step, [PASS])
    for new, old in zip(run_step(step, inputs), program(*inputs), strict=True):
        near = 0.1 * (1 + float(old.abs().max()))
        torch.testing.assert_close(new, old, rtol=0.1, atol=near)
    return step


def results(step):
    return step.graph.output_node().args[0]


def last_operands(node):
    return sum(
        tensor_of(each).is_contiguous(memory_format=torch.channels_last)
        for each in node.all_input_nodes
    )


@pytest.mark.parametrize("memory", [None, 0.3])
def test_steps_of_any_number_of_images_share_a_compile(memory, monkeypatch, tmp_path):
    fuse = [PASS if isinstance(each, ConvolveChannelsLast) else each for each in cleaning.FUSE]
    monkeypatch.setattr(cleaning, "FUSE", tuple(fuse))
    torch.manual_seed(0)
    model = Images()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin))
    train = autocast_training(model, optimizer, F.cross_entropy, torch.bfloat16)
    eager = autocast_training(twin, other, F.cross_entropy, torch.bfloat16)
    options = treadle.Options(memory=memory, cache_dir=tmp_path)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    for size in (8, 5, 8, 3, 2, 7):
        x, y = torch.randn(size, 3, 16, 16), torch.randint(10, (size,))
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=0.01, atol=0.01)
    (reason,) = step.recompiles
    assert "compiled for x_0 in 2..8" in reason
