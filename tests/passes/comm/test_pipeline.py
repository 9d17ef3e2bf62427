"""D9: gathers and the products behind them, products and the reduce-scatters behind them, in
pieces."""

from textwrap import dedent

import pytest
import torch

from passes.comm.communicating import (
    all_gather,
    all_reduce,
    calls,
    count,
    user_operator,
    wait,
)
from passes.comm.lockstep import run_ranks
from testing import show_plain, trace
from treadle.algebra.extents import Size
from treadle.compat.distributed.collectives import collective_op
from treadle.compat.fake import symbolic_mode
from treadle.compiler.cleaning import cleaning_of
from treadle.compiler.communication import timed
from treadle.graph.analysis.dynamic import SampleMode, Symbols, pair
from treadle.graph.core.collectives import collectives_in, has_equal_parts
from treadle.graph.core.node_info import info, set_value, tensor_of, with_info
from treadle.graph.core.signature import Input, Role, Signature
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options
from treadle.passes.comm import communication_passes
from treadle.passes.comm.bucketing.bucket import BucketCollectives
from treadle.passes.comm.cost import (
    CollectiveCost,
    CommunicationModel,
    GroupLinks,
    from_measurements,
)
from treadle.passes.comm.overlap.pipeline import PipelineProducts
from treadle.passes.comm.overlap.sink import SinkWaits
from treadle.passes.comm.simulate import simulate_communication
from treadle.report.stages import Watcher
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.links import Curve, GroupMeasurement, Link
from treadle.targets.model import DeviceModel
from treadle.util.errors import TreadleError

X, A, BIAS = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6)
SLOW = 1e6
"""Bytes per second."""
ALIKE = DeviceModel("products as slow as that", {torch.float32: 6e6}, 1e12)


def costs(bandwidth=SLOW, latency=0.0, ranks=2):
    link = Link("told", latency, bandwidth)
    return CommunicationModel({"0": CollectiveCost(GroupLinks(ranks, 1, link, link))})


def pipeline(most=2, ranks=2, **given):
    """Cuts what can be cut, worth it or not."""
    usual = {"smallest_rows": 1, "gain": -9.0}
    return PipelineProducts(costs(ranks=ranks), ALIKE, most=most, **(usual | given))


def if_worth_it(most=2, device=ALIKE, smallest_rows=1, grows=True, **links):
    return PipelineProducts(
        costs(**links), device, most=most, smallest_rows=smallest_rows, grows=grows
    )


def gathered(x, ranks=2):
    return wait(collective_op("all_gather_into_tensor")(x, ranks, "0"))


def scattered(x, ranks=2):
    return wait(collective_op("reduce_scatter_tensor")(x, "sum", ranks, "0"))


def whole_numbers(inputs, ranks):
    """Of which products and sums are exact: nothing rounds, so nothing may differ."""
    torch.manual_seed(0)
    return [
        [torch.randint(-3, 4, each.shape).to(each.dtype) for each in inputs] for _ in range(ranks)
    ]


def check(each, program, inputs, *, after=None, ranks=2, pieces=None):
    """``program`` after ``each``: prints as ``after``, starts as many collectives as ``pieces``,
    gives the same bits of whole numbers on all ranks; a second run finds nothing."""
    step = trace(program, *inputs)
    before = step.copy()
    run_passes(step, [each])
    step.graph.lint()
    if after is not None:
        assert show_plain(step) == dedent(after).strip()
    if pieces is not None:
        assert count(step) == pieces
    given, groups = whole_numbers(inputs, ranks), {"0": [[*range(ranks)]]}
    wanted, found = (run_ranks(one, given, groups) for one in (before, step))
    assert len({tuple(started) for started in found.started}) == 1
    for new, old in zip(found.outputs, wanted.outputs, strict=True):
        assert all(torch.equal(*pair) for pair in zip(new, old, strict=True))
        kinds = [(value.stride(), value.dtype) for value in new]
        assert kinds == [(value.stride(), value.dtype) for value in old]
    assert each.run(step) == 0, "a second run must find nothing to do"
    return step


# --- text -----------------------------------------------------------------------------------


