"""Simplified formulas have the same bits, are no larger, and are already simple."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Array, Const, Load, Position, Reduce, ReduceKind
from treadle.loop.interpret import interpret_array
from treadle.loop.printing import show_expr
from treadle.loop.program import Call, Compute, Origin, Program, TensorRef
from treadle.loop.simplify import simplify, simplify_array, simplify_program
from treadle.loop.traverse import structure, value_index, walk

F32, F64, BF16, F16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 3.5, 1e38]
P, Q = Axis(10), Axis(3)
BUFFERS = {"x": torch.tensor(SPECIAL * 3), "n": torch.arange(-15, 15)}
X = Load("x", Index.of(P), F32)
Y = Load("x", Q * 10 + P, F32)
N = Load("n", Q * 10 + P, I64)
TRUE, FALSE = Const(True, torch.bool), Const(False, torch.bool)


def f32(value):
    return Const(torch.tensor(value, dtype=F32).item(), F32)


def apply(fn, *operands, dtype=None):
    return Apply(fn, operands, dtype or operands[-1].dtype)


def cast(x, dtype):
    return Apply("cast", (x,), dtype)


def position(index):
    return Position(Index.of(index))


def bits(tensor):
    """Every NaN as one; -0.0 apart from 0.0."""
    if not tensor.dtype.is_floating_point:
        return tensor.tolist()
    return [
        ("nan", 0) if math.isnan(v) else (v, math.copysign(1, v)) for v in tensor.flatten().tolist()
    ]


def floats(conditions, wholes):
    leaf = st.one_of(st.sampled_from([X, Y]), st.sampled_from(SPECIAL).map(f32))

    def grow(inner):
        return st.one_of(
            st.builds(
                apply,
                st.sampled_from(["add", "sub", "mul", "div", "minimum", "maximum"]),
                inner,
                inner,
            ),
            st.builds(apply, st.sampled_from(["neg", "abs", "floor"]), inner),
            st.builds(apply, st.just("where"), conditions, inner, inner),
            st.builds(lambda x, d: cast(cast(x, d), F32), inner, st.sampled_from([F64, BF16, F16])),
            st.builds(lambda n: cast(n, F32), wholes),
        )

    return st.recursive(leaf, grow, max_leaves=8)


def make_wholes():
    leaf = st.one_of(
        st.just(N),
        st.integers(-3, 3).map(lambda v: Const(v, I64)),
        st.sampled_from([position(P), position(Q), position(P // 4), position(P * 3 - 7)]),
    )

    def grow(inner):
        positive = st.integers(1, 5).map(lambda v: Const(v, I64))
        return st.one_of(
            st.builds(
                apply, st.sampled_from(["add", "sub", "mul", "minimum", "maximum"]), inner, inner
            ),
            st.builds(apply, st.sampled_from(["floordiv", "mod"]), inner, positive),
            st.builds(apply, st.sampled_from(["neg", "bitnot"]), inner),
        )

    return st.recursive(leaf, grow, max_leaves=6)


def make_conditions(wholes):
    def compare(fn, x, y):
        return Apply(fn, (x, y), torch.bool)

    leaf = st.one_of(
        st.sampled_from([TRUE, FALSE]),
        st.builds(compare, st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), wholes, wholes),
    )

    def grow(inner):
        return st.one_of(
            st.builds(apply, st.sampled_from(["and", "or", "xor"]), inner, inner),
            st.builds(apply, st.just("not"), inner),
        )

    return st.recursive(leaf, grow, max_leaves=4)


WHOLES = make_wholes()
CONDITIONS = make_conditions(WHOLES)


@settings(max_examples=400, deadline=None)
@given(st.one_of(floats(CONDITIONS, WHOLES), WHOLES, CONDITIONS))
def test_keeps_the_bits_and_settles(expr):
    simple = simplify(expr)
    assert simple.dtype is expr.dtype
    before, after = (interpret_array(Array((P, Q), each), BUFFERS) for each in (expr, simple))
    assert bits(before) == bits(after)
    assert structure(simplify(simple)) == structure(simple)
    assert len(list(walk(simple))) <= len(list(walk(expr)))


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (apply("add", f32(1.0), f32(2.0)), "3.0"),
        (apply("mul", X, f32(1.0)), "x[i]"),
        (apply("mul", f32(1.0), X), "x[i]"),
        (apply("add", X, f32(-0.0)), "x[i]"),
        (apply("sub", X, f32(0.0)), "x[i]"),
        (apply("div", X, f32(1.0)), "x[i]"),
        (apply("pow", X, f32(1.0)), "x[i]"),
        (apply("neg", apply("neg", X)), "x[i]"),
        (apply("maximum", X, apply("add", X, f32(-0.0))), "x[i]"),
        (apply("where", TRUE, X, Y), "x[i]"),
        (apply("where", apply("not", TRUE), Y, X), "x[i]"),
        (apply("where", apply("lt", N, N, dtype=torch.bool), X, X), "x[i]"),
        (cast(X, F32), "x[i]"),
        (cast(cast(X, F64), F32), "x[i]"),
        (cast(cast(cast(X, BF16), F32), BF16), "bf16(x[i])"),
        (apply("mul", N, Const(0, I64)), "0"),
        (apply("mod", N, Const(1, I64)), "0"),
        (apply("add", position(P), Const(1, I64)), "<i + 1>"),
        (apply("mod", apply("mul", position(P), Const(4, I64)), Const(4, I64)), "0"),
        (apply("lt", position(P), Const(10, I64), dtype=torch.bool), "True"),
        (apply("ge", position(P), position(P + Q + 1), dtype=torch.bool), "False"),
        (apply("eq", position(P), position(P), dtype=torch.bool), "True"),
        (apply("ne", position(P + 20), position(Q), dtype=torch.bool), "True"),
        (Load("x", Index.of(P), F32, TRUE), "x[i]"),
        (Load("x", Index.of(P), F32, FALSE), "0.0"),
        (Load("x", value_index(position(P), 0, 9) * 2 + 1, F32), "x[2*i + 1]"),
        (Load("x", value_index(Const(3, I64), 0, 9), F32), "x[3]"),
        (Reduce(ReduceKind.MAX, (Axis(1),), X), "x[i]"),
        (Reduce(ReduceKind.ARGMAX, (Axis(1),), X), "0"),
    ],
)
def test_text_after(expr, text):
    assert show_expr(simplify(expr)) == text


@pytest.mark.parametrize(
    "expr",
    [
        apply("add", X, f32(0.0)),  # -0.0 + 0.0 is 0.0
        apply("sub", X, f32(-0.0)),
        apply("mul", X, f32(0.0)),  # NaN, infinity, -0.0
        apply("sub", X, X),
        apply("div", X, X),
        cast(cast(X, BF16), F32),  # rounds
        cast(cast(N, F64), I64),  # 2**53 + 1
        apply("eq", X, X, dtype=torch.bool),  # NaN
        apply("lt", position(P), Const(9, I64), dtype=torch.bool),
        apply("floordiv", Const(1, I64), Const(0, I64)),
        Reduce(ReduceKind.SUM, (Axis(1),), X),  # 0.0 + -0.0 is 0.0
        Reduce(ReduceKind.SUM, (P,), X),
    ],
)
def test_leaves_alone_what_would_change_bits(expr):
    assert structure(simplify(expr)) == structure(expr)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, I64, F16, BF16, F32, F64]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("middle", DTYPES)
def test_only_lossless_casts_are_skipped(source, middle):
    expr = cast(cast(Load("v", Index.of(P), source), middle), source)
    is_kept = simplify(expr) == expr or middle is source
    if source.is_floating_point:
        # The numbers that need all the bits: odd significands, both ends of the exponents.
        one = 1 + torch.finfo(source).eps
        values = torch.tensor(
            [one, torch.finfo(source).max, torch.finfo(source).tiny], dtype=source
        )
    elif source is torch.bool:
        values = torch.tensor([False, True])
    else:
        info = torch.iinfo(source)
        values = torch.tensor([info.min, info.min + 1, info.max - 1, info.max], dtype=source)
    is_whole_to_bool = middle is torch.bool and source is not torch.bool
    if not is_kept:
        assert not is_whole_to_bool
        assert values.to(middle).to(source).equal(values)


def test_shares_equal_nodes():
    twice = [apply("exp", Load("x", Index.of(P), F32)) for _ in range(2)]
    simple = simplify(apply("add", *twice))
    assert simple.operands[0] is simple.operands[1]


def test_an_array_keeps_its_axes():
    one = Axis(1)
    array = simplify_array(Array((one, P), apply("add", position(one), position(P))))
    assert array.shape == (1, 10)
    assert array.body == position(P)


def test_a_program_keeps_its_calls():
    ref, origin = TensorRef("y", F32, (10,), (1,)), Origin(("n",))
    call = Call("aten.relu.default", (ref,), {}, ("z",), origin)
    compute = Compute(ref, Array((P,), apply("mul", X, f32(1.0))), origin)
    first, second = simplify_program(Program({}, (compute, call), (), (ref,))).steps
    assert first == Compute(ref, Array((P,), X), origin)
    assert second is call


def test_a_value_that_stays():
    row = value_index(apply("add", N, Const(0, I64)), 0, 5)
    simple = simplify(Load("x", row * 2, F32))
    ((atom, factor),) = simple.index.terms
    assert factor == 2
    assert value_index(N, 0, 5).terms == ((atom, 1),)


def test_is_fast_on_long_shared_chains():
    body = X
    for _ in range(2000):
        body = apply("mul", apply("add", body, body), f32(1.0))
    assert len(list(walk(simplify(body)))) == 2001


# --- sums of one term -----------------------------------------------------------------------

R = Axis(7)
ROW = Load("n", Index.of(P), I64)  # -15 to -6
LABEL = apply("add", ROW, Const(18, I64))  # 3 to 12: some outside of R
HERE = apply("eq", LABEL, position(R), dtype=torch.bool)
LARGE = apply("lt", X, f32(2.0), dtype=torch.bool)


def both(*conditions):
    first, *rest = conditions
    for each in rest:
        first = Apply("and", (first, each), torch.bool)
    return first


def sum_of(condition, value, rest=None):
    return Reduce(ReduceKind.SUM, (R,), apply("where", condition, value, rest or f32(0.0)))


def test_a_sum_of_one_term_is_that_term():
    *_, text = show_expr(simplify(sum_of(both(HERE, LARGE), X))).splitlines()
    assert text == "where(((%0 < 2.0) and (%1 >= 0)) and (%1 < 7), %0 + 0.0, 0.0)"


@pytest.mark.parametrize(
    "expr",
    [
        sum_of(HERE, X),  # -0.0, NaN and infinity among the values
        sum_of(both(LARGE, HERE), X),
        sum_of(apply("eq", position(R), LABEL, dtype=torch.bool), X),
        sum_of(both(HERE, LARGE, apply("lt", X, f32(1.0), dtype=torch.bool)), X),
        sum_of(HERE, cast(X, BF16), Const(0.0, BF16)),
        sum_of(HERE, ROW, Const(0, I64)),
    ],
)
def test_it_has_the_same_bits(expr):
    simple = simplify(expr)
    assert not any(isinstance(node, Reduce) for node in walk(simple))
    arrays = [Array((P,), each) for each in (expr, simple)]
    before, after = (interpret_array(each, BUFFERS) for each in arrays)
    assert bits(before) == bits(after)


IN_ROW = Load("x", Index.of(R), F32)


@pytest.mark.parametrize(
    "expr",
    [
        sum_of(HERE, IN_ROW),  # another term at each place
        sum_of(HERE, X, f32(1.0)),
        sum_of(HERE, X, f32(-0.0)),
        sum_of(both(HERE, apply("lt", IN_ROW, X, dtype=torch.bool)), X),
        sum_of(apply("or", HERE, LARGE, dtype=torch.bool), X),
        sum_of(apply("eq", LABEL, position(R + 1), dtype=torch.bool), X),
        sum_of(both(HERE, apply("eq", position(R), ROW, dtype=torch.bool)), X),
        sum_of(LARGE, X),
        Reduce(ReduceKind.MAX, (R,), apply("where", HERE, X, f32(0.0))),
        Reduce(ReduceKind.SUM, (R, Q), apply("where", HERE, Y, f32(0.0))),
    ],
)
def test_other_sums_stay(expr):
    assert any(isinstance(node, Reduce) for node in walk(simplify(expr)))
