"""A step on a timeline: chains whose times are known, and what is true of every order."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.comm.collective_programs import (
    WAIT,
    all_reduced,
    generated,
    start_all_reduce,
    two_layers,
)
from passes.memory.traced_steps import simulate
from testing import trace
from treadle.compat.distributed.collectives import collective_op
from treadle.passes.comm.cost import CollectiveCost, CommunicationModel, GroupLinks, unmeasured
from treadle.passes.comm.simulate import (
    Started,
    Work,
    length,
    run_order,
    simulate_communication,
    timeline_from_data,
    timeline_of,
    union,
    without,
    work_of,
)
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.links import Link

MATRIX = torch.randn(64, 64)
PRODUCT = 2 * 64**3 / CPU_MODEL.rate(torch.float32)
NBYTES = 4 * 64 * 64


def model(bandwidth=1e8, latency=0.0, groups=("0",), interference=0.0):
    link = Link("told", latency, bandwidth)
    return CommunicationModel(
        {name: CollectiveCost(GroupLinks(2, 1, link, link)) for name in groups}, interference
    )


SENT = NBYTES / 1e8
"""Seconds of an all-reduce of a matrix between two ranks."""


def simulated(program, *inputs, costs=None):
    return simulate_communication(trace(program, *inputs), costs or model(), CPU_MODEL)


def test_what_is_waited_for_at_once_is_exposed():
    line = simulated(lambda x, y: all_reduced(x @ y) @ y, MATRIX, MATRIX)
    assert line.seconds == pytest.approx(2 * PRODUCT + SENT)
    assert line.exposed_seconds == pytest.approx(SENT)
    assert line.exposed_share == pytest.approx(1.0)
    (each,) = line.collectives
    assert (each.issued, each.start, each.awaited) == (PRODUCT, PRODUCT, PRODUCT)
    assert each.beside == ()


def test_what_is_computed_meanwhile_hides_it():
    def program(x, y):
        started = start_all_reduce(x @ y)
        z = x @ x
        return WAIT(started) @ z

    line = simulated(program, MATRIX, MATRIX)
    assert line.seconds == pytest.approx(2 * PRODUCT + SENT)
    (each,) = line.collectives
    assert each.hidden == pytest.approx(PRODUCT)
    assert each.exposed == pytest.approx(SENT - PRODUCT) == pytest.approx(line.exposed_seconds)
    assert each.beside == (("mm", pytest.approx(PRODUCT)),)
    assert each.awaited == pytest.approx(2 * PRODUCT)


def test_collectives_of_one_group_follow_each_other_and_others_do_not():
    def program(x, y, group):
        first, second = start_all_reduce(x), start_all_reduce(y, group)
        return WAIT(first), WAIT(second)

    costs = model(groups=("0", "1"))
    line = simulated(lambda x, y: program(x, y, "0"), MATRIX, MATRIX, costs=costs)
    assert line.seconds == pytest.approx(2 * SENT)
    line = simulated(lambda x, y: program(x, y, "1"), MATRIX, MATRIX, costs=costs)
    assert line.seconds == line.exposed_seconds == pytest.approx(SENT)
    assert sum(each.exposed for each in line.collectives) == pytest.approx(2 * SENT)


def test_what_nobody_waits_for_ends_with_the_step():
    line = simulated(lambda x: start_all_reduce(x), MATRIX)
    assert line.seconds == pytest.approx(SENT)
    assert line.collectives[0].awaited is None


def test_bytes_in_flight_are_those_started_and_not_waited_for():
    def program(x, y):
        first, second = start_all_reduce(x), start_all_reduce(y)
        third = start_all_reduce(WAIT(first))
        return WAIT(second), WAIT(third)

    assert simulated(program, MATRIX, MATRIX).in_flight_bytes == 2 * NBYTES


def test_several_results_of_one_collective_are_waited_for_once():
    def program(x, y):
        one, two = collective_op("all_reduce_coalesced")([x, y], "sum", "0")
        return WAIT(one) + 1, WAIT(two) + 1

    line = simulated(program, MATRIX, MATRIX)
    assert line.communication_seconds == pytest.approx(2 * SENT)
    assert line.in_flight_bytes == 2 * NBYTES
    assert len(line.collectives) == 1


def test_what_a_collective_reads_lives_until_its_wait_and_its_result_is_there_once():
    def program(x, y):
        gradient = x @ y
        started = start_all_reduce(gradient)
        z = (x @ x) @ x
        return WAIT(started) @ z

    step = trace(program, MATRIX, torch.randn(64, 64))
    line = simulate_communication(step, model(), CPU_MODEL)
    assert line.peak_bytes == 6 * NBYTES  # inputs, gradient, its sum, a product and one of that
    assert simulate(step).peak_bytes == 5 * NBYTES  # there the gradient dies when the sum begins


def test_compute_beside_communication_takes_longer():
    def program(x, y):
        started = start_all_reduce(x)
        z = x @ y
        return WAIT(started), z

    alone = simulated(program, MATRIX, MATRIX)
    slow = simulated(program, MATRIX, MATRIX, costs=model(interference=0.5))
    assert alone.inflation_seconds == 0.0
    assert SENT > 1.5 * PRODUCT
    assert slow.compute_seconds == pytest.approx(1.5 * PRODUCT)
    assert slow.inflation_seconds == pytest.approx(0.5 * PRODUCT)
    short = simulated(program, MATRIX, MATRIX, costs=model(1e10, interference=0.5))
    beside = SENT / 100
    assert short.inflation_seconds == pytest.approx(beside - beside / 1.5)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_more_ranks_are_slower_by_what_their_collectives_are(ranks):
    step = trace(two_layers, MATRIX, MATRIX, MATRIX)
    line = simulate_communication(step, unmeasured({"0": ranks}, CPU_MODEL), CPU_MODEL)
    here = unmeasured({"0": 2}, CPU_MODEL)
    assert line == simulate_communication(step, here.among(ranks, CPU_MODEL), CPU_MODEL)
    each = here.among(ranks, CPU_MODEL).groups["0"].seconds(line.collectives[0].kind, NBYTES)
    assert line.communication_seconds == pytest.approx(2 * each)


def test_it_survives_a_way_through_json():
    line = simulated(two_layers, MATRIX, MATRIX, MATRIX)
    assert line.collectives
    assert timeline_from_data(json.loads(json.dumps(asdict(line)))) == line


SECONDS = st.floats(0.0, 1.0).map(lambda each: round(each, 6))


@st.composite
def works(draw, interference=0.0):
    """An order of compute, starts and waits without a graph behind it."""
    seconds, starts, awaits = [], {}, {}
    for i in range(draw(st.integers(1, 16))):
        kind = draw(st.sampled_from("cccsw"))
        waiting = [each for each in starts if each not in awaits.values()]
        seconds.append(0.0)
        if kind == "s":
            starts[i] = Started(draw(st.sampled_from("ab")), draw(SECONDS), draw(st.integers(0, 9)))
        elif kind == "w" and waiting:
            awaits[i] = draw(st.sampled_from(waiting))
        else:
            seconds[i] = draw(SECONDS)
    costs = CommunicationModel({}, interference)
    return Work(None, tuple(seconds), starts, awaits, {}, costs)


def exposed(run):
    return length(without(union(run.collectives.values()), union(run.compute.values())))


@given(works())
def test_a_step_takes_its_compute_and_what_is_exposed(work):
    run = run_order(work, range(len(work.seconds)))
    communication = length(union(run.collectives.values()))
    assert exposed(run) <= communication + 1e-9
    assert run.seconds == pytest.approx(sum(work.seconds) + exposed(run), abs=1e-9)
    assert run.seconds <= sum(work.seconds) + sum(s.seconds for s in work.starts.values()) + 1e-9


@given(works(), st.floats(0.1, 1.0))
def test_faster_links_never_make_a_step_longer(work, factor):
    faster = {i: replace(each, seconds=factor * each.seconds) for i, each in work.starts.items()}
    order = range(len(work.seconds))
    fast, slow = (run_order(each, order) for each in (replace(work, starts=faster), work))
    assert fast.seconds <= slow.seconds + 1e-9
    assert exposed(fast) <= exposed(slow) + 1e-9


@given(works(interference=0.4))
def test_interference_lengthens_compute_by_its_share_of_what_is_hidden(work):
    run = run_order(work, range(len(work.seconds)))
    computing = union(run.compute.values())
    hidden = length(union(run.collectives.values())) - exposed(run)
    assert length(computing) == pytest.approx(sum(work.seconds) + hidden * 0.4 / 1.4, abs=1e-9)


@given(st.lists(st.tuples(SECONDS, SECONDS)), st.lists(st.tuples(SECONDS, SECONDS)))
def test_intervals(left, right):
    """Against counting points of a grid that no interval ends on."""
    one = union((min(each), max(each)) for each in left)
    other = union((min(each), max(each)) for each in right)
    rest = without(one, other)

    def holds(intervals, at):
        return any(begin < at < end for begin, end in intervals)

    for k in range(200):
        at = (k + 0.5) / 200 + 1e-8
        assert holds(rest, at) == (holds(one, at) and not holds(other, at))
    assert length(rest) == pytest.approx(length(union([*one, *other])) - length(other), abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_of_real_graphs_as_well(seed):
    step = trace(generated(seed), MATRIX, MATRIX)
    work = work_of(step, model(latency=1e-5), CPU_MODEL)
    line = timeline_of(work, range(len(work.seconds)))
    assert line.seconds == pytest.approx(line.compute_seconds + line.exposed_seconds)
    assert line.compute_seconds == pytest.approx(sum(work.seconds))
    assert line.hidden_seconds <= line.communication_seconds
    assert all(each.exposed <= each.seconds * (1 + 1e-9) for each in line.collectives)
