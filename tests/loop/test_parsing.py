"""``parse_array(exact_array(array))`` is the same formula."""

import math
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.exact_text import exact_array
from loop.formula_parsing import parse_array, same_array
from treadle.algebra.extents import Size
from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Array, Const, Load, Local, Position, Reduce, ReduceKind
from treadle.loop.interpret import interpret_array
from treadle.loop.traverse import axes_of, value_index, walk
from treadle.util.errors import ParseError

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 3.5, 1e38, 0.1]
BUFFERS = {
    "x": torch.tensor(SPECIAL * 40, dtype=F32),
    "n.1": torch.arange(-220, 220),
    "odd name": torch.linspace(-3, 3, 440),
    "inf": torch.linspace(0, 1, 440).to(BF16),
}


def apply(fn, *operands, dtype=None):
    return Apply(fn, operands, dtype or operands[-1].dtype)


def same_bits(new, old):
    if not new.dtype.is_floating_point:
        return torch.equal(new, old)
    signs = new.signbit() == old.signbit()
    return bool((((new == old) & signs) | (new.isnan() & old.isnan())).all())


def check(array):
    text = exact_array(array)
    found = parse_array(text)
    assert exact_array(found) == text
    assert same_array(found, array)
    assert found.shape == array.shape
    return found


def test_an_exact_text():
    j, i, k = Axis(8), Axis(4), Axis(8)  # named by age, and not as they appear
    e = apply("exp", Load("x", i * 8 + j, F32))
    total = Reduce(ReduceKind.SUM, (k,), apply("exp", Load("x", i * 8 + k, F32)))
    row = value_index(Load("n.1", Index.of(i), I64), -3, 9)
    mask = apply("ge", Position(j - 3), Const(0, I64), dtype=BOOL)
    far = apply("cast", Load("odd name", row * 6 + j - 3, F32, mask), dtype=F32)
    body = apply("add", apply("div", e, total), apply("mul", e, far))
    array = Array((i, j), body)
    assert exact_array(array) == textwrap.dedent("""\
        axes i<8, j<4, k<8
        [j, i] -> f32
          $0 = exp(x[8*j + i]:f32)
          ($0 / (sum{k} exp(x[8*j + k]:f32))) + ($0 * """) + (
        "f32('odd name'[6*value(n.1[j]:i64, -3, 9) + i - 3 if <i - 3> >= 0:i64]:f32))"
    )
    check(array)


def test_constants_keep_their_bits_and_their_kind():
    for value in (*SPECIAL, 0, 1, -7):
        found = check(Array((), Const(value, F32))).body
        assert type(found.value) is type(value)
        assert found == Const(value, F32)
    assert check(Array((), Const(True, BOOL))).body.value is True


def test_axes_that_are_shared_or_of_one_value():
    i, one, k = Axis(4), Axis(1), Axis(3)
    top = Reduce(ReduceKind.MAX, (k, one), Load("x", i * 3 + k, F32))
    low = Reduce(ReduceKind.ARGMIN, (k,), Load("x", i * 3 + k, F32))
    found = check(Array((one, i), apply("add", top, apply("cast", low, dtype=F32))))
    assert [axis.extent for axis in found.axes] == [1, 4]


def test_subtraction_inside_an_index_is_not_a_sign():
    i = Axis(4)
    inner = apply("add", Load("n.1", Index.of(i), I64), Const(-1, I64))
    array = Array((i,), Load("x", i * 2 + value_index(inner, 0, 9), F32))
    assert "value(n.1[i]:i64 + -1:i64, 0, 9)" in exact_array(array)
    check(array)


