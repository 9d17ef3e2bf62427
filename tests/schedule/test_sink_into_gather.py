"""Reading a few elements of a value: they are computed, the value is not stored for them."""

from dataclasses import replace

import pytest
import torch

from schedule.steps import Builder, artifact, at, run_artifact
from treadle.algebra.index import Axis, Index, linear
from treadle.loop.expr import Apply, Const, Expr, Load, Position, Reduce, ReduceKind
from treadle.loop.interpret import interpret_program
from treadle.loop.kernel import Kernel
from treadle.loop.nest import reductions_of
from treadle.loop.traverse import loads, value_index, walk
from treadle.schedule.normalize import normalize
from treadle.schedule.plan import plan_reads, plan_writes, schedule
from treadle.schedule.recompute.sink_into_gather import sink_into_gather
from treadle.schedule.workers import PROGRAMS, THREADS

LABELS, CLASSES = 1031, 37


def picked_log_probability(rows: int = LABELS, classes: int = CLASSES):
    """``y = x - max;  picked[n] = y[n, label[n]];  dx = exp(y) * scale[n]`` with x of our own."""
    b = Builder()
    raw = b.input(rows, classes)
    label = b.input(rows, dtype=torch.int64)
    x = b.pointwise("mul", raw, 2.0)
    top = b.reduce(ReduceKind.MAX, x, [1], True)
    y = b.pointwise("sub", x, top)

    def pick(n: Axis) -> Expr:
        column = value_index(at(label, n), 0, classes - 1)
        return Load(y.buffer, linear((n, column), y.strides), y.dtype)

    picked = b.compute((rows,), pick)
    slope = b.pointwise("exp", y)
    return b, b.program(picked, slope), x, y


def run(program, inputs):
    tensors = {name: t.clone() for name, t in zip(program.inputs, inputs, strict=True)}
    return interpret_program(program, tensors)


def inputs(rows: int = LABELS, classes: int = CLASSES):
    return torch.randn(rows, classes), torch.randint(classes, (rows,))


def test_a_picked_value_is_computed_where_it_is_picked():
    _, program, _, y = picked_log_probability()
    steps, buffers = normalize(program)
    changed = sink_into_gather(steps, buffers)
    (before, after) = (
        {load.buffer for load in loads(each[-2].array.body)} for each in (steps, changed)
    )
    assert y.buffer in before
    assert y.buffer not in after
    assert "in0" in after  # two steps back
    assert sink_into_gather(changed, buffers) == changed


def test_the_numbers_stay():
    _, program, _, _ = picked_log_probability()
    given = inputs()
    steps, buffers = normalize(program)
    again = replace(program, steps=sink_into_gather(steps, buffers), buffers=dict(buffers))
    for mine, theirs in zip(run(again, given), run(program, given), strict=True):
        assert torch.equal(mine, theirs)


def test_the_plan_stores_no_value_for_the_pick():
    _, program, _, y = picked_log_probability()
    plan = schedule(program)
    assert not any(y.buffer in plan_writes(step) for step in plan.steps)
    given = inputs()
    expected = run(program, given)
    found = run_artifact(artifact(plan), [t.clone() for t in given])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_result_may_overwrite_the_row_it_was_picked_from():
    """The pick comes before the last loop of the row, so the slope takes the bytes of ``m``."""
    b = Builder()
    raw, weights = b.input(LABELS, CLASSES), b.input(CLASSES, CLASSES)
    label = b.input(LABELS, dtype=torch.int64)
    m = b.mm(raw, weights)
    top = b.reduce(ReduceKind.MAX, m, [1], True)

    def pick(n: Axis) -> Expr:
        column = value_index(at(label, n), 0, CLASSES - 1)
        return Apply("sub", (Load(m.buffer, linear((n, column), m.strides), m.dtype),
                             at(top, n, Axis(1))), m.dtype)  # fmt: skip

    picked = b.compute((LABELS,), pick)
    slope = b.pointwise("exp", b.pointwise("sub", m, top))
    square = b.mm(slope, weights)
    plan = schedule(b.program(picked, square))
    assert plan.offsets[m.buffer] == plan.offsets[slope.buffer]
    given = [torch.randn(LABELS, CLASSES), torch.randn(CLASSES, CLASSES) * 0.1,
             torch.randint(CLASSES, (LABELS,))]  # fmt: skip
    found = run_artifact(artifact(plan), [t.clone() for t in given])
    product = given[0] @ given[1]
    below = product - product.amax(1, keepdim=True)
    torch.testing.assert_close(found[0], below.gather(1, given[2][:, None])[:, 0])
    torch.testing.assert_close(found[1], below.exp() @ given[1])


