"""Cheap values that are read in another order: they are computed there, and not stored."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.steps import F32, Builder, at, kernels_of, strides_of
from treadle.algebra.index import Index
from treadle.loop.expr import Apply, Const, Expr, Position, ReduceKind
from treadle.loop.interpret import interpret_program
from treadle.loop.program import Program, TensorRef
from treadle.loop.traverse import loads
from treadle.schedule.loop_nest import LoopNests
from treadle.schedule.normalize import normalize
from treadle.schedule.plan import plan_reads, plan_writes, schedule
from treadle.schedule.recompute.inline_reordered import inline_reordered

SHAPE = (2, 5, 3, 8)  # batch, time, heads, width


def permuted(ref: TensorRef, order: tuple[int, ...]) -> TensorRef:
    shape, strides = (tuple(each[d] for d in order) for each in (ref.shape, ref.strides))
    return replace(ref, shape=shape, strides=strides)


def part(ref: TensorRef, begin: int, end: int) -> TensorRef:
    """``ref[..., begin:end]``."""
    shape = (*ref.shape[:-1], end - begin)
    return replace(ref, shape=shape, offset=ref.offset + begin * ref.strides[-1])


def joined(b: Builder, left: TensorRef, right: TensorRef) -> TensorRef:
    """Both along the last dim, as PyTorch's ``cat`` is lowered."""
    border = left.shape[-1]

    def body(*axes) -> Expr:
        column = Position(Index.of(axes[-1]))
        first = Apply("lt", (column, Const(border, torch.int64)), torch.bool)
        second = Apply("ge", (column, Const(border, torch.int64)), torch.bool)
        shifted = (*axes[:-1], axes[-1] - border)
        pieces = [(at(left, *axes), first)]
        pieces.append((at(replace(right, offset=right.offset), *axes[:-1], shifted[-1]), second))
        values = [replace(load, mask=mask) for load, mask in pieces]
        return Apply("where", (first, *values), F32)

    return b.compute((*left.shape[:-1], border + right.shape[-1]), body)


def rotary() -> tuple[Builder, TensorRef]:
    """``x * c + rotated(x) * s``, as attention sees it: heads before time."""
    b = Builder()
    x = permuted(b.input(*SHAPE), (0, 2, 1, 3))
    cosine, sine = b.input(SHAPE[1], SHAPE[3]), b.input(SHAPE[1], SHAPE[3])
    negated = b.pointwise("neg", part(x, 4, 8))
    turned = b.pointwise("mul", joined(b, negated, part(x, 0, 4)), sine)
    plain = b.pointwise("mul", x, cosine, strides=(120, 8, 24, 1))
    return b, b.pointwise("add", plain, turned, strides=(120, 8, 24, 1))


def resolved(program: Program) -> Program:
    steps, buffers = normalize(program)
    kept = frozenset(ref.buffer for ref in program.results if ref is not None)
    return replace(
        program, steps=inline_reordered(steps, buffers, LoopNests(), kept), buffers=buffers
    )