def test_a_gathered_factor_is_multiplied_piece_by_piece():
    check(
        pipeline(),
        lambda x, a: gathered(x) @ a,
        (X, A),
        after="""
            x: f32[4, 8]
            a: f32[8, 6]
            slice: f32[2, 8] = slice.Tensor(x, 0, 0, 2)
            all_gather_into_tensor: f32[4, 8] = all_gather_into_tensor(slice, 2, 0)
            slice.1: f32[2, 8] = slice.Tensor(x, 0, 2, 4)
            all_gather_into_tensor.1: f32[4, 8] = all_gather_into_tensor(slice.1, 2, 0)
            wait_tensor: f32[4, 8] = wait_tensor(all_gather_into_tensor)
            mm: f32[4, 6] = mm(wait_tensor, a)
            wait_tensor.1: f32[4, 8] = wait_tensor(all_gather_into_tensor.1)
            mm.1: f32[4, 6] = mm(wait_tensor.1, a)
            view: f32[2, 2, 6] = view(mm, [2, 2, 6])
            view.1: f32[2, 2, 6] = view(mm.1, [2, 2, 6])
            cat: f32[2, 4, 6] = cat([view, view.1], 1)
            view.2: f32[8, 6] = view(cat, [8, 6])
            return [view.2]
        """,
    )


def test_a_product_is_scattered_piece_by_piece():
    check(
        pipeline(),
        lambda x, a: scattered(x @ a),
        (torch.randn(8, 8), A),
        after="""
            x: f32[8, 8]
            a: f32[8, 6]
            view: f32[2, 4, 8] = view(x, [2, 4, 8])
            slice: f32[2, 2, 8] = slice.Tensor(view, 1, 0, 2)
            reshape: f32[4, 8] = reshape(slice, [4, 8])
            mm: f32[4, 6] = mm(reshape, a)
            reduce_scatter_tensor: f32[2, 6] = reduce_scatter_tensor(mm, sum, 2, 0)
            slice.1: f32[2, 2, 8] = slice.Tensor(view, 1, 2, 4)
            reshape.1: f32[4, 8] = reshape(slice.1, [4, 8])
            mm.1: f32[4, 6] = mm(reshape.1, a)
            reduce_scatter_tensor.1: f32[2, 6] = reduce_scatter_tensor(mm.1, sum, 2, 0)
            wait_tensor: f32[2, 6] = wait_tensor(reduce_scatter_tensor)
            wait_tensor.1: f32[2, 6] = wait_tensor(reduce_scatter_tensor.1)
            cat: f32[4, 6] = cat([wait_tensor, wait_tensor.1], 0)
            return [cat]
        """,
    )


def along_the_second_dim(x, a):
    """A sequence that DTensor gathers: [batch, sequence, width], ranks have parts of the second."""
    batch, part, width = x.shape
    whole = torch.cat(gathered(x).split(batch), 1)
    return (whole.view(-1, width) @ a).view(batch, 2 * part, 6)


def test_a_dim_outside_of_the_ranks_parts_is_cut_where_there_is_one():
    """Then pieces of the result lie one behind the other, and only rows of the factor move."""
    check(
        pipeline(),
        along_the_second_dim,
        (torch.randn(2, 3, 8), A),
        after="""
            x: f32[2, 3, 8]
            a: f32[8, 6]
            slice: f32[1, 3, 8] = slice.Tensor(x, 0, 0, 1)
            all_gather_into_tensor: f32[2, 3, 8] = all_gather_into_tensor(slice, 2, 0)
            slice.1: f32[1, 3, 8] = slice.Tensor(x, 0, 1, 2)
            all_gather_into_tensor.1: f32[2, 3, 8] = all_gather_into_tensor(slice.1, 2, 0)
            wait_tensor: f32[2, 3, 8] = wait_tensor(all_gather_into_tensor)
            view: f32[2, 1, 3, 8] = view(wait_tensor, [2, 1, 3, 8])
            permute: f32[1, 2, 3, 8] = permute(view, [1, 0, 2, 3])
            view.1: f32[6, 8] = view(permute, [6, 8])
            mm: f32[6, 6] = mm(view.1, a)
            wait_tensor.1: f32[2, 3, 8] = wait_tensor(all_gather_into_tensor.1)
            view.2: f32[2, 1, 3, 8] = view(wait_tensor.1, [2, 1, 3, 8])
            permute.1: f32[1, 2, 3, 8] = permute(view.2, [1, 0, 2, 3])
            view.3: f32[6, 8] = view(permute.1, [6, 8])
            mm.1: f32[6, 6] = mm(view.3, a)
            cat: f32[12, 6] = cat([mm, mm.1])
            view.4: f32[2, 6, 6] = view(cat, [2, 6, 6])
            return [view.4]
        """,
    )


