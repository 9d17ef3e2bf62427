"""D5: orders of compute and collectives that hide more communication."""

import itertools
import operator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.comm.collective_programs import (
    WAIT,
    all_reduced,
    alone,
    gathered,
    generated,
    two_layers,
)
from testing import check_numbers, check_pass, show_plain, trace
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.operators import operation_name
from treadle.graph.core.signature import Role
from treadle.graph.core.values import inherit
from treadle.graph.core.verify import verify
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes.comm.bucketing.bucket_bytes import SMALLEST, choose_bucket_bytes
from treadle.passes.comm.cost import CollectiveCost, CommunicationModel, GroupLinks
from treadle.passes.comm.overlap.list_schedule import Preference, list_schedule
from treadle.passes.comm.overlap.order import OverlapCommunication, better_order
from treadle.passes.comm.overlap.precedence import precedence_of
from treadle.passes.comm.simulate import run_order, simulate_communication, work_of
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.links import Link

aten = torch.ops.aten
ENOUGH = 1 << 40
X, A, B = (torch.randn(64, 64) for _ in range(3))
NBYTES = 4 * 64 * 64


@pytest.fixture
def group(tmp_path):
    with alone(tmp_path):
        yield


def costs(bandwidth=1e9, latency=0.0, groups=("0",)):
    link = Link("told", latency, bandwidth)
    found = {name: CollectiveCost(GroupLinks(2, 1, link, link)) for name in groups}
    return CommunicationModel(found)


def overlap(**bounds):
    return OverlapCommunication(costs(), CPU_MODEL, **({"peak_bytes": ENOUGH} | bounds))


def simulated(step, model=None):
    return simulate_communication(step, model or costs(), CPU_MODEL)


def test_the_next_gradient_is_computed_while_one_is_reduced(group):
    check_pass(
        overlap(),
        two_layers,
        (X, A, B),
        after="""
            x: f32[64, 64]
            a: f32[64, 64]
            b: f32[64, 64]
            mm: f32[64, 64] = mm(x, a)
            mm.1: f32[64, 64] = mm(mm, b)
            t: f32[64, 64] = t(mm)
            mm.2: f32[64, 64] = mm(t, mm.1)
            all_reduce: f32[64, 64] = all_reduce(mm.2, sum, 0)
            t.1: f32[64, 64] = t(b)
            mm.3: f32[64, 64] = mm(mm.1, t.1)
            t.2: f32[64, 64] = t(x)
            mm.4: f32[64, 64] = mm(t.2, mm.3)
            all_reduce.1: f32[64, 64] = all_reduce(mm.4, sum, 0)
            wait_tensor: f32[64, 64] = wait_tensor(all_reduce)
            sub: f32[64, 64] = sub.Tensor(b, wait_tensor)
            wait_tensor.1: f32[64, 64] = wait_tensor(all_reduce.1)
            sub.1: f32[64, 64] = sub.Tensor(a, wait_tensor.1)
            return [sub.1, sub]
        """,
    )


def test_a_gather_is_started_before_the_layer_ahead(group):
    check_pass(
        overlap(),
        lambda x, a, b: torch.tanh(torch.tanh(x @ gathered(a)) @ gathered(b)),
        (X, A, B),
        after="""
            x: f32[64, 64]
            a: f32[64, 64]
            b: f32[64, 64]
            all_gather_into_tensor: f32[64, 64] = all_gather_into_tensor(a, 1, 0)
            all_gather_into_tensor.1: f32[64, 64] = all_gather_into_tensor(b, 1, 0)
            wait_tensor: f32[64, 64] = wait_tensor(all_gather_into_tensor)
            mm: f32[64, 64] = mm(x, wait_tensor)
            tanh: f32[64, 64] = tanh(mm)
            wait_tensor.1: f32[64, 64] = wait_tensor(all_gather_into_tensor.1)
            mm.1: f32[64, 64] = mm(tanh, wait_tensor.1)
            tanh.1: f32[64, 64] = tanh(mm.1)
            return [tanh.1]
        """,
    )