def test_sizes_that_the_call_decides():
    b, t = Size.dim("B", 2, 64, 6), Size.dim("T", 1, 9, 3)
    i, j, k = Axis(b), Axis(t * b + 1), Axis((b + 3) // 2)
    body = Load("x", i * (t * 2) + (j // t) - 1 + k * ((b + t) % 2), F32)
    array = Array((i, j), Reduce(ReduceKind.SUM, (k,), body))
    text = exact_array(array)
    assert text.splitlines()[:2] == ["dim B 2..64 sample 6", "dim T 1..9 sample 3"]
    found = check(array)
    assert [str(size) for size in found.shape] == [str(size) for size in array.shape]


def test_locals_of_kernels():
    text = "axes i<4\n[i] -> f32\n  %a.1:f32 * 2.0:f32"
    body = parse_array(text).body
    assert body == apply("mul", Local("a.1", F32), Const(2.0, F32))


def test_equality_is_up_to_axes_and_sharing():
    def array(share, scale=2.0):
        i = Axis(4)
        one = apply("exp", Load("x", Index.of(i), F32))
        two = one if share else apply("exp", Load("x", Index.of(i), F32))
        return Array((i,), apply("add", one, apply("mul", two, Const(scale, F32))))

    assert same_array(array(share=True), array(share=False))
    assert not same_array(array(share=True), array(share=True, scale=-2.0))


P, Q, K = Axis(5), Axis(7), Axis(3)


def indices():
    atoms = st.sampled_from(
        [P, Q, K, P // 2, Q % 3, (P * 7 + Q) // 4, (Q * 3 + K) % 5, (Q + 20) // 6]
    )
    parts = st.lists(st.tuples(atoms, st.integers(1, 9)), max_size=3)

    def total(given, const):
        index = Index.of(const)
        for atom, factor in given:
            index = index + atom * factor
        return index

    return st.builds(total, parts, st.integers(0, 40))


def wholes():
    leaf = st.one_of(
        st.integers(-5, 5).map(lambda value: Const(value, I64)),
        indices().map(Position),
        indices().map(lambda index: Load("n.1", index, I64)),
    )

    def grow(inner):
        infix = st.sampled_from(["add", "sub", "mul", "floordiv", "mod", "bitand", "minimum"])
        return st.one_of(
            st.builds(apply, infix, inner, inner),
            st.builds(apply, st.sampled_from(["neg", "abs", "bitnot"]), inner),
        )

    return st.recursive(leaf, grow, max_leaves=5)


def conditions(inner):
    compare = st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"])
    return st.one_of(
        st.builds(lambda fn, x, y: apply(fn, x, y, dtype=BOOL), compare, inner, inner),
        st.builds(lambda x: apply("isnan", x, dtype=BOOL), inner),
    )


def rows():
    """Indices that depend on data."""
    inside = st.builds(
        lambda whole: value_index(apply("mod", whole, Const(9, I64)), 0, 8), wholes()
    )
    return st.builds(lambda row, index: row * 11 + index, inside, indices())


def floats():
    places = st.one_of(indices(), rows())
    leaf = st.one_of(
        st.sampled_from(SPECIAL).map(lambda value: Const(value, F32)),
        places.map(lambda index: Load("x", index, F32)),
        places.map(lambda index: Load("odd name", index, F32)),
        indices().map(lambda index: apply("cast", Load("inf", index, BF16), dtype=F32)),
        wholes().map(lambda whole: apply("cast", whole, dtype=F32)),
    )

    def grow(inner):
        infix = st.sampled_from(["add", "sub", "mul", "div", "maximum"])
        test = conditions(inner)
        both = st.builds(
            lambda fn, x, y: apply(fn, x, y, dtype=BOOL), st.sampled_from(["and", "or"]), test, test
        )
        kinds = st.sampled_from([ReduceKind.SUM, ReduceKind.MAX, ReduceKind.MIN])
        return st.one_of(
            st.builds(apply, infix, inner, inner),
            st.builds(lambda x: apply("add", x, apply("mul", x, x)), inner),
            st.builds(apply, st.sampled_from(["neg", "abs", "floor"]), inner),
            st.builds(apply, st.just("where"), both, inner, inner),
            st.builds(lambda m, at: Load("x", at, F32, m), test, indices()),
            st.builds(lambda kind, x: Reduce(kind, (K,), x), kinds, inner),
        )

    return st.recursive(leaf, grow, max_leaves=8)


@given(floats())
@settings(max_examples=200, deadline=None)
def test_any_formula(body):
    array = Array((Q, P), closed(body)) if binds_k(body) else Array((Q, P, K), body)
    found = check(array)
    assert same_bits(interpret_array(found, BUFFERS), interpret_array(array, BUFFERS))


def binds_k(body):
    return any(isinstance(node, Reduce) for node in walk(body))


def closed(body):
    """``K`` is free nowhere."""
    return Reduce(ReduceKind.MIN, (K,), body) if K in axes_of(body) else body


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "'[' is expected here"),
        ("axes i<4, i<5\n[i] -> f32\n1.0:f32", 1, 11, "the axis 'i' is defined twice"),
        ("axes i<-4\n[i] -> f32\n1.0:f32", 1, 6, "an axis of extent -4"),
        ("[i] -> f32\n1.0:f32", 1, 2, "there is no axis 'i'"),
        ("[] -> f33\n1.0:f32", 1, 7, "there is no dtype 'f33'"),
        ("[] -> f32\n1:i64", 2, 1, "the formula is i64"),
        ("[] -> f32\n1.0:f32 1.0:f32", 2, 9, "the line should end here"),
        ("[] -> f32\n1.0:f32\nmore", 3, 1, "the text should end here"),
        ("[] -> f32\n1.0", 2, 1, "a formula is expected here"),
        ("[] -> f32\nx", 2, 1, "'x' is no formula"),
        ("[] -> f32\nx[0]", 2, 5, "':' is expected here"),
        ("[] -> f32\nx[j]:f32", 2, 3, "there is no axis 'j'"),
        ("[] -> f32\nx[0 if 1:i64:f32", 2, 13, "']' is expected here"),
        ("[] -> f32\nfry(1.0:f32)", 2, 1, "fry is not a function of the loop IR"),
        ("[] -> f32\n1.0:f32 + 1.0:f64", 2, 1, "add mixes"),
        ("[] -> f32\n$0 + 1.0:f32", 2, 1, "there is no $0 here"),
        ("[] -> f32\nsum{} 1.0:f32", 2, 1, "a reduction needs an axis"),
        ("axes i<4\n[i] -> i64\n<(i//0)>", 3, 2, "division of an index by 0"),
        ("axes i<4\n[i] -> i64\n<{S_B}*i>", 3, 3, "there is no dim 'S_B'"),
        ("axes i<4\n[i] -> f32\nx[value(1:i64, 4, 2)]:f32", 3, 3, "no value lies in 4..2"),
    ],
)
def test_what_is_no_array_is_refused_with_its_place(text, line, column, message):
    with pytest.raises(ParseError) as caught:
        parse_array(text)
    assert message in caught.value.message
    assert (caught.value.line, caught.value.column) == (line, column)


WHOLE = """
axes i<4, j<8, k<8
[i, j] -> f32
  $0 = exp(x[8*i + (j//2) - 1 if <j> >= 1:i64]:f32)
  ($0 / (sum{k} x[8*i + value(n[k]:i64, 0, 7)]:f32)) + (-0.0:f32 * f32(-2:i64))
"""


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_texts_are_read_or_refused(data):
    """Never another error, whatever was typed."""
    at = data.draw(st.integers(0, len(WHOLE)))
    typed = data.draw(st.text(" ()[]{}<>,:=%$'\n+-*/.0129abfijkxT_", max_size=3))
    text = WHOLE[:at] + typed + WHOLE[at + data.draw(st.integers(0, 3)) :]
    try:
        found = parse_array(text)
    except ParseError:
        return
    check(found)
