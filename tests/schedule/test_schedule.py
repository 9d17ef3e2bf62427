"""Plans of small programs: how many kernels, in which order, in which bytes, with which numbers."""

from dataclasses import replace

import pytest
import torch

from schedule.steps import Builder, at, kernels_of, run_plan
from treadle.loop.expr import ReduceKind
from treadle.loop.interpret import interpret_kernel
from treadle.loop.kernel import Kernel, KernelKind, Store
from treadle.loop.nest import arguments_of, updates
from treadle.loop.program import TensorRef
from treadle.schedule import schedule
from treadle.schedule.arena import Interval, pack
from treadle.schedule.depend import facts
from treadle.schedule.fuse import MAX_BUFFERS

SUM, MAX = ReduceKind.SUM, ReduceKind.MAX


def softmax(b, x, dim=-1):
    e = b.pointwise("exp", b.pointwise("sub", x, b.reduce(MAX, x, [dim], True)))
    return b.pointwise("div", e, b.reduce(SUM, e, [dim], True))


def layer_norm(b, x, w, bias):
    n = x.shape[-1]
    mean = b.pointwise("mul", b.reduce(SUM, x, [-1], True), 1 / n)
    d = b.pointwise("sub", x, mean)
    var = b.pointwise("mul", b.reduce(SUM, b.pointwise("mul", d, d), [-1], True), 1 / n)
    rstd = b.pointwise("rsqrt", b.pointwise("add", var, 1e-5))
    y = b.pointwise("add", b.pointwise("mul", b.pointwise("mul", d, rstd), w), bias)
    return y, mean, rstd


def layer_norm_backward(b, dy, x, w, mean, rstd):
    n = x.shape[-1]
    xhat = b.pointwise("mul", b.pointwise("sub", x, mean), rstd)
    g = b.pointwise("mul", dy, w)
    s1 = b.pointwise("mul", b.reduce(SUM, g, [-1], True), 1 / n)
    s2 = b.pointwise("mul", b.reduce(SUM, b.pointwise("mul", g, xhat), [-1], True), 1 / n)
    inner = b.pointwise("sub", b.pointwise("sub", g, s1), b.pointwise("mul", xhat, s2))
    dx = b.pointwise("mul", rstd, inner)
    dw = b.reduce(SUM, b.pointwise("mul", dy, xhat), [0, 1])
    return dx, dw, b.reduce(SUM, dy, [0, 1])


def layer_norm_backward_numbers(dy, x, w, mean, rstd):
    xhat, g = (x - mean) * rstd, dy * w
    dx = rstd * (g - g.mean(-1, True) - xhat * (g * xhat).mean(-1, True))
    return dx, (dy * xhat).sum((0, 1)), dy.sum((0, 1))


def batch_norm(b, x):
    n = x.shape[0] * x.shape[2] * x.shape[3]
    d = b.pointwise("sub", x, b.pointwise("mul", b.reduce(SUM, x, [0, 2, 3], True), 1 / n))
    var = b.reduce(SUM, b.pointwise("mul", d, d), [0, 2, 3], True)
    scale = b.pointwise("rsqrt", b.pointwise("add", b.pointwise("mul", var, 1 / n), 1e-5))
    return b.pointwise("mul", d, scale)


def adam(b, p, g, m, v):
    m2 = b.pointwise("add", b.pointwise("mul", m, 0.9), b.pointwise("mul", g, 0.1))
    g2 = b.pointwise("mul", b.pointwise("mul", g, g), 0.01)
    v2 = b.pointwise("add", b.pointwise("mul", v, 0.99), g2)
    scale = b.pointwise("add", b.pointwise("sqrt", b.pointwise("abs", v2)), 1e-8)
    b.pointwise("sub", p, b.pointwise("div", m2, scale), into=p)
    b.pointwise("mul", m2, 1.0, into=m)
    b.pointwise("mul", v2, 1.0, into=v)
    return ()


def adam_numbers(p, g, m, v):
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).add_(g * g, alpha=0.01)
    p.sub_(m / (v.abs().sqrt() + 1e-8))
    return ()


def transpose(b, x):
    n, m = x.shape
    return b.compute((m, n), lambda i, j: at(TensorRef(x.buffer, x.dtype, (m, n), (1, m)), i, j))


def branches_meet(b, x, y):
    return b.pointwise("mul", b.pointwise("exp", x), b.pointwise("tanh", y))


