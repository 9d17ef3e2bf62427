"""Formulas of indices: what is proved of them is true at every place, and reading them is exact."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import node_of, trace
from treadle.algebra.extents import Size
from treadle.graph.index_formulas import (
    All,
    AnyOne,
    AtMost,
    Choice,
    Element,
    IndexNumber,
    IndexQuotient,
    IndexVariable,
    Linear,
    SizeProduct,
    all_of,
    any_of,
    at_most,
    elements_in,
    equal,
    negated,
    quotient,
    variable,
)
from treadle.graph.index_proofs import Prover
from treadle.graph.index_reading import Reader
from treadle.graph.signature import StepGraph

aten = torch.ops.aten


def holds(condition):
    return Prover().holds(condition)


def impossible(condition):
    return Prover().impossible(condition)


def equivalent(left, right):
    return Prover().equivalent(left, right)


def number_of(linear, numbers):
    return linear.constant + sum(n * _at(each, numbers) for each, n in linear.terms)


def _at(each, numbers):
    match each:
        case IndexVariable(name=name):
            return numbers[name]
        case IndexQuotient(over, under):
            return number_of(over, numbers) // under
        case SizeProduct(atoms):
            found = 1
            for atom in atoms:
                found *= numbers[atom.name]
            return found
        case Element(low=0, high=1):
            return numbers["bit"]


def is_true(term, numbers):
    match term:
        case bool():
            return term
        case AtMost(linear):
            return number_of(linear, numbers) <= 0
        case All(parts):
            return all(is_true(each, numbers) for each in parts)
        case AnyOne(parts):
            return any(is_true(each, numbers) for each in parts)


def value(term, numbers):
    match term:
        case Linear():
            return number_of(term, numbers)
        case IndexNumber(found):
            return found
        case Choice(condition, yes, no):
            return value(yes if is_true(condition, numbers) else no, numbers)
        case _:
            return is_true(term, numbers)


T = Size.dim("t", 1, 6, 3)
SIZES = st.sampled_from([(5, 5), (4, 6), (1, 3), (7, 2), (T, T), (T, 4)])


@st.composite
def linears(draw, i, j):
    total = Linear(draw(st.integers(-7, 7)))
    for each in (i, j):
        unit = variable(each)
        if draw(st.integers(0, 3)) == 0:
            unit = quotient(unit.shifted(draw(st.integers(-3, 3))), draw(st.integers(2, 3)))
        total = total.plus(unit, draw(st.integers(-2, 2)))
    if isinstance(i.size, Size):
        total = total.plus(Linear.of(T), draw(st.integers(-1, 1)))
    return total


@st.composite
def conditions(draw, i, j, depth=3):
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind <= 1:
        return at_most(draw(linears(i, j)))
    if kind == 2:
        return equal(draw(linears(i, j)), draw(linears(i, j)))
    if kind == 3:
        return negated(draw(conditions(i, j, depth - 1)))
    parts = [draw(conditions(i, j, depth - 1)) for _ in range(2)]
    return all_of(*parts) if kind == 4 else any_of(*parts)


def places(n, m):
    """All indices, of all sizes."""
    for t in range(1, 7):
        at = {"t": t}
        rows, columns = (t if isinstance(each, Size) else each for each in (n, m))
        for i, j in itertools.product(range(rows), range(columns)):
            yield {**at, "i": i, "j": j}


@given(st.data(), SIZES)
@settings(max_examples=400, deadline=None)
def test_what_is_proved_is_true_everywhere(data, sizes):
    i, j = IndexVariable("i", sizes[0]), IndexVariable("j", sizes[1])
    one, two = data.draw(conditions(i, j)), data.draw(conditions(i, j, 1))
    found = [(is_true(one, at), is_true(two, at)) for at in places(*sizes)]
    opposite = negated(one)
    assert all(is_true(opposite, at) is not is_true(one, at) for at in places(*sizes))
    if holds(one):
        assert all(first for first, _ in found)
    if impossible(one):
        assert not any(first for first, _ in found)
    if equivalent(one, two):
        assert all(first == second for first, second in found)


def test_proofs_hold_for_all_sizes():
    i, j = (variable(IndexVariable(name, T)) for name in "ij")
    inside = at_most(j.plus(i, -1))
    last = i.plus(j, -1).plus(Linear.of(T), -1)
    assert holds(at_most(last.shifted(1)))
    assert not holds(at_most(last.shifted(2)))
    assert equivalent(negated(inside), at_most(i.plus(j, -1).shifted(1)))
    both = equal(quotient(i, 2), quotient(j, 2))
    assert holds(any_of(negated(both), at_most(i.plus(j, -1).shifted(-1))))
    assert not holds(any_of(negated(both), at_most(i.plus(j, -1))))


def test_whole_numbers_between_others():
    i = variable(IndexVariable("i", 100))
    assert impossible(equal(i.times(2), Linear(7)))
    assert impossible(all_of(at_most(Linear(3).plus(i.times(-2))), at_most(i.times(3).shifted(-5))))


def test_patience_ends():
    i, j = (variable(IndexVariable(name, 9)) for name in "ij")
    apart = [any_of(at_most(i.plus(j, -1).shifted(n)), at_most(j.shifted(-n))) for n in range(9)]
    claim = any_of(*map(negated, apart), all_of(*apart))
    assert holds(claim)
    assert not Prover(patience=30).holds(claim)


# Reading.


def whole(draw, n, m, depth):
    """A program that makes a tensor of whole numbers, ``[n, m]`` or narrower."""
    kind = draw(st.integers(0, 11)) if depth else draw(st.integers(0, 2))
    inner = (lambda: whole(draw, n, m, depth - 1)) if depth else None
    number = draw(st.integers(-3, 3))
    if kind == 0:
        return lambda: torch.arange(n)[:, None]
    if kind == 1:
        return lambda: torch.arange(number, number + m)[None]
    if kind == 2:
        return lambda: torch.full((), number)
    x = inner()
    if kind == 3:
        y = inner()
        return lambda: x() + y()
    if kind == 4:
        y = inner()
        return lambda: x() - y()
    if kind == 5:
        return lambda: x() * number
    if kind == 6:
        return lambda: torch.div(x(), abs(number) + 1, rounding_mode="floor")
    if kind == 7:
        return lambda: torch.remainder(x(), abs(number) + 1)
    if kind == 8:
        return lambda: x().abs()
    if kind == 9:
        mask, y = boolean(draw, n, m, depth - 1), inner()
        return lambda: torch.where(mask(), x(), y())
    if kind == 10:
        return lambda: torch.cat([x().expand(n, m), x().expand(n, m) + 1], 1)[:, 1 : m + 1]
    return lambda: torch.rsub(x(), number)


def boolean(draw, n, m, depth):
    """A program that makes a tensor of truth values."""
    kind = draw(st.integers(0, 9)) if depth else 0
    if kind <= 3:
        x, y = whole(draw, n, m, depth), whole(draw, n, m, max(depth - 1, 0))
        name = draw(st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]))
        return lambda: getattr(torch, name)(x(), y())
    x = boolean(draw, n, m, depth - 1)
    if kind == 4:
        return lambda: ~x()
    if kind == 5:
        return lambda: x().expand(n, m).tril(depth - 1)
    if kind == 6:
        return lambda: torch.nn.functional.pad(x().expand(n, m), (1, 0), value=True)[:, :m]
    y = boolean(draw, n, m, depth - 1)
    if kind == 7:
        return lambda: x() & y()
    if kind == 8:
        return lambda: x() | y()
    return lambda: x().logical_xor(y())


@given(st.data(), st.sampled_from([(4, 4), (3, 5), (1, 4), (5, 1)]))
@settings(max_examples=150, deadline=None)
def test_reading_gives_the_numbers_of_eager(data, sizes):
    n, m = sizes
    make = boolean(data.draw, n, m, 3)
    step = trace(lambda x: (make().expand(n, m).float(), x), torch.zeros(1))
    expected = make().expand(n, m).float()
    node = step.returned[0]
    reader = Reader()
    i, j = IndexVariable("i", n), IndexVariable("j", m)
    term = reader.at(node, (variable(i), variable(j)))
    if reader.reasons:
        assert set(reader.reasons.values()) <= {"there are too many cases"}
        return
    for row, column in itertools.product(range(n), range(m)):
        assert value(term, {"i": row, "j": column}) == expected[row, column]


def read(program, *inputs, at=None):
    step: StepGraph = trace(program, *inputs)
    node = step.returned[0]
    reader = Reader()
    rank = node.meta["val"].dim()
    names = [variable(IndexVariable(f"d{k}", n)) for k, n in enumerate(node.meta["val"].shape)]
    assert rank == len(names)
    return reader, reader.at(node, at or names)


MOVES = {
    "permute": lambda: torch.arange(6)[:, None, None].expand(6, 2, 3).permute(2, 0, 1),
    "flip": lambda: (torch.arange(4)[:, None] * 3 + torch.arange(3)).flip(1),
    "select": lambda: (torch.arange(4)[:, None] * 3 + torch.arange(3)).select(0, -1),
    "transpose": lambda: (torch.arange(4)[:, None] * 3 + torch.arange(3)).t(),
    "steps": lambda: torch.arange(3, 20, 4)[1::2],
    "squeezed": lambda: torch.arange(5)[None, :, None].squeeze(0).squeeze(-1),
    "viewed": lambda: torch.arange(5).view(1, 5, 1, 1),
    "chosen": lambda: torch.arange(7, 12)[torch.arange(4) + 1],
    "counted": lambda: torch.ones(6, dtype=torch.bool).cumsum(0),
    "as floats": lambda: (torch.arange(5).float() - 2.0) * 2.0,
    "constants": lambda: (1.0 - torch.ones(3, 3).tril()) * torch.finfo(torch.float32).min,
    "masked": lambda: torch.zeros(3, 4).masked_fill(torch.ones(3, 4).triu(1) > 0, -torch.inf),
    "new": lambda: torch.arange(3).new_full((2, 2), 5),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    reader, term = read(lambda x: (MOVES[name](), x), torch.zeros(1))
    assert not reader.reasons
    expected = MOVES[name]()
    for at in itertools.product(*map(range, expected.shape)):
        found = value(term, {f"d{k}": place for k, place in enumerate(at)})
        assert found == expected[at]


UNREAD = {
    "input": (lambda x: x, "has no formula"),
    "sum": (lambda x: torch.arange(4).sum(0), "has no formula"),
    "dims joined": (lambda x: (torch.arange(4)[:, None] + torch.arange(3)).view(12), "makes [12]"),
    "outside": (lambda x: torch.arange(4)[torch.arange(3) - 1], "outside of"),
    "product": (lambda x: torch.arange(4) * torch.arange(4), "multiplies variables"),
    "overflow": (lambda x: (torch.arange(4) * 100).to(torch.int8), "does not hold"),
    "large floats": (lambda x: torch.arange(300).to(torch.bfloat16), "does not hold"),
    "true division": (lambda x: torch.arange(4) / 2, "has no formula"),
    "divided by 0": (lambda x: torch.arange(4) // -1, "no positive number"),
    "rounded to 0": (
        lambda x: torch.div(torch.arange(4) - 2, 2, rounding_mode="trunc"), "rounds by trunc",
    ),
    "other counts": (lambda x: torch.arange(4).cumsum(0), "differs from place to place"),
    "mixed": (lambda x: torch.arange(4) < 1.5, "compares whole numbers"),
    "bits": (lambda x: torch.arange(4) & 1, "combines the bits"),
    "fractions of floats": (
        lambda x: torch.arange(4).float() + 0.5, "meets a number that indices decide",
    ),
    "no number of the dtype": (lambda x: torch.ones(3, 3).tril() * 0.1, "is no number of"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_refusals(name):
    program, reason = UNREAD[name]
    reader, _ = read(lambda x: (program(x), x), torch.zeros(4))
    assert any(reason in each for each in reader.reasons.values()), reader.reasons


def test_what_the_run_decides_is_the_same_at_the_same_place():
    i, j = (variable(IndexVariable(name, 5)) for name in "ij")
    step = trace(lambda ids: (ids[:, None] == ids[None], ids), torch.arange(5))
    reader, node = Reader(), step.returned[0]
    assert holds(reader.at(node, (i, i)))
    term = reader.at(node, (i, j))
    assert not holds(term)
    assert not impossible(term)
    assert [str(each) for each in elements_in(term)] == ["ids[i]", "ids[j]"]


def test_reading_ends_with_long_chains():
    def program(x):
        y = torch.arange(4)
        for _ in range(300):
            y = y + 1
        return y, x

    reader, _ = read(program, torch.zeros(1))
    assert any("too many steps" in each for each in reader.reasons.values())


def test_a_sum_of_packed_documents_is_0_for_one_document():
    """What transformers computes of positions that are an arange."""

    def program(x):
        positions = torch.arange(9)[None].expand(2, -1)
        before = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        return (before != 1).cumsum(-1), x

    reader, term = read(program, torch.zeros(1))
    assert not reader.reasons
    assert term == Linear(0)


def test_uses_of_one_value_are_read_once():
    step = trace(lambda x: (x.neg(), x), torch.zeros(3))
    node = node_of(step, aten.neg.default)
    reader = Reader()
    at = (variable(IndexVariable("i", 3)),)
    assert reader.at(node, at) is reader.at(node, at)