def test_results_of_one_operation_stay_behind_it(group):
    def program(x, a, b):
        values, places = torch.max(all_reduced(a), 1)
        one, two = collective_op("all_reduce_coalesced")([x, b], "sum", "0")
        return values, places, WAIT(one), WAIT(two), x @ b

    step = check_pass(
        overlap(),
        program,
        (X, A, B),
        after="""
            x: f32[64, 64]
            a: f32[64, 64]
            b: f32[64, 64]
            all_reduce: f32[64, 64] = all_reduce(a, sum, 0)
            all_reduce_coalesced: (f32[64, 64], f32[64, 64]) = all_reduce_coalesced([x, b], sum, 0)
            getitem: f32[64, 64] = all_reduce_coalesced[0]
            getitem.1: f32[64, 64] = all_reduce_coalesced[1]
            mm: f32[64, 64] = mm(x, b)
            wait_tensor: f32[64, 64] = wait_tensor(all_reduce)
            max: (f32[64], i64[64]) = max.dim(wait_tensor, 1)
            getitem.2: f32[64] = max[0]
            getitem.3: i64[64] = max[1]
            wait_tensor.1: f32[64, 64] = wait_tensor(getitem)
            wait_tensor.2: f32[64, 64] = wait_tensor(getitem.1)
            return [getitem.2, getitem.3, wait_tensor.1, wait_tensor.2, mm]
        """,
    )
    verify(step)


def kept(program, *inputs, **bounds):
    """Whether the pass finds nothing to move."""
    step = trace(program, *inputs)
    before = show_plain(step)
    changes = overlap(**bounds).run(step)
    assert (changes == 0) == (show_plain(step) == before)
    return changes == 0


def test_pieces_of_what_was_waited_for_go_with_the_wait(group):
    """As DTensor gathers along another dim than the first."""

    def program(x, a, b):
        whole = torch.cat(gathered(a).split(32), 1)
        return torch.tanh(x) @ b, whole

    check_pass(
        overlap(),
        program,
        (X, A, B),
        after="""
            x: f32[64, 64]
            a: f32[64, 64]
            b: f32[64, 64]
            all_gather_into_tensor: f32[64, 64] = all_gather_into_tensor(a, 1, 0)
            tanh: f32[64, 64] = tanh(x)
            mm: f32[64, 64] = mm(tanh, b)
            wait_tensor: f32[64, 64] = wait_tensor(all_gather_into_tensor)
            split: (f32[32, 64], f32[32, 64]) = split.Tensor(wait_tensor, 32)
            getitem: f32[32, 64] = split[0]
            getitem.1: f32[32, 64] = split[1]
            cat: f32[32, 128] = cat([getitem, getitem.1], 1)
            return [mm, cat]
        """,
    )


def test_without_collectives_nothing_moves():
    assert kept(lambda x, a: (x @ a).relu(), X, A)


def test_what_cannot_be_hidden_stays():
    assert kept(lambda x, a: torch.tanh(all_reduced(torch.tanh(x @ a))) @ a, X, A)


def test_the_peak_does_not_grow_beyond_its_bound():
    """Two gathers at a time need a matrix more than one after the other."""

    def program(x, a, b):
        h = x
        for each in (a, b, a, b):
            h = torch.tanh(h @ gathered(each))
        return h

    def peaks(bound):
        step = trace(program, X, A, B)
        before = simulated(step)
        overlap(peak_bytes=bound).run(step)
        return before, simulated(step)

    before, free = peaks(ENOUGH)
    assert free.exposed_seconds < before.exposed_seconds
    assert free.peak_bytes > before.peak_bytes
    same, bounded = peaks(None)
    assert bounded.peak_bytes <= same.peak_bytes
    _, little = peaks(before.peak_bytes + NBYTES)
    assert little.peak_bytes <= before.peak_bytes + NBYTES
    assert free.seconds <= little.seconds < before.seconds


def test_no_more_is_in_flight_than_its_bound():
    def program(x, *weights):
        h = x
        for each in weights:
            h = torch.tanh(h @ gathered(each))
        return h

    def flown(bound):
        step = trace(lambda x, a, b, c, d: program(x, a, b, c, d), *(torch.randn(64, 64),) * 5)
        overlap(in_flight_bytes=bound).run(step)
        return simulated(step)

    assert flown(None).in_flight_bytes > 2 * NBYTES
    assert flown(2 * NBYTES).in_flight_bytes == 2 * NBYTES
    assert flown(0).in_flight_bytes == NBYTES  # what it was
    assert flown(None).seconds <= flown(2 * NBYTES).seconds <= flown(0).seconds


def test_an_order_that_cannot_keep_the_bound_is_not_taken():
    """One sum could start first, and the other would have to while it is on its way."""

    def program(x, a, b):
        return all_reduced(x @ b) @ all_reduced(a)

    assert not kept(program, X, A, B)
    assert kept(program, X, A, B, in_flight_bytes=NBYTES)


