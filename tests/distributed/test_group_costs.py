"""Groups are measured at their first use, by all ranks, and all have the same numbers; what users
see of it."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import treadle
from testing import trace
from treadle.compat.distributed.collectives import collective_op, name_of_group
from treadle.compiler.communication import communication_costs
from treadle.graph.core.collectives import collectives_in
from treadle.runtime.ranks import group_costs
from treadle.runtime.ranks.group_costs import measured_group
from treadle.runtime.store.cache import Cache
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.links import measurement_to_words
from treadle.util.errors import RuntimeFailure

CPU = torch.device("cpu")
KINDS = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}


def own_cache(folder):
    return Cache(Path(folder) / f"cache{dist.get_rank()}")


def measures(folder):
    """What this rank hears, whether a second question asks nobody, and what is kept then."""
    cache, unused = own_cache(folder), Cache(Path(folder) / "unused")
    begin = time.perf_counter()
    found = measured_group(dist.group.WORLD, CPU, cache)
    seconds = time.perf_counter() - begin
    again = dist.get_rank() == 0 and measured_group(dist.group.WORLD, CPU, unused) is found
    return measurement_to_words(found), again, (cache.count(), unused.count()), seconds


def words_of(ranks):
    return [rank.value[0] for rank in ranks]


def test_all_ranks_have_the_same_numbers_and_measure_once(launch, tmp_path):
    ranks = launch(2, measures, str(tmp_path))
    words, other = words_of(ranks)
    assert words == other
    assert (words["backend"], words["ranks"], words["hosts"]) == ("gloo", 2, 1)
    assert set(words["curves"]) == KINDS
    assert 0.0 <= words["hidden"] <= 1.0
    for points in words["curves"].values():
        assert points[0][0] == 4096
        assert len(points) >= 2
    assert [rank.value[1] for rank in ranks] == [True, False], "rank 1 did not have to be there"
    assert [rank.value[2] for rank in ranks] == [(1, 0)] * 2


def test_four_ranks_have_a_measurement_of_their_own(launch, tmp_path):
    (words, *others) = words_of(launch(4, measures, str(tmp_path)))
    assert words["ranks"] == 4
    assert others == [words] * 3


def with_caches(folder, caches):
    """A folder in which only some ranks have a cache, each from another measurement."""
    folder.mkdir()
    for rank, source in caches.items():
        source.rename(folder / f"cache{rank}")
    return str(folder)


def test_the_first_ranks_cache_decides_for_all(launch, tmp_path):
    """Also where only some have one, and where they differ: nobody waits for anybody."""
    one, other = tmp_path / "one", tmp_path / "other"
    first = words_of(launch(2, measures, str(one)))[0]
    second = words_of(launch(2, measures, str(other)))[0]
    assert first != second
    here = with_caches(tmp_path / "first", {0: one / "cache0"})
    assert words_of(launch(2, measures, here)) == [first] * 2
    here = with_caches(tmp_path / "both", {0: tmp_path / "first" / "cache0", 1: other / "cache1"})
    ranks = launch(2, measures, here)
    assert words_of(ranks) == [first] * 2
    assert [rank.value[2][0] for rank in ranks] == [1, 1]
    here = with_caches(tmp_path / "second", {1: other / "cache0"})
    third, fourth = words_of(launch(2, measures, here))
    assert third == fourth
    assert third not in (first, second)


def refuses(folder):
    cache = own_cache(folder)
    found = measured_group(dist.group.WORLD, CPU, cache, measure=dist.get_rank() == 0)
    return found, cache.count()


def test_nothing_is_measured_if_one_rank_says_so(launch, tmp_path):
    for rank in launch(2, refuses, str(tmp_path)):
        assert rank.value == (None, 0)


def meets_a_damaged_cache(folder):
    cache = own_cache(folder)
    meeting = group_costs._Meeting(dist.group.WORLD, CPU)
    cache.put(meeting.facts().key, b'{"curves": 5}')
    try:
        measured_group(dist.group.WORLD, CPU, cache)
    except RuntimeFailure as error:
        return error.code
    return ""


def test_what_is_no_measurement_is_an_error_on_every_rank(launch, tmp_path):
    assert [rank.value for rank in launch(2, meets_a_damaged_cache, str(tmp_path))] == [
        "TR-551",
        "TR-551",
    ]


def costs_of_three_groups(folder, measure):
    """All ranks, all ranks again, and this rank alone."""
    again = dist.new_group([0, 1])
    single = [dist.new_group([each]) for each in (0, 1)][dist.get_rank()]
    groups = [name_of_group(each) for each in (dist.group.WORLD, again, single)]

    def program(x):
        return [collective_op("all_reduce")(x, "sum", each) for each in groups]

    step, cache = trace(program, torch.randn(256, 256)), own_cache(folder)
    costs = communication_costs(step, "cpu", CPU_MODEL, cache, measure=measure)
    quiet = trace(lambda x: x.relu(), torch.randn(2))
    nothing = communication_costs(quiet, "cpu", CPU_MODEL, cache, measure=measure)
    words = [costs.groups[each].words for each in groups]
    return words, [costs.seconds(each) for each in collectives_in(step.graph)], nothing


@pytest.mark.parametrize("measure", [True, False])
def test_each_group_of_a_step_is_measured_for_itself(launch, tmp_path, measure):
    one, other = launch(2, costs_of_three_groups, str(tmp_path), measure)
    assert one.value == other.value
    words, seconds, nothing = one.value
    told = "measured" if measure else "not measured: processes of one host"
    assert words == [f"2 ranks, {told}"] * 2 + ["1 rank, not measured: processes of one host"]
    assert min(seconds[:2]) > 0.0
    assert (seconds[2], nothing) == (0.0, None)


def training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train_step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, net, optimizer


def trains(folder):
    """What the user sees of a compiled step, of the same from the cache, and of more ranks."""
    told = []
    options = treadle.Options(cache_dir=own_cache(folder).directory, measure=True, buckets=0)
    for _ in range(2):
        function, net, optimizer = training()
        step = treadle.compile(
            function,
            model=net,
            optimizer=optimizer,
            parallel=treadle.DataParallel(),
            options=options,
        )
        step(torch.randn(16, 32))
        path = step.trace(Path(folder) / f"trace{dist.get_rank()}.json")
        more = step.simulate(ranks=64), step.simulate(ranks=64, device="h200")
        told.append((
            step.explain(),
            json.loads(path.read_text())["traceEvents"],
            [each.table() for each in more],
            step.compiled.from_cache,
        ))  # fmt: skip
    return told


def test_explain_and_the_trace_show_the_collectives_of_a_step(launch, tmp_path):
    for rank in launch(2, trains, str(tmp_path)):
        (text, events, (more, there), _), (again, *same, from_cache) = rank.value
        assert from_cache
        assert same == [events, [more, there]]
        start = text.index("communication: ")
        section = text[start : text.index("\n\n", start)]
        assert section in again
        assert section.startswith("communication: 4 collectives of 10.28 KiB, ")
        assert "  group 0: 2 ranks, measured\n    4 all_reduce  10.28 KiB  " in section
        rows = [each for each in events if each.get("cat") == "communication"]
        assert len(rows) == 4
        assert sum(each["args"]["bytes"] for each in rows) == 4 * (32 * 64 + 64 + 64 * 8 + 8)
        assert "group 0: 64 ranks, as 2 measured ones say" in more
        links = "NVLink 4 and 400 Gb/s InfiniBand"
        assert f"group 0: 64 ranks on 8 hosts, not measured: {links}" in there


def simulates_any_size():
    """Steps with a size that each call decides: the table for more ranks."""
    function, net, optimizer = training()
    step = treadle.compile(
        function,
        model=net,
        optimizer=optimizer,
        parallel=treadle.DataParallel(),
        shapes=treadle.dynamic({"x": ("rows", None)}, rows=(2, 64)),
    )
    step.prepare(torch.randn(16, 32))
    return step.simulate(ranks=4).table()


def test_a_size_that_each_call_decides(launch):
    (rank,) = launch(1, simulates_any_size, environment={"TREADLE_BUCKETS": "0"})
    assert rank.value.startswith("communication: 4 collectives of 10.28 KiB, ")