def run(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    named = zip(program.inputs, (each.clone() for each in inputs), strict=True)
    return interpret_program(program, dict(named))


def read_by(program: Program, ref: TensorRef) -> set[str]:
    """What the step reads that computes ``ref``."""
    (step,) = [each for each in program.steps if ref.buffer in each.writes]
    return {load.buffer for load in loads(step.array.body)}


def inputs_of(program: Program) -> list[torch.Tensor]:
    return [torch.randn(program.buffers[name].shape) for name in program.inputs]


def test_a_rotary_embedding_is_one_kernel_without_temporaries():
    b, result = rotary()
    program = b.program(result)
    plan = schedule(program)
    assert len(kernels_of(plan)) == 1
    assert plan.arena_bytes == 0  # the result alone, which is no temporary
    changed, inputs = resolved(program), inputs_of(program)
    assert read_by(changed, result) == {"in0", "in2", b.steps[3].output.buffer}
    for ours, theirs in zip(run(changed, inputs), run(program, inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_places_inside_masks_need_no_division():
    b, result = rotary()
    steps = resolved(b.program(result)).steps
    (step,) = [each for each in steps if result.buffer in each.writes]
    places = [load.index for load in loads(step.array.body)]
    assert places
    assert all("//" not in str(place) and "%" not in str(place) for place in places)


def test_a_second_run_changes_nothing():
    b, result = rotary()
    once = resolved(b.program(result))
    assert resolved(once).steps == once.steps


def test_a_rotary_embedding_of_rows_with_a_weight_that_changes_later_is_one_kernel():
    """Heads that are normalised, and scaled by a weight that the optimizer writes to."""
    b = Builder()
    product, weight = b.input(*SHAPE), b.input(SHAPE[3])
    squares = b.reduce(ReduceKind.SUM, b.pointwise("mul", product, product), [3], keepdim=True)
    scaled = b.pointwise("mul", b.pointwise("mul", product, squares), weight)
    x = permuted(scaled, (0, 2, 1, 3))
    sine = b.input(SHAPE[1], SHAPE[3])
    turned = joined(b, b.pointwise("neg", part(x, 4, 8)), part(x, 0, 4))
    result = b.pointwise("add", x, b.pointwise("mul", turned, sine), strides=(120, 8, 24, 1))
    b.pointwise("mul", weight, 0.5, into=weight)
    program = b.program(result)
    changed, inputs = resolved(program), inputs_of(program)
    plan = schedule(program)
    (reading,) = [each for each in kernels_of(plan) if product.buffer in plan_reads(each)]
    assert result.buffer in plan_writes(reading)
    for ours, theirs in zip(run(changed, inputs), run(program, inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_of_formulas_that_get_too_long_none_is_cut_where_more_would_be_stored():
    """The narrow value is stored; what it is made of is as wide as the reader."""
    b = Builder()
    wide = [b.pointwise("neg", b.input(6, 4)) for _ in range(13)]
    value = functools.reduce(lambda x, y: b.pointwise("add", x, y), wide)
    narrow = b.compute((6, 4), lambda *axes: Apply("cast", (at(value, *axes),), torch.bfloat16))
    reader = b.pointwise("neg", permuted(narrow, (1, 0)))
    assert read_by(resolved(b.program(reader)), reader) == {narrow.buffer}


def transposed_reader(b: Builder, value: TensorRef) -> TensorRef:
    return b.pointwise("add", permuted(value, (1, 0)), 1.0)


def refused(make) -> tuple[Program, TensorRef, TensorRef]:
    """A value of ``make`` and a reader that transposes it."""
    b = Builder()
    value, extra = make(b)
    reader = transposed_reader(b, value)
    results = [reader, *extra(value)]
    return b.program(*results), value, reader


def nothing(value: TensorRef) -> list[TensorRef]:
    return []


def an_expensive_one(b: Builder):
    return b.pointwise("exp", b.input(4, 6)), nothing


def a_result(b: Builder):
    return b.pointwise("neg", b.input(4, 6)), lambda value: [value]


def one_that_a_product_reads(b: Builder):
    return b.pointwise("neg", b.input(6, 6)), lambda value: [b.mm(value, value)]


def one_that_a_sum_reads(b: Builder):
    return b.pointwise("neg", b.input(4, 6)), lambda value: [b.reduce(ReduceKind.SUM, value, [0])]


def one_that_many_read(b: Builder):
    value = b.pointwise("neg", b.input(4, 6))
    return value, lambda value: [transposed_reader(b, value) for _ in range(3)]


def one_whose_operand_changes(b: Builder):
    x = b.input(4, 6)
    value = b.pointwise("neg", x)
    b.pointwise("mul", x, 2.0, into=x)
    return value, nothing


def one_of_a_sum(b: Builder):
    return b.pointwise("neg", b.reduce(ReduceKind.SUM, b.input(4, 6, 9), [2])), nothing


def one_far_away(b: Builder):
    value, other = b.pointwise("neg", b.input(4, 6)), b.input(4, 6)
    for _ in range(60):
        other = b.pointwise("add", other, 1.0)
    return value, lambda value: [other]


@pytest.mark.parametrize(
    "make",
    [
        an_expensive_one,
        a_result,
        one_that_a_product_reads,
        one_that_a_sum_reads,
        one_that_many_read,
        one_whose_operand_changes,
        one_of_a_sum,
        one_far_away,
    ],
)
def test_other_values_stay_loads(make):
    program, value, reader = refused(make)
    assert read_by(resolved(program), reader) == {value.buffer}


def test_a_value_that_backward_reads_stays_a_load():
    b = Builder()
    value = b.pointwise("neg", b.input(4, 6))
    reader = transposed_reader(b, value)
    program = b.program(reader)
    first, last = program.steps
    late = replace(last, origin=replace(last.origin, phase="backward"))
    program = replace(program, steps=(first, late))
    assert read_by(resolved(program), reader) == {value.buffer}


def test_a_reader_at_the_same_place_stays_a_reader():
    b = Builder()
    value = b.pointwise("neg", b.input(4, 6))
    reader = b.pointwise("add", value, 1.0)
    assert read_by(resolved(b.program(reader)), reader) == {value.buffer}


def test_a_small_value_that_many_elements_read_is_computed_once():
    b = Builder()
    value = b.pointwise("neg", b.input(4, 1))
    reader = b.pointwise("add", b.input(4, 64), value)
    assert value.buffer in read_by(resolved(b.program(reader)), reader)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 99)), max_size=9))
def test_random_orders_keep_every_bit(moves):
    b = Builder()
    made = [b.input(2, 3, 4), b.input(4, 2, 3)]
    for kind, which, other in moves:
        x = made[which % len(made)]
        last = x.shape[-1]
        match kind:
            case 0:
                x = permuted(x, ((1, 2, 0), (2, 0, 1), (0, 2, 1))[other % 3])
                made.append(b.pointwise("neg", x, strides=strides_of(x.shape)))
            case 1 if last > 1:
                border = 1 + other % (last - 1)
                turned = b.pointwise("neg", part(x, border, last))
                made.append(joined(b, turned, part(x, 0, border)))
            case 2:
                alike = [each for each in made if each.shape == x.shape]
                made.append(b.pointwise("sub", x, alike[other % len(alike)]))
            case 3:
                x = made[other % 2]
                b.pointwise("mul", x, 1.5, into=x)  # an input changes, as an optimizer changes it
            case _:
                made.append(b.pointwise("mul", x, 1.5))
    results = [each for each in made[2:] if each.buffer.startswith("t")][-2:]
    program = b.program(*dict.fromkeys(results))
    inputs = inputs_of(program)
    for ours, theirs in zip(run(resolved(program), inputs), run(program, inputs), strict=True):
        assert torch.equal(ours, theirs)