def schedules(program, *inputs):
    """A step's nodes in every order that lists are made in."""
    step = trace(program, *inputs)
    work = work_of(step, costs(), CPU_MODEL)
    nodes = work.facts.nodes
    for reach, longest_first, in_sequence in itertools.product(
        (1, 99), (False, True), (False, True)
    ):
        preference = Preference(reach, longest_first, in_sequence, ENOUGH)
        yield [nodes[i] for i in list_schedule(work, precedence_of(work), preference)]


def test_draws_keep_their_order(group):
    """The second would be the better one to begin with."""

    def program(x, a, b):
        first = torch.tanh(torch.rand_like(x) @ a)
        second = all_reduced(torch.rand_like(x))
        return second @ b @ b, first

    orders = [[node.name for node in order] for order in schedules(program, X, A, B)]
    for order in orders:
        assert order.index("rand_like") < order.index("rand_like_1")
    assert any(order.index("mm") > order.index("all_reduce") for order in orders)
    step = trace(program, X, A, B)
    overlap().run(step)
    check_numbers(step, program, (X, A, B))


@torch.library.custom_op("overlap_test::mine", mutates_args=())
def mine(x: torch.Tensor) -> torch.Tensor:
    """May talk to other processes, for all that anybody knows."""
    return x.clone()


@mine.register_fake
def _(x):
    return torch.empty_like(x)


def test_collectives_and_waits_stay_on_their_side_of_a_users_operator(group):
    def program(x, a, b):
        summed = all_reduced(x @ a)
        own = mine(a)
        after = all_reduced(b)
        return summed @ own, after, b @ b

    step = trace(program, X, A, B)
    overlap().run(step)
    names = [operation_name(node.target) for node in step.graph.nodes]
    order = [each for each in names if each in ("all_reduce", "wait_tensor", "overlap_test.mine")]
    reduced = ["all_reduce", "wait_tensor"]
    assert order == [*reduced, "overlap_test.mine", *reduced]
    assert names.index("wait_tensor") > names.index("mm", names.index("mm") + 1)
    check_numbers(step, program, (X, A, B))


def test_nothing_crosses_a_write():
    """A step has none; an order is not to depend on that."""

    def program(x, a, b):
        summed = all_reduced(a)
        a.add_(1.0)
        return summed, x @ b, all_reduced(b), x @ x

    for order in schedules(program, X, A, B):
        names = [str(node) for node in order]
        wall = names.index("add_")
        assert set(names[:wall]) == {"x", "a", "b", "all_reduce", "wait_tensor"}


def test_several_groups_are_on_their_way_at_once():
    def program(x, a, b):
        one = all_reduced(a, "tp")
        two = all_reduced(b, "dp")
        return one, two, x @ x

    step = trace(program, X, A, B)
    model = costs(groups=("dp", "tp"))
    each = OverlapCommunication(model, CPU_MODEL, peak_bytes=ENOUGH)
    assert each.run(step) > 0
    line = simulated(step, model)
    assert line.communication_seconds == pytest.approx(NBYTES / 1e9)


def test_the_name_of_the_pass_says_its_bounds():
    assert repr(overlap(in_flight_bytes=5)) == (
        f"OverlapCommunication(peak_bytes={ENOUGH}, in_flight_bytes=5)"
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e8, 1e9, 1e10]), st.sampled_from([None, ENOUGH]))
def test_any_program_keeps_its_numbers_and_is_never_slower(seed, bandwidth, bound):
    program = generated(seed)
    step = trace(program, X * 0.1, A * 0.1)
    model = costs(bandwidth, 1e-5)
    before = simulated(step, model)
    each = OverlapCommunication(model, CPU_MODEL, peak_bytes=bound)
    moves = bool(run_passes(step, [each])[0].matches)
    after = simulated(step, model)
    if moves:
        assert after.seconds < before.seconds
    else:
        assert after == before
    assert bound is not None or after.peak_bytes <= before.peak_bytes
    assert each.run(step) == 0
    again = trace(program, X * 0.1, A * 0.1)
    each.run(again)
    assert show_plain(again) == show_plain(step)


def test_generated_programs_compute_what_they_did(group):
    for seed in range(12):
        program = generated(seed)
        step = trace(program, X * 0.1, A * 0.1)
        overlap().run(step)
        check_numbers(step, program, (X * 0.1, A * 0.1))


