import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testing import check_numbers, check_pass, node_of, trace
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.pieces import Piece, piece_of
from treadle.graph.core.node_info import with_info
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.rewrite.rules import explain
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.products.split_cat import SimplifySplitCat, cuts_of
from treadle.util.refusals import attempt

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 3)
CLEANING = (RemoveNoOps(), SimplifySplitCat(), RemoveDeadCode())


def targets(step):
    return [node.target for node in step.graph.nodes if node.op == "call_function"]


WHOLE = {
    "split": lambda x: torch.cat(torch.split(x, 4, 1), 1),
    "split_with_sizes": lambda x: torch.cat(torch.split(x, [1, 0, 5], 1), -1),
    "chunk": lambda x: torch.cat(torch.chunk(x, 3)),
    "slices": lambda x: torch.cat([x[:, :2], x[:, 2:-1], x[:, -1:]], 1),
    "unbind": lambda x: torch.stack(torch.unbind(x, 1), 1),
    "selects": lambda x: torch.stack([x[0], x[1], x[-2], x[3]]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_cut_and_joined_again_goes(name):
    def program(x):
        return WHOLE[name](x).exp()

    step = trace(program, X)
    run_passes(step, CLEANING)
    assert targets(step) == [aten.exp.default]
    check_numbers(step, program, (X,))


NOT_WHOLE = {
    "other order": (lambda x: torch.cat([x[:, 2:], x[:, :2]], 1), "do not follow"),
    "gap": (lambda x: torch.cat([x[:, :2], x[:, 3:]], 1), "do not follow"),
    "twice": (lambda x: torch.cat([x[:, :6], x[:, 0:3]], 1), "is not a slice"),
    "end is missing": (lambda x: torch.cat([x[:, :2], x[:, 2:5]], 1), "a part of x is missing"),
    "begin is missing": (lambda x: torch.cat([x[:, 1:2], x[:, 2:]], 1), "a part of x is missing"),
    "other dim": (lambda x: torch.cat(torch.split(x, 2, 0), 1), "x is split along another dim"),
    "no pieces": (lambda x: torch.cat([x.exp(), x], 1), "exp is not a slice"),
    "steps": (lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1), "is not a slice"),
    "two values": (lambda x: torch.cat([x[:, :3], x.exp()[:, 3:]], 1), "do not follow"),
    "other strides": (lambda x: torch.cat([*x.t().split(2)]), "changes f32[6, 4] to f32[6, 4]"),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_what_is_not_all_of_a_value_stays(name):
    body, reason = NOT_WHOLE[name]
    step = trace(lambda x: body(x).exp(), X)
    cat = node_of(step, aten.cat.default)
    assert reason in explain(RemoveNoOps(), cat)
    RemoveNoOps().run(step)
    assert aten.cat.default in targets(step)
    check_numbers(step, lambda x: body(x).exp(), (X,))


NOT_STACKED = {
    "other order": (lambda x: torch.stack([x[1], x[0], x[2], x[3]]), "do not follow"),
    "part": (lambda x: torch.stack([x[0], x[1]]), "a part of x is missing"),
    "other dim": (lambda x: torch.stack(torch.unbind(x, 0), 1), "x is split along another dim"),
    "not selected": (lambda x: torch.stack([x.exp(), x]), "exp is not selected from anything"),
}


@pytest.mark.parametrize("name", NOT_STACKED)
def test_what_is_not_stacked_as_it_was_stays(name):
    body, reason = NOT_STACKED[name]
    step = trace(body, X)
    assert reason in explain(RemoveNoOps(), node_of(step, aten.stack.default))


def test_an_output_does_not_become_the_input():
    step = trace(lambda x: torch.cat(torch.split(x, 2, 1), 1), X)
    assert "is an output, x an input" in explain(RemoveNoOps(), node_of(step, aten.cat.default))
    run_passes(step, CLEANING)
    (returned,) = step.returned
    assert returned.target is aten.cat.default
    assert analyse(step).base(returned) is None


def test_the_pieces_of_a_cat_are_its_operands():
    def program(x, y):
        a, b = torch.split(torch.cat([x, y], 1), [6, 3], 1)
        return a.exp(), b[:, 1:].relu()

    step = check_pass(
        SimplifySplitCat(),
        program,
        (X, Y),
        after="""
            x: f32[4, 6]
            y: f32[4, 3]
            cat: f32[4, 9] = cat([x, y], 1)
            exp: f32[4, 6] = exp(x)
            slice: f32[4, 2] = slice.Tensor(y, 1, 1, 9223372036854775807)
            relu: f32[4, 2] = relu(slice)
            return [exp, relu]
        """,
    )
    assert SimplifySplitCat().run(step) == 0


def test_a_part_of_an_operand():
    check_pass(
        SimplifySplitCat(),
        lambda x, y: torch.cat([x, y], 1)[:, 7:9].exp(),
        (X, Y),
        after="""
            x: f32[4, 6]
            y: f32[4, 3]
            cat: f32[4, 9] = cat([x, y], 1)
            slice: f32[4, 2] = slice.Tensor(y, 1, 1, 3)
            exp: f32[4, 2] = exp(slice)
            return [exp]
        """,
    )


def test_a_cat_of_a_cat_and_of_a_slice_of_it_is_one_cat():
    check_pass(
        SimplifySplitCat(),
        lambda x, y: torch.cat([(c := torch.cat([x, y], 1)), c[:, 1:4]], 1),
        (X, Y),
        after="""
            x: f32[4, 6]
            y: f32[4, 3]
            slice: f32[4, 3] = slice.Tensor(x, 1, 1, 4)
            cat: f32[4, 12] = cat([x, y, slice], 1)
            return [cat]
        """,
    )


def test_neighbours_are_one_piece():
    check_pass(
        SimplifySplitCat(),
        lambda x, y: torch.cat([x[:, :2], x[:, 2:5], y, y], 1),
        (X, Y),
        after="""
            x: f32[4, 6]
            y: f32[4, 3]
            slice: f32[4, 2] = slice.Tensor(x, 1, 0, 2)
            slice.1: f32[4, 3] = slice.Tensor(x, 1, 2, 5)
            slice.2: f32[4, 5] = slice.Tensor(x, 1, 0, 5)
            cat: f32[4, 11] = cat([slice.2, y, y], 1)
            return [cat]
        """,
    )


def test_what_is_selected_from_a_stack_is_its_operand():
    check_pass(
        SimplifySplitCat(),
        lambda x: torch.stack([x, x.exp()], 1)[:, 1].relu(),
        (X,),
        after="""
            x: f32[4, 6]
            exp: f32[4, 6] = exp(x)
            stack: f32[4, 2, 6] = stack([x, exp], 1)
            relu: f32[4, 6] = relu(exp)
            return [relu]
        """,
    )


STAYS = {
    "read whole": (
        lambda x, y: (c := torch.cat([x, y], 1))[:, 6:].exp().sum() + c.sum(),
        "cat is read whole by sum",
    ),
    "returned": (lambda x, y: torch.cat([x, y], 1)[:, 6:], "is returned and would be y"),
    "a view is returned": (
        lambda x, y: torch.cat([x, y], 1)[:, :6].t(),
        "is returned and would be x",
    ),
    "across operands": (
        lambda x, y: torch.cat([x, y], 1)[:, 5:8].exp(),
        "is not inside one operand of cat",
    ),
    "other dim": (lambda x, y: torch.cat([x, y], 1)[:2].exp(), "cuts another dim"),
    "steps": (lambda x, y: torch.cat([x, y], 1)[:, 0:6:2].exp(), "is not a slice"),
    "not cut": (lambda x, y: torch.cat([x, y], 1), "cat is read whole by output"),
    "converted": (
        lambda x, y: torch.cat([x.double(), y], 1)[:, 6:].exp(),
        "cat converts or skips an operand",
    ),
    "columns": (
        lambda x, y: torch.cat([x.t().exp(), x.t()])[:6].relu(),
        "is not in row-major order",
    ),
    "by strides": (
        lambda x, y: torch.cat([x, y], 1)[:, 6:].as_strided((2,), (1,)).exp(),
        "is read by its strides",
    ),
    "empty vector": (
        lambda x, y: torch.cat([x, torch.empty(0), y], 1)[:, 6:].exp(),
        "converts or skips an operand",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_and_says_why(name):
    program, reason = STAYS[name]
    step = trace(program, X, Y)
    cat = node_of(step, aten.cat.default)
    assert reason in attempt(cuts_of, cat).message
    before = len(step.graph.nodes)
    SimplifySplitCat().run(step)
    assert len(step.graph.nodes) == before
    check_numbers(step, program, (X, Y))


def test_regions_stay_apart():
    step = trace(lambda x, y: torch.cat([x, y], 1)[:, 6:].exp(), X, Y)
    piece = node_of(step, aten.cat.default).next
    assert piece.target is aten.slice.Tensor
    with_info(piece, region=1)
    assert (
        "is in another region than cat" in attempt(cuts_of, node_of(step, aten.cat.default)).message
    )
    assert SimplifySplitCat().run(step) == 0


def test_each_is_an_option():
    def program(x, y):
        cut = torch.cat([x, y], 1)[:, 6:].exp()
        nested = torch.cat([torch.cat([x.sin(), y.sin()], 1), y], 1)
        return cut, nested, torch.cat([x[:, :2], x[:, 2:5]], 1)

    every = {"cuts": False, "nested": False, "runs": False}
    assert SimplifySplitCat(**every).run(trace(program, X, Y)) == 0
    for option in every:
        only = SimplifySplitCat(**{**every, option: True})
        step = trace(program, X, Y)
        assert only.run(step) == 1
        check_numbers(step, program, (X, Y))


def test_an_inner_cat_that_others_read_stays():
    step = trace(lambda x, y: (torch.cat([c := torch.cat([x, y], 1), y], 1), c.sum()), X, Y)
    assert SimplifySplitCat().run(step) == 0


def test_a_cat_with_another_layout_stays():
    """Without the inner cat the operands would decide the layout."""

    def program(x):
        nested = torch.cat([torch.cat([x, x.contiguous()]), x.contiguous()])
        return nested, x.sum()

    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    step = trace(program, x)
    strides = [each.meta["val"].stride() for each in step.returned]
    SimplifySplitCat().run(step)
    assert [each.meta["val"].stride() for each in step.returned] == strides
    check_numbers(step, program, (x,))


@pytest.mark.parametrize(
    ("cut", "start", "stop"),
    [
        (lambda x: x[:, 2:], 2, 6),
        (lambda x: x[:, -4:-1], 2, 5),
        (lambda x: x[:, -9:2], 0, 2),
        (lambda x: x[:, 4:2], 4, 4),
        (lambda x: x[:, 9:], 6, 6),
        (lambda x: torch.split(x, 4, 1)[1], 4, 6),
        (lambda x: torch.split(x, [1, 5], -1)[1], 1, 6),
    ],
)
def test_bounds_of_pieces(cut, start, stop):
    step = trace(lambda x: cut(x).exp(), X)
    (piece,) = node_of(step, aten.exp.default).all_input_nodes
    (x,) = step.placeholders
    assert piece_of(piece) == Piece(x, 1, start, stop)


@st.composite
def cuts_and_joins(draw):
    """Lengths, how they are joined, and what is cut from that."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=1, max_size=4))
    total = sum(lengths)
    bounds = st.tuples(st.integers(0, total), st.integers(0, total)).map(sorted)
    return lengths, draw(st.lists(bounds, min_size=1, max_size=3)), draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(cuts_and_joins(), st.sampled_from([0, 1]), st.sampled_from([0, 1, 3]))
def test_any_cuts_of_any_cat(case, dim, other):
    lengths, bounds, again = case
    shapes = [(n, other) if dim == 0 else (other, n) for n in lengths]

    def program(x):
        operands = [x.new_full(shape, at + 0.5).sin() for at, shape in enumerate(shapes)]
        joined = torch.cat(operands, dim)
        pieces = [aten.slice.Tensor(joined, dim, start, stop) for start, stop in bounds]
        if again:
            pieces = [torch.cat(pieces, dim), torch.cat([joined, *pieces], dim)]
        return [each.exp() for each in pieces]

    step = trace(program, X)
    run_passes(step, CLEANING)
    check_numbers(step, program, (X,))
    assert SimplifySplitCat().run(step) == 0
