"""Reductions that are read in rows alone: reduce-scatters, and numbers made of parts."""

import math
from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from passes.comm.communicating import all_reduce, calls, wait
from passes.comm.lockstep import run_ranks
from testing import show_plain, trace
from treadle.graph.core.collectives import CollectiveKind, collectives_in
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Role
from treadle.graph.core.verify import verify
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.comm.sharding.scatter_reductions import ScatterReductions, refusals

aten = torch.ops.aten
SCATTER = ScatterReductions()
G = torch.randn(5, 3)
B = torch.randn(5)


def mean(x):
    return wait(all_reduce(x))


def rows_of(rank, ranks, count):
    chunk = -(-count // ranks)
    begin = min(rank * chunk, count)
    return begin, min(begin + chunk, count)


def own_of(rank, ranks):
    def own(x):
        begin, end = rows_of(rank, ranks, x.shape[0])
        return x.narrow(0, begin, end - begin)

    return own


def step_of(make, inputs, rank=1, ranks=2, marks=None):
    """``make(own)`` is the program of a rank, whose rows ``own`` takes: the first ``marks`` slices,
    or all."""
    step = trace(make(own_of(rank, ranks)), *inputs, roles={"p": Role.PARAMETER})
    for node in step.graph.find_nodes(op="call_function", target=aten.slice.Tensor)[:marks]:
        with_info(node, own_rows=ranks)
    return step


def scattered(make, inputs, ranks=2):
    """The steps of all ranks after the pass, which compute what they computed before."""
    before = [step_of(make, inputs, rank, ranks) for rank in range(ranks)]
    after = [each.copy() for each in before]
    for each in after:
        run_passes(each, [SCATTER])
        each.graph.lint()
        verify(each)
        assert SCATTER.run(each) == 0, "a second run must find nothing to do"
    torch.manual_seed(0)
    shared = torch.randn_like(inputs[-1])
    given = [
        [shared if each.name == "p" else torch.randn_like(value) for each, value in named]
        for step in before
        for named in [list(zip(step.signature.inputs, inputs, strict=True))]
    ]
    groups = {"0": [list(range(ranks))]}
    wanted, found = (run_ranks(each, given, groups) for each in (before, after))
    for new, old in zip(found.outputs, wanted.outputs, strict=True):
        for left, right in zip(new, old, strict=True):
            torch.testing.assert_close(left, right, equal_nan=True)
    kinds = [[each.kind for each in collectives_in(step.graph)] for step in after]
    assert all(each == kinds[0] for each in kinds), "ranks decide alike"
    return after


def kinds_of(step):
    return [each.kind for each in collectives_in(step.graph)]


AR, RS, AG = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
)


def clipped(own):
    def program(g, b):
        g, b = mean(g), mean(b)
        norm = torch.stack([g.norm(), b.norm()]).norm()
        factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        return own(g * factor), own(b * factor), norm

    return program


def test_a_clipped_gradient_is_never_whole():
    steps = scattered(clipped, (G, B))
    after = """
        g: f32[5, 3]
        b: f32[5]
        new_zeros: f32[1, 3] = new_zeros(g, [1, 3])
        cat: f32[6, 3] = cat([g, new_zeros])
        reduce_scatter_tensor: f32[3, 3] = reduce_scatter_tensor(cat, sum, 2, 0)
        new_zeros.1: f32[1] = new_zeros(b, [1])
        cat.1: f32[6] = cat([b, new_zeros.1])
        reduce_scatter_tensor.1: f32[3] = reduce_scatter_tensor(cat.1, sum, 2, 0)
        wait_tensor: f32[3, 3] = wait_tensor(reduce_scatter_tensor)
        slice: f32[2, 3] = slice.Tensor(wait_tensor, 0, 0, 2)
        wait_tensor.1: f32[3] = wait_tensor(reduce_scatter_tensor.1)
        slice.1: f32[2] = slice.Tensor(wait_tensor.1, 0, 0, 2)
        mul: f32[2, 3] = mul.Tensor(slice, slice)
        sum: f32[] = sum(mul)
        mul.1: f32[2] = mul.Tensor(slice.1, slice.1)
        sum.1: f32[] = sum(mul.1)
        stack: f32[2] = stack([sum, sum.1])
        all_gather_into_tensor: f32[4] = all_gather_into_tensor(stack, 2, 0)
        wait_tensor.2: f32[4] = wait_tensor(all_gather_into_tensor)
        view: f32[2, 2] = view(wait_tensor.2, [2, 2])
        sum.2: f32[2] = sum.dim_IntList(view, [0])
        select: f32[] = select.int(sum.2, 0, 0)
        sqrt: f32[] = sqrt(select)
        select.1: f32[] = select.int(sum.2, 0, 1)
        sqrt.1: f32[] = sqrt(select.1)
        stack.1: f32[2] = stack([sqrt, sqrt.1])
        linalg_vector_norm: f32[] = linalg_vector_norm(stack.1)
        add: f32[] = add.Tensor(linalg_vector_norm, 1e-06)
        reciprocal: f32[] = reciprocal(add)
        mul.2: f32[] = mul.Tensor(reciprocal, 0.1)
        clamp: f32[] = clamp(mul.2, None, 1.0)
        mul.3: f32[2, 3] = mul.Tensor(slice, clamp)
        mul.4: f32[2] = mul.Tensor(slice.1, clamp)
        return [mul.3, mul.4, linalg_vector_norm]
    """
    assert show_plain(steps[1]) == dedent(after).strip()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.5, math.inf])