def test_few_rows_too():
    _, program, _, _ = picked_log_probability(rows=23)
    plan = schedule(program)
    kernel = next(step for step in plan.steps if isinstance(step, Kernel))
    assert kernel.rows.extent == 23
    given = inputs(rows=23)
    found = run_artifact(artifact(plan), [t.clone() for t in given])
    for mine, theirs in zip(found, run(program, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("why", ["dense reader", "reduced value", "operand written again"])
def test_what_it_leaves_alone(why):
    b = Builder()
    x = b.input(64, 8)
    is_sum = why == "reduced value"
    y = b.reduce(ReduceKind.SUM, x, [1], True) if is_sum else b.pointwise("neg", x)
    count = 65 if why == "dense reader" else 2
    b.compute((count,), lambda n: Load(y.buffer, linear((n,), (1,)), y.dtype))
    if why == "operand written again":
        b.pointwise("add", x, 1.0, into=x)
    steps, buffers = normalize(b.program())
    assert sink_into_gather(steps, buffers) == steps


def one_hot_gradient():
    """``g = where(label == j, w, 0)``; ``dx = g - p * sum of g``, as behind a cross-entropy."""
    b = Builder()
    p = b.input(LABELS, CLASSES)
    label, w = b.input(LABELS, dtype=torch.int64), b.input(LABELS)

    def chosen(n: Axis, j: Axis) -> Expr:
        here = Apply("eq", (at(label, n), Position(Index.of(j))), torch.bool)
        return Apply("where", (here, at(w, n), Const(0.0, torch.float32)), torch.float32)

    g = b.compute((LABELS, CLASSES), chosen)
    total = b.reduce(ReduceKind.SUM, g, [1], True)
    dx = b.pointwise("sub", g, b.pointwise("mul", p, total))
    return b.program(dx, total), total


def test_a_sum_over_one_hot_rows_is_no_loop():
    program, total = one_hot_gradient()
    steps, buffers = normalize(program)
    changed = sink_into_gather(steps, buffers)
    (step,) = (each for each in changed if each.output.buffer == total.buffer)
    assert not any(isinstance(node, Reduce) for node in walk(step.array.body))
    plan = schedule(program)
    assert not any(reductions_of(each) for each in plan.steps if isinstance(each, Kernel))
    label = torch.randint(CLASSES, (LABELS,))
    label[:2] = torch.tensor([-100, CLASSES])
    given = [torch.rand(LABELS, CLASSES), label, torch.randn(LABELS)]
    found = run_artifact(artifact(plan), [t.clone() for t in given])
    for mine, theirs in zip(found, run(program, given), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_sum_over_what_is_written_again_stays():
    program, total = one_hot_gradient()
    steps, buffers = normalize(program)
    changed = sink_into_gather((*steps, steps[0]), buffers)
    (step,) = (each for each in changed if each.output.buffer == total.buffer)
    assert any(isinstance(node, Reduce) for node in walk(step.array.body))


def mean_loss(rows: int, classes: int):
    """``p = log_softmax(x);  loss = -sum(p[n, label[n]]) / count;  g = (exp(p) - 1) / count`` where
    ``count`` is that of the labels that are not -1."""
    b = Builder()
    raw = b.input(rows, classes)
    label = b.input(rows, dtype=torch.int64)
    x = b.pointwise("mul", raw, 2.0)
    y = b.pointwise("sub", x, b.reduce(ReduceKind.MAX, x, [1], True))
    total = b.reduce(ReduceKind.SUM, b.pointwise("exp", y), [1], True)
    p = b.pointwise("sub", y, b.pointwise("log", total))

    def pick(n: Axis) -> Expr:
        column = value_index(at(label, n), 0, classes - 1)
        return Load(p.buffer, linear((n, column), p.strides), p.dtype)

    def counts(n: Axis) -> Expr:
        there = Apply("ne", (at(label, n), Const(-1, torch.int64)), torch.bool)
        return Apply("cast", (there,), torch.float32)

    picked = b.reduce(ReduceKind.SUM, b.compute((rows,), pick), [0], True)
    count = b.reduce(ReduceKind.SUM, b.compute((rows,), counts), [0], True)
    loss = b.pointwise("div", picked, count)
    slope = b.pointwise("div", b.pointwise("sub", b.pointwise("exp", p), 1.0), count)
    return b.program(loss, slope)


@pytest.mark.parametrize("workers", [THREADS, PROGRAMS], ids=["threads", "programs"])
def test_a_count_does_not_come_between_a_loss_and_its_gradient(workers):
    program = mean_loss(257, 1031)
    plan = schedule(program, workers=workers)
    whole = {name for name, each in plan.buffers.items() if each.nbytes == 4 * 257 * 1031}
    rows = [each.name for each in plan.steps if (plan_reads(each) | plan_writes(each)) & whole]
    assert len(rows) == 1, "the gradient's kernel needs the count, and has the rows"
    made = torch.randn(257, 1031), torch.randint(1031, (257,))
    loss, slope = run(program, made)
    again = run_artifact(artifact(plan), made) if workers is THREADS else ()
    for mine, right in zip(again, (loss, slope), strict=False):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def test_a_small_count_may_be_summed_with_the_loss():
    program = mean_loss(7, 11)
    sums = [each for each in schedule(program).steps if isinstance(each, Kernel)]
    assert len(sums) == 3, "rows; both sums and the loss; the gradient"