def test_a_weights_gradient_reads_the_rows_put_together_again():
    """It sums over them: in pieces it would round otherwise."""

    def program(g, w, h):
        whole = gathered(g)
        return whole @ w, whole.t() @ h, whole.sum(0)

    step = check(pipeline(), program, (X, A, torch.randn(8, 5)), pieces=2)
    assert calls(step)[-3:] == ["t", "mm", "sum"]
    (gradient,) = [each for each in step.returned if each.args[0].target is aten.t.default]
    assert gradient.args[0].args[0] is step.returned[2].args[0], "one copy for both"


aten = torch.ops.aten


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("most", [2, 4])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_any_dim_may_be_that_of_the_ranks(ranks, most, batch):
    """Both ways, along each dim of [batch, sequence, width] but the last."""

    def program(x, y, a, bias):
        there = torch.cat(gathered(x, ranks).split(batch), 1)
        up = torch.addmm(bias, there.view(-1, 8), a).view(batch, -1, 6)
        back = torch.cat((y.view(-1, 8) @ a).view(batch, 8 * ranks, 6).split(8, 1))
        return up.relu(), scattered(back, ranks), gathered(y, ranks).view(-1, 8) @ a

    inputs = torch.randn(batch, 8, 8), torch.randn(batch, 8 * ranks, 8), A, BIAS
    check(pipeline(most, ranks=ranks), program, inputs, ranks=ranks, pieces=3 * most)


def shared_by_two(x, a, b):
    whole = gathered(x)
    return (whole @ a).relu(), (whole @ b.t()).sigmoid()


def other_factors_later(x, a, b):
    whole = gathered(x)
    first = (whole @ a).relu()
    return first, whole @ b.t().view(8, 5), whole @ (first.t() @ first.new_ones(8, 8)).t()


def with_a_cast(x, a):
    return gathered(x).to(torch.float64) @ a.to(torch.float64)


def sent_as_another_dtype(x, a):
    return scattered((x.t().contiguous() @ a).to(torch.float64))


def turned(x, a):
    """What ranks get are rows of the transposed product's second dim."""
    return scattered((x @ a).view(2, 4, 6).permute(1, 0, 2).reshape(8, 6))


def sum_of_three(x, a, b, c):
    first = torch.addmm(x @ a, x, b)
    return scattered(torch.addmm(first, x, c))


def each_row_has_a_bias(x, a, c):
    return torch.addmm(c, gathered(x), a, beta=2, alpha=3)


def gathered_then_scattered(x, a):
    return scattered(gathered(x) @ a)


def a_layer(x, a, b, g):
    """Gathered, multiplied, multiplied again, scattered; and back."""
    whole = gathered(x)
    h = whole @ a
    y = scattered(h.relu() @ b)
    dy = gathered(g)
    dh = (dy @ b.t()) * (h > 0)
    return y, scattered(dh @ a.t()), whole.t() @ dh, h.relu().t() @ dy


SQUARE = torch.randn(8, 8)
PROGRAMS = [
    (shared_by_two, (X, A, torch.randn(5, 8)), 2),
    (other_factors_later, (X, A, torch.randn(5, 8)), 2),
    (with_a_cast, (X, A), 2),
    (sent_as_another_dtype, (SQUARE, A), 2),
    (turned, (SQUARE, A), 2),
    (sum_of_three, (SQUARE, A, A, A), 2),
    (each_row_has_a_bias, (X, A, torch.randn(8, 6)), 2),
    (gathered_then_scattered, (X, A), 3),
    (a_layer, (X, A, torch.randn(6, 8), X), 8),
]