def orders(precedence):
    """Every order of the nodes that have a place."""

    def further(done, order):
        if len(order) == len(precedence.placed):
            yield list(order)
        for i in precedence.placed:
            if i not in done and precedence.before[i] <= done:
                yield from further(done | {i}, [*order, i])

    return further(frozenset(), [])


def whole(precedence, placed):
    """With what has no place of its own."""
    found = dict.fromkeys(precedence.first)
    for i in placed:
        found |= dict.fromkeys((*precedence.shown[i], i, *precedence.behind[i]))
    return [*(found | dict.fromkeys(precedence.late))]


@pytest.mark.parametrize("seed", [3, 8, 14, 15, 27])
def test_small_programs_are_nearly_as_short_as_can_be(seed):
    """Against all orders there are. Graham's bound for lists is 2; here it is far less."""
    step = trace(generated(seed, 6), X, A)
    work = work_of(step, costs(), CPU_MODEL)
    precedence = precedence_of(work)
    best = min(run_order(work, whole(precedence, each)).seconds for each in orders(precedence))
    order = better_order(work, ENOUGH) or range(len(work.seconds))
    assert best <= run_order(work, order).seconds * (1 + 1e-9)
    assert run_order(work, order).seconds <= 1.25 * best


@dataclass(frozen=True)
class JoinTo(GraphPass):
    """A stand-in for buckets: the all-reduces of ``cap`` bytes as one coalesced collective, started
    where the last of them was."""

    cap: int

    def run(self, step):
        found = collectives_in(step.graph)
        size = max(self.cap // found[0].nbytes, 1)
        for at in range(0, len(found), size):
            join(step.graph, found[at : at + size])
        return len(found)


def join(graph, several):
    target, inputs = collective_op("all_reduce_coalesced"), [each.inputs[0] for each in several]
    with graph.inserting_after(several[-1].node):
        place = started = graph.call_function(target, (inputs, "sum", "0"))
    inherit(started, several[-1].node)
    for number, each in enumerate(several):
        (wait,) = each.waits
        with graph.inserting_after(place):
            item = graph.call_function(operator.getitem, (started, number))
        inherit(item, each.node)
        wait.replace_input_with(each.node, item)
        item.append(wait)
        place = wait
        graph.erase_node(each.node)


def many_layers(x, *weights):
    """Gradients of 1 MiB, one after the other, and their updates at the end."""
    g, waits = x, []
    for each in weights:
        g = g @ each
        waits.append(all_reduced(g))
    return tuple([w - r for w, r in zip(weights, waits, strict=True)])


def bucket_bytes(latency, bandwidth):
    inputs = [torch.randn(512, 512) for _ in range(9)]
    step = trace(lambda x, a, b, c, d, e, f, g, h: many_layers(x, a, b, c, d, e, f, g, h), *inputs)
    before = show_plain(step)
    model = costs(bandwidth, latency)
    chosen = choose_bucket_bytes(step, model, CPU_MODEL, lambda cap: [JoinTo(cap), overlap()])
    assert show_plain(step) == before
    return chosen


def test_buckets_are_small_where_messages_are_free_and_large_where_they_are_not():
    product = 2 * 512**3 / CPU_MODEL.rate(torch.float32)
    nbytes = 4 * 512 * 512
    free = bucket_bytes(0.0, nbytes / product)
    assert free == SMALLEST
    assert bucket_bytes(100 * product, 1e12) == 8 * SMALLEST


def test_one_collective_has_the_smallest_bucket():
    step = trace(lambda x: all_reduced(x), X)
    assert choose_bucket_bytes(step, costs(), CPU_MODEL, lambda cap: []) == SMALLEST


def test_updates_hide_no_collective():
    """They are computed behind the last wait, where they are written."""

    def program(x, a, b):
        g, h = all_reduced(x @ a), all_reduced(x @ b)
        return a - g, b - h, torch.tanh(x @ x)

    roles = {"a": Role.PARAMETER, "b": Role.PARAMETER}
    step = trace(program, X, A, B, writes={0: 1, 1: 2}, roles=roles)
    overlap().run(step)
    order = [node.name for node in step.graph.nodes]
    last = max(order.index("wait_tensor"), order.index("wait_tensor_1"))
    assert last < min(order.index("sub"), order.index("sub_1"))
    assert order.index("tanh") < last
