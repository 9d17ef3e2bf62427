"""What collectives cost: by formulas, by measurements, and for ranks that are not there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.comm.collective_programs import start_all_reduce
from testing import refusal, trace
from treadle.graph.core.collectives import CollectiveKind, collectives_in
from treadle.passes.comm.cost import (
    CollectiveCost,
    CommunicationModel,
    GroupLinks,
    from_measurements,
    share,
    unmeasured,
)
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.targets.links import Curve, GroupMeasurement, Link

SUM = CollectiveKind.ALL_REDUCE
GATHER = CollectiveKind.ALL_GATHER
SCATTER = CollectiveKind.REDUCE_SCATTER
NEAR, FAR = Link("near", 1e-6, 1e11), Link("far", 1e-5, 1e10)
SIZES = [4096 << (2 * i) for i in range(8)]


def cost(ranks, hosts=1):
    return CollectiveCost(GroupLinks(ranks, hosts, NEAR, FAR))


def measured_as(links, kinds=tuple(CollectiveKind)):
    """Of a group that behaves exactly as the formula says."""
    curves = {
        str(kind): Curve(tuple((size, links.seconds(kind, size)) for size in SIZES))
        for kind in kinds
    }
    return GroupMeasurement("nccl", links.ranks, links.hosts, curves)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        (SUM, 8, 2 * 3 * 1e-6 + 2 * 7 / 8 * 1e-3),
        (SUM, 2, 2 * 1e-6 + 1e-3),
        (SUM, 5, 2 * 3 * 1e-6 + 2 * 4 / 5 * 1e-3),
        (GATHER, 8, 7e-6 + 7 / 8 * 1e-3),
        (SCATTER, 3, 2e-6 + 2 / 3 * 1e-3),
        (CollectiveKind.ALL_TO_ALL, 4, 3e-6 + 3 / 4 * 1e-3),
        (CollectiveKind.BROADCAST, 8, 3e-6 + 1e-3),
    ],
)
def test_within_a_host(kind, ranks, expected):
    assert cost(ranks).seconds(kind, 10**8) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "latency"),
    [
        (SUM, 2 * 3e-6 + 2 * 2e-5),  # three levels in a host of 8, two over 4 hosts
        (GATHER, 28e-6 + 3e-5),  # a ring of 32 changes hosts three times
        (CollectiveKind.ALL_TO_ALL, 7e-6 + 24e-5),
        (CollectiveKind.BROADCAST, 3e-6 + 2e-5),
    ],
)
def test_over_hosts_latency_is_that_of_both_links_and_bandwidth_of_the_slower(kind, latency):
    assert cost(32, 4).seconds(kind, 0) == pytest.approx(latency, rel=1e-12)
    sent = cost(32, 4).seconds(kind, 10**8) - latency
    assert sent == pytest.approx(share(kind, 32) * 1e-2, rel=1e-9)


@pytest.mark.parametrize("kind", CollectiveKind)
def test_one_rank_alone_waits_for_nobody(kind):
    assert cost(1).seconds(kind, 1 << 30) == 0.0


@given(st.sampled_from(CollectiveKind), st.integers(1, 4096), st.integers(0, 1 << 34))
def test_more_ranks_and_more_bytes_never_take_less(kind, ranks, nbytes):
    here = cost(ranks).seconds(kind, nbytes)
    assert here <= cost(ranks + 1).seconds(kind, nbytes) * (1 + 1e-12)
    assert here <= cost(ranks).seconds(kind, 2 * nbytes)


def test_what_was_measured_is_what_it_costs():
    curve = Curve(((1000, 1e-3), (4000, 4e-3)))
    found = GroupMeasurement("gloo", 2, 1, {"all_reduce": curve})
    costs = from_measurements({"0": found}, CPU_MODEL).groups["0"]
    assert costs.seconds(SUM, 2000) == curve.seconds(2000)
    assert costs.words == "2 ranks, measured"


@given(
    st.integers(2, 8),
    st.integers(2, 512),
    st.sampled_from(CollectiveKind),
    st.sampled_from(SIZES),
)
def test_other_ranks_are_exact_where_the_formula_is(then, now, kind, size):
    """A group that was measured to be as the formula says is that with any number of ranks."""
    links = GroupLinks(then, 1, H200.link, H200.network)
    model = from_measurements({"dp": measured_as(links)}, H200).among(now, H200)
    expected = unmeasured({"dp": now}, H200).groups["dp"].seconds(kind, size)
    assert model.groups["dp"].seconds(kind, size) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.ALL_TO_ALL])
def test_a_kind_that_was_not_measured_is_like_those_that_were(kind):
    """Twice as slow as told in all that was measured: twice as slow in this as well."""
    links = GroupLinks(4, 1, NEAR, FAR)
    told = measured_as(links, (SUM, GATHER))
    twice = {
        name: Curve(tuple((size, 2 * seconds) for size, seconds in each.points))
        for name, each in told.curves.items()
    }
    costs = CollectiveCost(links, GroupMeasurement("x", 4, 1, twice), links)
    assert costs.seconds(kind, 1 << 24) == pytest.approx(2 * links.seconds(kind, 1 << 24), rel=1e-6)


def test_a_group_over_hosts_keeps_as_many_ranks_to_a_host():
    links = GroupLinks(4, 2, NEAR, FAR)
    costs = CollectiveCost(links, measured_as(links), links).among(64, H200)
    assert (costs.now.ranks, costs.now.hosts) == (64, 32)
    assert costs.words == "64 ranks on 32 hosts, as 4 measured ones say"


def test_fewer_ranks_than_were_measured():
    links = GroupLinks(8, 1, NEAR, FAR)
    costs = CollectiveCost(links, measured_as(links), links)
    assert costs.among(1, H200).seconds(SUM, 1 << 20) == 0.0
    assert costs.among(2, H200).seconds(SUM, 1 << 20) < costs.seconds(SUM, 1 << 20)


def test_hosts_are_those_of_the_device():
    costs = unmeasured({"dp": 64, "tp": 8}, H200)
    assert (costs.groups["dp"].now.hosts, costs.groups["tp"].now.hosts) == (8, 1)
    assert costs.groups["tp"].words == "8 ranks, not measured: NVLink 4"
    more = costs.among({"dp": 1024}, H200)
    assert (more.groups["dp"].now.hosts, more.groups["tp"].now.ranks) == (128, 8)


def test_a_collective_costs_the_bytes_of_its_larger_side():
    step = trace(lambda x: start_all_reduce(x, "dp"), torch.randn(256, 256))
    (each,) = collectives_in(step.graph)
    costs = unmeasured({"dp": 4}, CPU_MODEL)
    assert costs.seconds(each) == costs.groups["dp"].seconds(SUM, 4 * 256 * 256)


def test_refusals():
    step = trace(lambda x: start_all_reduce(x, "dp"), torch.randn(2))
    (each,) = collectives_in(step.graph)
    words = refusal(lambda: CommunicationModel({}).seconds(each))
    assert words == "there is no measurement of the group 'dp', only of none"
    assert refusal(lambda: unmeasured({"dp": 2}, H200).among({"tp": 4}, H200)) == (
        "there is no measurement of the group 'tp', only of dp"
    )
    assert refusal(lambda: unmeasured({"dp": 0}, CPU_MODEL)) == "a group of 0 ranks on 1 hosts"