@pytest.mark.parametrize(
    ("program", "inputs", "pieces"), PROGRAMS, ids=lambda each: getattr(each, "__name__", "")
)
def test_numbers_are_the_same(program, inputs, pieces):
    check(pipeline(), program, inputs, pieces=pieces)


def test_rows_are_as_near_to_exact_ones_as_before():
    """A library may sum otherwise for fewer rows: the last bits, and no more."""
    inputs = torch.randn(64, 96), torch.randn(96, 40), torch.randn(40, 96), torch.randn(64, 96)
    step = trace(a_layer, *inputs)
    exact = step.copy()
    run_passes(step, [pipeline(4)])
    torch.manual_seed(1)
    given = [[torch.randn_like(each) for each in inputs] for _ in range(2)]
    groups = {"0": [[0, 1]]}
    found = run_ranks(step, given, groups).outputs
    double = [[each.double() for each in rank] for rank in given]
    wanted = run_ranks(trace(a_layer, *double[0]), double, groups).outputs
    before = run_ranks(exact, given, groups).outputs
    for new, old, true in zip(found, before, wanted, strict=True):
        for ours, eager, right in zip(new, old, true, strict=True):
            near = (eager.double() - right).abs().max()
            assert (ours.double() - right).abs().max() <= 2 * near


FLOAT8 = torch.float8_e4m3fn
TENSOR, ROWS, COLUMNS = torch.ones([]), torch.ones(64, 1), torch.ones(1, 16)


def scaled(x, w, rows, columns):
    return torch._scaled_mm(x, w.t(), rows, columns, out_dtype=torch.bfloat16)


def gathered_scaled(x, w, rows, columns):
    return scaled(gathered(x), w, rows, columns)


def scattered_scaled(x, w, rows, columns):
    return scattered(scaled(x, w, rows, columns))


@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_products_of_float8(by_row):
    """With one scale, and with one for each row, which is cut like the rows."""
    scales = (ROWS, COLUMNS) if by_row else (TENSOR, TENSOR)
    x, w = torch.ones(32, 32).to(FLOAT8), torch.ones(16, 32).to(FLOAT8)
    large = torch.ones(64, 32).to(FLOAT8)
    step = trace(gathered_scaled, x, w, *scales)
    assert pipeline().run(step) == 1
    products = step.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert [tuple(tensor_of(each).shape) for each in products] == [(32, 16)] * 2
    try:
        scaled(large, w, *scales)
    except RuntimeError:
        pytest.skip("this PyTorch has no such product on CPUs")
    check(pipeline(), gathered_scaled, (x, w, *scales), pieces=2)
    check(pipeline(), scattered_scaled, (large, w, *scales), pieces=2)


# --- where it is worth it -------------------------------------------------------------------


def test_the_number_of_pieces_is_that_of_the_shortest_timeline():
    """More pieces hide more, and each costs its messages."""
    inputs = torch.randn(512, 64), torch.randn(64, 256)
    pieces = {}
    for latency in (0.0, 2e-5, 2e-4, 2e-3):
        each = if_worth_it(8, bandwidth=2e8, latency=latency, device=CPU_MODEL)
        step = trace(lambda x, a: gathered(x) @ a, *inputs)
        before = simulate_communication(step, each.costs, CPU_MODEL).seconds
        run_passes(step, [each])
        after = simulate_communication(step, each.costs, CPU_MODEL).seconds
        assert after < before or count(step) == 1
        pieces[latency] = count(step)
    assert list(pieces.values()) == sorted(pieces.values(), reverse=True)
    assert pieces[0.0] > 2
    assert pieces[2e-3] == 1


def test_where_sending_needs_the_cores_that_compute_nothing_is_cut():
    def kept(hidden):
        curve = Curve(((64, 1e-4), (1 << 20, 1.0)))
        found = GroupMeasurement("gloo", 2, 1, {"all_gather_into_tensor": curve}, hidden)
        model = from_measurements({"0": found}, ALIKE).with_interference()
        each = PipelineProducts(model, ALIKE, most=2, smallest_rows=1)
        return each.run(trace(lambda x, a: gathered(x) @ a, X, A)) == 0

    assert [kept(hidden) for hidden in (1.0, 0.5, 0.02, 0.0)] == [False, False, True, True]