def test_clip_grad_norm(order, foreach):
    def make(own):
        def program(g, b):
            parameters = nn.Parameter(g), nn.Parameter(b)
            for each, grad in zip(parameters, (g, b), strict=True):
                each.grad = mean(grad)
            norm = nn.utils.clip_grad_norm_(parameters, 0.1, order, foreach=foreach)
            return *(own(each.grad) for each in parameters), norm

        return program

    for ranks in (2, 4):  # of four ranks the last has no rows of five
        for each in scattered(functional(make), (G, B), ranks):
            assert kinds_of(each) == [RS, RS, AG]


def functional(make):
    """Without writes: as capture gives it."""
    from torch.func import functionalize

    return lambda own: functionalize(make(own))


NUMBERS = {
    "norm": lambda x: x.norm(),
    "norm 0": lambda x: x.relu().norm(0),
    "norm -inf": lambda x: x.norm(-math.inf),
    "norm in f64": lambda x: torch.linalg.vector_norm(x, 3, dtype=torch.float64),
    "sum": lambda x: x.sum(),
    "sum of all dims": lambda x: x.sum((0, 1)),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(),
    "any": lambda x: (x > 0.5).any(),
    "all finite": lambda x: x.isfinite().all(),
    "how many": lambda x: (x > 0).sum(),
    "half": lambda x: x.half().norm(),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NUMBERS)
def test_one_number_is_made_of_parts(name, ranks):
    def make(own):
        def program(g):
            g = mean(g)
            return own(g), NUMBERS[name](g)

        return program

    for step in scattered(make, (G,), ranks):
        assert kinds_of(step) == [RS, AG]


def test_a_number_that_is_none_stays_none():
    def make(own):
        def program(g):
            g = mean(g.clamp(min=0).log())
            return own(g), g.norm(math.inf), (g * 0).amax(), g.isfinite().all()

        return program

    for step in scattered(make, (G,), 2):
        assert kinds_of(step) == [RS, AG, AG]


def test_numbers_that_nobody_reads_in_between_are_gathered_together():
    def make(own):
        def program(g, b):
            g, b = mean(g), mean(b)
            g = g / g.norm()
            b = b / b.norm()
            together = g.sum() + b.sum()
            return own(g), own(b), together

        return program

    (step, _) = scattered(make, (G, B))
    assert kinds_of(step) == [RS, RS, AG, AG, AG]


def test_what_is_whole_beside_rows_is_cut():
    def make(own):
        def program(g, p):
            g = mean(g) + 0.1 * p + p.select(0, 1) + p.sum()
            return own(g), g.norm()

        return program

    for step in scattered(make, (G, G), 3):
        assert kinds_of(step) == [RS, AG]


def test_one_row_is_not_repeated():
    def make(own):
        def program(g, p):
            g = mean(g) * p
            return own(g), g.sum()

        return program

    for step in scattered(make, (torch.randn(1, 3), torch.randn(1, 3)), 3):
        assert kinds_of(step) == [RS, AG]


def test_a_layout_of_columns_is_copied():
    def make(own):
        def program(g):
            g = wait(all_reduce(g.t()))
            return own(g), g.norm()

        return program

    for step in scattered(make, (torch.randn(3, 4),)):
        assert "clone" in calls(step)


def test_a_list_keeps_what_stays_whole():
    def make(own):
        def program(g, b):
            means = mean(g), mean(b)
            norms = torch._foreach_norm(means)
            g, b = torch._foreach_mul(means, 1 / torch.stack(norms).norm())
            return own(g), b, b.sum()

        return program

    for step in scattered(make, (G, B), 3):
        assert kinds_of(step) == [RS, AR, AG]


