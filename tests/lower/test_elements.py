"""Elements of values: to read them off the formulas of lowering is exact."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algebra.places import value
from testing import node_of, trace
from treadle.algebra.conditions import elements_in
from treadle.algebra.index import ZERO, Axis
from treadle.algebra.proofs import Prover
from treadle.graph.core.signature import StepGraph
from treadle.lower.elements import Elements

aten = torch.ops.aten


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
    reader = Elements()
    i, j = Axis(n), Axis(m)
    term = reader.at(node, (i.as_index, j.as_index))
    if reader.reasons:
        assert set(reader.reasons.values()) <= {"there are too many cases"}
        return
    for row, column in itertools.product(range(n), range(m)):
        assert value(term, {i: row, j: column}) == expected[row, column]


def read(program, *inputs):
    step: StepGraph = trace(program, *inputs)
    node = step.returned[0]
    reader = Elements()
    axes = [Axis(n) for n in node.meta["val"].shape]
    return reader, axes, reader.at(node, [axis.as_index for axis in axes])


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
    "dims joined": lambda: (torch.arange(4)[:, None] + torch.arange(3)).view(12),
    "tenths": lambda: torch.ones(3, 3).tril() * 0.1,
    "limits": lambda: (torch.arange(7) - 3).clamp(-1, 2),
    "new": lambda: torch.arange(3).new_full((2, 2), 5),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    reader, axes, term = read(lambda x: (MOVES[name](), x), torch.zeros(1))
    assert not reader.reasons
    expected = MOVES[name]()
    for at in itertools.product(*map(range, expected.shape)):
        found = value(term, dict(zip(axes, at, strict=True)))
        assert found == expected[at]


UNREAD = {
    "input": (lambda x: x, "has no formula"),
    "sum": (lambda x: torch.arange(4).sum(0), "has no formula"),
    "outside": (lambda x: torch.arange(4)[torch.arange(3) - 1], "has cases"),
    "product": (lambda x: torch.arange(4) * torch.arange(4), "multiplies variables"),
    "overflow": (lambda x: (torch.arange(4) * 100).to(torch.int8), "does not hold"),
    "large floats": (lambda x: torch.arange(300).to(torch.bfloat16), "does not hold"),
    "true division": (lambda x: torch.arange(4) / 2, "div of indices"),
    "divided by 0": (lambda x: torch.arange(4) // -1, "no positive number"),
    "rounded to 0": (
        lambda x: torch.div(torch.arange(4) - 2, 2, rounding_mode="trunc"), "fmod of indices",
    ),
    "other counts": (lambda x: torch.arange(4).cumsum(0), "differs from place to place"),
    "mixed": (lambda x: torch.arange(4) < 1.5, "1.5 meets a number"),
    "bits": (lambda x: torch.arange(4) & 1, "bitand of indices"),
    "fractions of floats": (
        lambda x: torch.arange(4).float() + 0.5, "meets a number that indices decide",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_refusals(name):
    program, reason = UNREAD[name]
    reader, _, _ = read(lambda x: (program(x), x), torch.zeros(4))
    assert any(reason in each for each in reader.reasons.values()), reader.reasons


def test_what_the_run_decides_is_the_same_at_the_same_place():
    i, j = (Axis(5).as_index for _ in "ij")
    step = trace(lambda ids: (ids[:, None] == ids[None], ids), torch.arange(5))
    reader, node = Elements(), step.returned[0]
    assert Prover().holds(reader.at(node, (i, i)))
    term = reader.at(node, (i, j))
    assert not Prover().holds(term)
    assert not Prover().impossible(term)
    assert [each.formula.at for each in elements_in(term)] == [(i,), (j,)]


def test_reading_ends_with_long_chains():
    def program(x):
        y = torch.arange(4)
        for _ in range(300):
            y = y + 1
        return y, x

    reader, _, _ = read(program, torch.zeros(1))
    assert any("too many steps" in each for each in reader.reasons.values())


def test_a_sum_of_packed_documents_is_0_for_one_document():
    """What transformers computes of positions that are an arange."""

    def program(x):
        positions = torch.arange(9)[None].expand(2, -1)
        before = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        return (before != 1).cumsum(-1), x

    reader, _, term = read(program, torch.zeros(1))
    assert not reader.reasons
    assert term == ZERO


def test_uses_of_one_value_are_read_once():
    step = trace(lambda x: (x.neg(), x), torch.zeros(3))
    node = node_of(step, aten.neg.default)
    reader = Elements()
    at = (Axis(3).as_index,)
    assert reader.at(node, at) is reader.at(node, at)