def test_layers_that_are_alike_are_cut_alike():
    """The last gather is of another size, and too small."""

    def program(x, a, b, small):
        for _ in range(3):
            x = scattered(torch.tanh(gathered(x) @ a) @ b)
        return x, gathered(small) @ a

    inputs = torch.randn(64, 8), A, torch.randn(6, 8), torch.randn(2, 8)
    step = check(if_worth_it(smallest_rows=32), program, inputs, pieces=13)
    found = [info(each.node).piece for each in collectives_in(step.graph)]
    assert found == [0, 1] * 6 + [None]


def test_where_the_peak_may_not_grow_nothing_is_cut_that_makes_it():
    def program(x, a):
        whole = gathered(x)
        return whole @ a, whole.t() @ x.new_ones(8, 2)

    grown, step = trace(program, X, A), trace(program, X, A)
    assert if_worth_it().run(grown) == 1
    before, after = (
        simulate_communication(each, costs(), ALIKE).peak_bytes for each in (step, grown)
    )
    assert after > before
    each = if_worth_it(grows=False)
    assert each.run(step) == 0
    (reason,) = each.choose(step).reasons.values()
    assert reason == "all_gather_into_tensor in chunks: a higher peak"


def test_pieces_are_not_joined_again():
    step = trace(a_layer, X, A, torch.randn(6, 8), X)
    run_passes(step, [pipeline(), *communication_passes(1 << 20, 1 << 20)])
    assert count(step) == 8
    reasons = BucketCollectives().choose(step).reasons.values()
    assert all(
        reason.endswith("is a chunk of a collective that overlaps with products")
        for reason in reasons
    )


def test_the_passes_behind_it_leave_the_numbers():
    inputs = X, A, torch.randn(6, 8), X
    step = trace(a_layer, *inputs)
    before = step.copy()
    run_passes(step, [pipeline(), *communication_passes(1 << 20, 1 << 20)])
    given = whole_numbers(inputs, 2)
    wanted, found = (run_ranks(each, given, {"0": [[0, 1]]}) for each in (before, step))
    for new, old in zip(found.outputs, wanted.outputs, strict=True):
        assert all(torch.equal(*pair) for pair in zip(new, old, strict=True))


def test_other_collectives_keep_their_order():
    def program(x, a, y):
        ahead = all_reduce(y)
        whole = gathered(x)
        between = all_reduce(y * 2)
        found = scattered(whole @ a)
        return found, wait(between), wait(ahead), wait(all_reduce(y * 3))

    step = check(pipeline(), program, (X, A, X))
    kinds = [each.kind.name for each in collectives_in(step.graph)]
    assert kinds == ["ALL_REDUCE", "ALL_GATHER", "ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER",
                     "ALL_REDUCE"]  # fmt: skip


# --- refusals -------------------------------------------------------------------------------


def two_waits(x, a):
    start = all_gather(x)
    return wait(start) @ a, wait(start) + 1


def fenced(x, a):
    whole = gathered(x)
    return user_operator(x), whole @ a


def read_twice(x, a):
    product = x @ a
    return scattered(product), product + 1


def fenced_product(x, a):
    product = x @ a
    return user_operator(x), scattered(product)


def coalesced(x, a):
    (start,) = collective_op("all_gather_into_tensor_coalesced")([x], 2, "0")
    return wait(start) @ a


REFUSALS = [
    (lambda x, a: gathered(x).relu() @ a, "relu is not a move of elements"),
    (
        lambda x, a: a.t() @ gathered(x).t(),
        "mm is not a move of elements",
    ),
    (lambda x, a: gathered(x).t() @ x.new_ones(8, 2), "mm sums over what is gathered"),
    (
        lambda x, a: gathered(x[:3]) @ a,
        "all_gather_into_tensor: the 3 rows of a rank are not 2 equal parts",
    ),
    (lambda x, a: gathered(x)[:7] @ a, "slice_1 is not a move of elements"),
    (lambda x, a: gathered(x, 1) @ a, "all_gather_into_tensor has a group of one rank"),
    (two_waits, "2 nodes wait for all_gather_into_tensor"),
    (coalesced, "all_gather_into_tensor_coalesced is several"),
    (fenced, "mine stands between wait_tensor and its products"),
    (lambda x, a: scattered((x @ a).relu()), "relu is not a move of elements"),
    (
        lambda x, a: scattered((x @ a) * x[:, :6]),
        "mul is neither a product nor a move of its elements",
    ),
    (lambda x, a: scattered(x), "x is neither a product nor a move of its elements"),
    (lambda x, a: scattered((x @ a).t()), "reduce_scatter_tensor parts the columns of mm"),
    (read_twice, "mm is read by others, too"),
    (fenced_product, "mine stands between mm and reduce_scatter_tensor"),
]