REFUSALS: dict[str, tuple[Callable[..., Callable[..., object]], str]] = {
    "a product": (
        lambda own: lambda g: (own(m := mean(g)), m @ m.t()),
        "t (aten.t.default) reads all of wait_tensor",
    ),
    "what leaves the step": (lambda own: lambda g: (own(m := mean(g)), m), "wait_tensor leaves"),
    "what is made of it leaves": (
        lambda own: lambda g: (own(m := mean(g)), m.sin()),
        "sin leaves the step",
    ),
    "sums of columns": (
        lambda own: lambda g: (own(m := mean(g)), m.sum(0)),
        "sum_1 is more than one number: f32[3]",
    ),
    "more dims": (
        lambda own: lambda g: (own(m := mean(g)), (m + torch.ones(2, 5, 3)).sum()),
        "add has other dims than wait_tensor: f32[2, 5, 3]",
    ),
    "a list of products": (
        lambda own: lambda g: (own(m := mean(g)), torch._foreach_norm([m @ g.t()])[0]),
        "mm (aten.mm.default) reads all of wait_tensor",
    ),
    "nobody's rows": (
        lambda own: lambda g: (own(g), mean(g).norm()),
        "no rank takes its rows of wait_tensor",
    ),
    "other values": (
        lambda own: lambda g: (own(m := mean(g)), torch.rand_like(m).sum()),
        "rand_like (aten.rand_like.default) reads all of wait_tensor",
    ),
    "a number of noise": (
        lambda own: lambda g: (own(n := mean(g) + torch.rand(5, 3)), n.norm()),
        "linalg_vector_norm reads add, which may differ between ranks",
    ),
    "a number of a batch": (
        lambda own: lambda g: (own(n := mean(g) * g), n.norm()),
        "linalg_vector_norm reads mul, which may differ between ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_says_what_needs_a_whole_value(name):
    make, words = REFUSALS[name]
    step = step_of(make, (G,))
    before = show_plain(step)
    (start,) = collectives_in(step.graph)
    assert words in refusals(step)[start.waits[0]]
    assert SCATTER.run(step) == 0
    assert show_plain(step) == before
    assert kinds_of(step) == [AR]


def test_a_slice_of_the_user_s_is_none_of_ours():
    step = step_of(lambda own: lambda g: (own(m := mean(g)), m[3:5]), (G,), marks=1)
    (start,) = collectives_in(step.graph)
    assert "slice_2 (aten.slice.Tensor) reads all of" in refusals(step)[start.waits[0]]
    assert SCATTER.run(step) == 0


def test_one_that_needs_all_leaves_the_others_alone():
    def make(own):
        def program(g, b):
            g, b = mean(g), mean(b)
            both = g * b[:, None]
            return own(g), own(b), both.sum()

        return program

    step = step_of(make, (G, B))
    run_passes(step, [SCATTER])
    assert kinds_of(step) == [RS, AR, AG]


def test_noise_that_nobody_adds_up_is_of_each_rank():
    def make(own):
        return lambda g: (own(mean(g) + torch.rand(5, 3)),)

    step = step_of(make, (G,))
    run_passes(step, [SCATTER])
    assert kinds_of(step) == [RS]


def test_says_what_goes():
    step = step_of(clipped, (G, B))
    waits = {each.waits[0] for each in collectives_in(step.graph)}
    assert len(waits) == 2
    assert waits.isdisjoint(refusals(step))


def test_a_rank_with_all_rows_decides_as_one_with_none():
    """The slice of all of one row is no operation: the pass runs ahead of what removes those."""
    make = lambda own: lambda g: (own(m := mean(g)), m.norm())  # noqa: E731
    first, second = (step_of(make, (torch.randn(1, 3),), rank) for rank in (0, 1))
    for each in (first, second):
        run_passes(each, [SCATTER, RemoveNoOps()])
    assert kinds_of(first) == kinds_of(second) == [RS, AG]


BY_ELEMENT = {
    "scale": lambda m, p: m * 0.5,
    "clamp": lambda m, p: m.clamp(-0.5, 0.5),
    "decay": lambda m, p: m + 0.1 * p,
    "center": lambda m, p: m - m.mean(),
    "normalize": lambda m, p: m / (m.norm(3) + 1),
    "bound": lambda m, p: m / (m.abs().max() + 1),
    "where": lambda m, p: torch.where(m.isfinite().all(), m, torch.zeros_like(p)),
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(BY_ELEMENT)), max_size=4),
    st.integers(1, 7),
    st.integers(2, 4),
    st.sampled_from([(), (2,), (2, 2)]),
)
def test_any_chain_for_any_rows(names, rows, ranks, others):
    def make(own):
        def program(g, p):
            m = mean(g)
            for name in names:
                m = BY_ELEMENT[name](m, p)
            return own(m), m.norm()

        return program

    given = torch.randn(rows, *others)
    for step in scattered(make, (given, given), ranks):
        assert AR not in kinds_of(step)