CASES = {
    "softmax": (softmax, lambda x: x.softmax(-1), [(3, 5, 37)], 1),
    "softmax of the first dim": (
        lambda b, x: softmax(b, x, 0),
        lambda x: x.softmax(0),
        [(9, 70)],
        1,
    ),
    "layer norm": (
        layer_norm,
        lambda x, w, b: torch.native_layer_norm(x, (x.shape[-1],), w, b, 1e-5),
        [(4, 7, 33), (33,), (33,)],
        1,
    ),
    "layer norm backward": (
        layer_norm_backward,
        layer_norm_backward_numbers,
        [(4, 7, 33), (4, 7, 33), (33,), (4, 7, 1), (4, 7, 1)],
        2,
    ),
    "bias": (
        lambda b, x, w: b.pointwise("tanh", b.pointwise("add", x, w)),
        lambda x, w: (x + w).tanh(),
        [(5, 6, 19), (19,)],
        1,
    ),
    "batch norm": (
        batch_norm,
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        [(3, 5, 4, 6)],
        1,
    ),
    "sum of a middle dim": (lambda b, x: b.reduce(SUM, x, [1]), lambda x: x.sum(1), [(5, 6, 7)], 1),
    "full sum": (
        lambda b, x: b.pointwise("mul", b.reduce(SUM, b.pointwise("mul", x, x), [0, 1]), 0.5),
        lambda x: (x * x).sum() * 0.5,
        [(61, 37)],
        1,
    ),
    "adam": (adam, adam_numbers, [(13, 7)] * 4, 1),
    "two adams": (
        lambda b, *t: adam(b, *t[:4]) + adam(b, *t[4:]),
        lambda *t: adam_numbers(*t[:4]) + adam_numbers(*t[4:]),
        [(13, 7)] * 4 + [(130,)] * 4,
        2,
    ),
    "transpose": (transpose, lambda x: x.t(), [(5, 7)], 1),
    "branches meet": (branches_meet, lambda x, y: x.exp() * y.tanh(), [(4, 6), (4, 6)], 1),
}


def _program(build, shapes):
    b = Builder()
    outputs = build(b, *(b.input(*shape) for shape in shapes))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return b.program(*outputs)


def _interpret(plan, tensors):
    buffers = {
        name: torch.zeros(max(b.elements, 1), dtype=b.dtype) for name, b in plan.buffers.items()
    }
    buffers.update({n: t.view(-1) for n, t in zip(plan.inputs, tensors, strict=True)})
    for step in plan.steps:
        assert isinstance(step, Kernel)
        interpret_kernel(step, buffers)
    return [buffers[r.buffer].as_strided(r.shape, r.strides, r.offset) for r in plan.results]