@pytest.mark.parametrize(("program", "reason"), REFUSALS, ids=[each[1] for each in REFUSALS])
def test_says_why_it_leaves_a_collective_alone(program, reason):
    step = trace(program, X, A)
    found = list(pipeline().choose(step).reasons.values())
    assert found == [reason]
    assert pipeline().run(step) == 0


def test_says_which_products_are_too_small_or_not_worth_it():
    def words(each):
        (found,) = each.choose(trace(lambda x, a: gathered(x) @ a, X, A)).reasons.values()
        return found

    small = "all_gather_into_tensor: 2 chunks of 8 rows are smaller products than of 8"
    assert words(if_worth_it(smallest_rows=8)) == small
    found = words(if_worth_it(latency=1.0))
    assert (
        found == "all_gather_into_tensor in 2 chunks: a step of 2000.192 ms instead of 1000.256 ms"
    )


def test_where_parts_are_uneven_no_rank_decides_by_its_own():
    def program(x, a):
        return gathered(x) @ a, x.split(3)[0]

    step = trace(program, X, A)
    assert not has_equal_parts(step)
    assert pipeline().run(step) == 0
    (reason,) = pipeline().choose(step).reasons.values()
    assert reason == "ranks hold parts of several sizes, and each would decide by its own"
    step = trace(lambda x, a: gathered(x) @ a, X, A)
    for uneven in (True, False):
        inputs = Input(Role.BATCH, "x"), Input(Role.PARAMETER, "a", sharded=True, uneven=uneven)
        step.signature = Signature(inputs, step.signature.outputs)
        assert has_equal_parts(step) is not uneven
        assert pipeline().run(step) == (not uneven)


def test_sizes_that_each_call_decides_stay():
    step = trace(lambda x, a: gathered(x) @ a, X, A)
    size = Size.dim("t", 2, 40, 4)
    symbols = Symbols(*symbolic_mode([size]))
    with symbols.mode:
        twin = torch.empty(symbols.symint(size), 8)
    with SampleMode(symbols):
        sample = torch.empty(4, 8)
    pair(sample, twin)
    set_value(step.placeholders[0], sample)
    (reason,) = pipeline().choose(step).reasons.values()
    assert reason == "all_gather_into_tensor has dynamic sizes"


@pytest.mark.parametrize("asked", [False, True])
def test_where_it_is_asked_for_the_timeline_decides_ahead_of_places(asked):
    options = Options(async_tensor_parallel=asked)
    placing = [each for each in cleaning_of(options) if isinstance(each, SinkWaits)]
    assert bool(placing) is not asked
    step = trace(lambda x, a: gathered(x) @ a, torch.randn(256, 64), torch.randn(64, 256))
    model = costs(bandwidth=2e8)
    step = timed(step, options, model, CPU_MODEL, Watcher())
    assert (count(step) > 1) is asked


def test_the_option_is_a_flag():
    with pytest.raises(TreadleError, match="async_tensor_parallel=1 has another type"):
        Options(async_tensor_parallel=1)


def test_pieces_and_parameters_stay():
    step = trace(lambda x, a: gathered(x) @ a, X, A)
    (start,) = [each.node for each in collectives_in(step.graph)]
    for noted, reason in (
        ({"piece": 0}, "all_gather_into_tensor is a chunk already"),
        ({"piece": None, "gathered": 0}, "all_gather_into_tensor gathers parameters"),
    ):
        with_info(start, **noted)
        assert list(pipeline().choose(step).reasons.values()) == [reason]
