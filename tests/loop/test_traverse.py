"""Walking, rebuilding and sharing of formulas."""

import torch

from treadle.algebra.index import Axis, Index
from treadle.loop.expr import Apply, Array, Const, Load, Position, Reduce, ReduceKind
from treadle.loop.interpret import interpret_array
from treadle.loop.traverse import (
    axes_of,
    loads,
    map_expr,
    structure,
    substitute,
    value_index,
    walk,
)

F32, I64 = torch.float32, torch.int64
P, Q, K = Axis(4), Axis(6), Axis(6)


def chain(axis, length):
    body = Load("x", Index.of(axis), F32)
    for _ in range(length):
        body = Apply("add", (body, body), F32)
    return body


def test_walk_gives_each_node_once_operands_first():
    body = chain(P, 3000)
    nodes = list(walk(body))
    assert len(nodes) == 3001
    assert nodes[0] == Load("x", Index.of(P), F32)
    assert nodes[-1] is body


def test_axes_leave_out_what_a_reduction_binds():
    inner = Load("x", P * 6 + K, F32)
    body = Apply("add", (Reduce(ReduceKind.SUM, (K,), inner), Load("y", Index.of(Q), F32)), F32)
    assert axes_of(body) == {P, Q}
    assert axes_of(inner) == {P, K}


def test_loads_are_distinct_and_include_masks_and_indices():
    tokens = Load("tokens", Index.of(P), I64)
    mask = Load("mask", Index.of(Q), torch.bool)
    body = Load("w", value_index(tokens, 0, 9) * 6 + Q, F32, mask)
    again = Load("tokens", Index.of(P), I64)
    both = Apply("add", (body, Apply("cast", (again,), F32)), F32)
    assert loads(both) == (tokens, mask, body)


def test_substitute_reaches_masks_values_and_reductions():
    x, tokens = torch.randn(4, 6), torch.randint(0, 4, (4,))
    row = value_index(Load("tokens", Index.of(P), I64), 0, 3)
    mask = Apply("lt", (Position(Index.of(P)), Const(2, I64)), torch.bool)
    body = Reduce(ReduceKind.MAX, (K,), Load("x", row * 6 + K, F32, mask))
    flipped = Axis(4)
    buffers = {"x": x.flatten(), "tokens": tokens}
    before = interpret_array(Array((P,), body), buffers)
    after = interpret_array(Array((flipped,), substitute(body, {P: 3 - flipped})), buffers)
    assert after.equal(before.flip(0))
    assert axes_of(substitute(body, {P: 1})) == frozenset()


def test_substitute_keeps_what_does_not_change_and_what_is_shared():
    body = chain(P, 1000)
    assert substitute(body, {Q: 0}) is body
    moved = substitute(body, {P: Q // 2})
    assert len(list(walk(moved))) == 1001
    assert moved.operands[0] is moved.operands[1]


def test_map_replaces_loads_everywhere():
    tokens = Load("tokens", Index.of(P), I64)
    body = Apply("neg", (Load("w", value_index(tokens, 0, 9), F32),), F32)

    def rename(node):
        return Load(f"{node.buffer}_", node.index, node.dtype) if isinstance(node, Load) else node

    assert [load.buffer for load in loads(map_expr(body, rename))] == ["tokens_", "w_"]
    assert map_expr(body, lambda node: node) is body


def test_structure_ignores_sharing_and_tells_zeros_apart():
    def pair(x, y):
        return Apply("add", (x, y), F32)

    shared = chain(P, 1)
    assert structure(pair(shared, shared)) == structure(pair(chain(P, 1), chain(P, 1)))
    assert structure(chain(P, 1)) != structure(chain(Q, 1))
    assert structure(Const(0.0, F32)) != structure(Const(-0.0, F32))
    assert structure(Const(float("nan"), F32)) == structure(Const(float("nan"), F32))


def test_literals_and_hashes():
    assert Const(0.0, F32) != Const(-0.0, F32)
    assert Const(float("nan"), F32) == Const(float("nan"), F32)
    assert Const(1, I64) != Const(1, F32)
    assert len({chain(P, 200)}) == 1  # exponential unless hashes are remembered
    load = Load("x", Index.of(P), F32)
    assert hash(load) == hash(Load("x", Index.of(P), F32))