@pytest.mark.parametrize(
    "how", [run_plan, lambda plan, *t: _interpret(plan, t)], ids=["c++", "loops"]
)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_numbers(case, fuse, how):
    build, reference, shapes, _ = CASES[case]
    plan = schedule(_program(build, shapes), fuse=fuse)
    tensors = [torch.randn(shape) for shape in shapes]
    copies = [t.clone() for t in tensors]
    expected = reference(*copies)
    expected = expected if isinstance(expected, tuple) else (expected,)
    # sums in another order round otherwise
    torch.testing.assert_close(how(plan, *tensors), [*expected], rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(tensors, copies, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("case", CASES)
def test_kernel_counts(case):
    build, _, shapes, count = CASES[case]
    assert len(kernels_of(schedule(_program(build, shapes)))) == count


def test_column_sums_of_layer_norm_are_one_columns_kernel():
    plan = schedule(_program(layer_norm_backward, CASES["layer norm backward"][2]))
    kinds = sorted(kernel.kind for kernel in kernels_of(plan))
    assert kinds == [KernelKind.COLUMNS, KernelKind.ROWS]
    assert plan.arena_bytes == 0  # nothing between the two is stored


def test_a_call_in_between_keeps_kernels_apart():
    b = Builder()
    x, w = b.input(6, 8), b.input(8, 8)
    h = b.mm(b.pointwise("exp", x), w)
    y = b.pointwise("add", h, b.pointwise("exp", x))
    plan = schedule(b.program(y))
    assert [isinstance(step, Kernel) for step in plan.steps] == [True, False, True]
    xs = [torch.randn(6, 8), torch.randn(8, 8)]
    torch.testing.assert_close(run_plan(plan, *xs), [xs[0].exp() @ xs[1] + xs[0].exp()])


def test_a_shifted_read_is_another_kernel():
    b = Builder()
    x = b.input(8)
    e = b.pointwise("exp", x)
    y = b.compute((7,), lambda i: at(TensorRef(e.buffer, e.dtype, (7,), (1,), 1), i))
    plan = schedule(b.program(y))
    assert len(kernels_of(plan)) == 2
    t = torch.randn(8)
    torch.testing.assert_close(run_plan(plan, t), [t.exp()[1:]])


def test_an_overwritten_input_is_read_first():
    b = Builder()
    x = b.input(9)
    shifted = b.compute((8,), lambda i: at(TensorRef(x.buffer, x.dtype, (8,), (1,), 1), i))
    b.pointwise("mul", x, 2.0, into=x)
    again = b.pointwise("add", x, 1.0)
    t = torch.randn(9)
    before = t.clone()
    for fuse in (False, True):
        mine = before.clone()
        got = run_plan(schedule(b.program(shifted, again), fuse=fuse), mine)
        torch.testing.assert_close(got, [before[1:], before * 2 + 1])
        torch.testing.assert_close(mine, before * 2)


def test_disjoint_slices_of_one_buffer_do_not_wait_for_each_other():
    b = Builder()
    x, y = b.input(4, 3), b.input(4, 5)
    both = b.pointwise("mul", x, 0.0, strides=(8, 1))
    whole = TensorRef(both.buffer, both.dtype, (4, 8), (8, 1))
    b.buffers[both.buffer] = type(b.buffers[both.buffer])(
        both.buffer, both.dtype, (4, 8), (8, 1), b.buffers[both.buffer].kind
    )
    b.pointwise("exp", y, into=TensorRef(both.buffer, both.dtype, (4, 5), (8, 1), 3))
    out = b.pointwise("add", whole, 1.0)
    program = b.program(out)
    assert facts(program.steps).before == (frozenset(), frozenset(), frozenset({0, 1}))
    xs = [torch.randn(4, 3), torch.randn(4, 5)]
    want = torch.cat([xs[0] * 0, xs[1].exp()], 1) + 1
    torch.testing.assert_close(run_plan(schedule(program), *xs), [want])


def test_a_dying_input_gives_its_bytes():
    b = Builder()
    x, w = b.input(16, 16), b.input(16, 16)
    h = b.mm(x, w)
    e = b.pointwise("exp", h)
    plan = schedule(b.program(b.mm(e, w)))
    assert plan.offsets[h.buffer] == plan.offsets[e.buffer]
    assert plan.arena_bytes == 16 * 16 * 4
    assert plan.peak_bytes == 4 * 16 * 16 * 4  # two inputs, the arena, the result


@pytest.mark.parametrize("seed", range(5))
def test_pack_never_overlaps(seed):
    generator = torch.Generator().manual_seed(seed)

    def number(n):
        return int(torch.randint(n, (), generator=generator))

    blocks = []
    for k in range(60):
        first = number(40)
        blocks.append(Interval(f"b{k}", 1 + number(5000), first, first + number(15)))
    offsets, size = pack(blocks)
    for a in blocks:
        assert offsets[a.name] % 64 == 0
        assert offsets[a.name] + a.nbytes <= size
        for b in blocks:
            if a is not b and a.first <= b.last and b.first <= a.last:
                apart = offsets[a.name] + a.nbytes <= offsets[b.name]
                assert apart or offsets[b.name] + b.nbytes <= offsets[a.name]


def test_the_plan_is_deterministic():
    def text():
        plan = schedule(_program(layer_norm_backward, CASES["layer norm backward"][2]))
        return [(k.name, len(k.body)) for k in kernels_of(plan)], dict(plan.offsets)

    assert text() == text()


def test_values_of_an_update_in_registers_are_no_buffers():
    """A kernel has room for 40 buffers; of an update only those in memory count."""
    for phase, kernels in (("optimizer", 1), ("backward", 2)):
        b = Builder()
        x = b.input(64)
        for _ in range(60):
            x = b.pointwise("mul", x, 1.25)
        b.steps = [replace(step, origin=replace(step.origin, phase=phase)) for step in b.steps]
        assert len(kernels_of(schedule(b.program(x)))) == kernels
    b = Builder()
    total, *others = (b.input(64) for _ in range(60))
    for other in others:
        total = b.pointwise("add", total, other)
    b.steps = [replace(step, origin=replace(step.origin, phase="optimizer")) for step in b.steps]
    first, *rest = kernels_of(schedule(b.program(total)))
    assert rest
    assert all(len(arguments_of(each)) <= MAX_BUFFERS for each in (first, *rest))


def test_a_gradient_and_the_update_of_its_bias_are_one_kernel():
    b = Builder()
    dy, p, m, v = b.input(300, 40), *(b.input(40) for _ in range(3))
    grad = b.reduce(SUM, dy, [0])
    adam(b, p, grad, m, v)
    (kernel,) = kernels_of(schedule(b.program()))
    assert kernel.kind is KernelKind.COLUMNS
    assert {item.buffer for item in updates(kernel)} == {p.buffer, m.buffer, v.buffer}


def test_an_update_of_what_is_read_again_is_a_kernel_of_its_own():
    """A kernel that goes down its columns again overwrites nothing: each result of an update in it
    would be copied to its place by one more."""
    b = Builder()
    dy, x, p, m, v = b.input(300, 40), b.input(300, 40), *(b.input(40) for _ in range(3))
    grad = b.reduce(SUM, b.pointwise("mul", dy, x), [0])
    dx = b.pointwise("sub", dy, b.pointwise("mul", x, grad))
    before = len(b.steps)
    first = b.pointwise("add", b.pointwise("mul", m, 0.9), grad)
    second = b.pointwise("add", b.pointwise("mul", v, 0.9), b.pointwise("mul", grad, grad))
    value = b.pointwise("sub", p, b.pointwise("div", first, second))
    for new, old in ((first, m), (second, v), (value, p)):
        b.pointwise("mul", new, 1.0, into=old)
    for number in range(before, len(b.steps)):
        origin = replace(b.steps[number].origin, phase="optimizer")
        b.steps[number] = replace(b.steps[number], origin=origin)
    again, update = kernels_of(schedule(b.program(dx)))
    assert again.kind is KernelKind.COLUMNS
    written = {item.buffer for item in update.body if isinstance(item, Store)}
    assert written == {p.buffer, m.buffer, v.buffer}
