"""Groups are measured at their first use, by all ranks, and all have the same numbers."""

import pytest

from distributed.gloo_ranks import run_ranks

MEASURE = """
import time
from pathlib import Path
from treadle.runtime.cache import Cache
from treadle.runtime.group_costs import measured_group
from treadle.targets.links import measurement_to_words

cache = Cache(Path(folder) / f"cache{rank}")
begin = time.perf_counter()
found = measured_group(GROUP, CPU, cache)
seconds = time.perf_counter() - begin
again = measured_group(GROUP, CPU, Cache(Path(folder) / "empty"))
say(
    words=measurement_to_words(found),
    seconds=seconds,
    same=again is found,
    entries=cache.count(),
    empty=Cache(Path(folder) / "empty").count(),
)
"""
KINDS = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}


def test_all_ranks_have_the_same_numbers_and_measure_once(forks, tmp_path):
    said = run_ranks(forks, tmp_path / "first", MEASURE)
    one, other = said
    words = one["words"]
    assert words == other["words"]
    assert (words["backend"], words["ranks"], words["hosts"]) == ("gloo", 2, 1)
    assert set(words["curves"]) == KINDS
    for points in words["curves"].values():
        assert points[0][0] == 4096
        assert len(points) >= 2
    assert one["same"]
    assert other["same"]
    assert (one["entries"], other["entries"], one["empty"]) == (1, 1, 0)


def with_caches(tmp_path, name, caches):
    """A folder in which only some ranks have a cache, each from another measurement."""
    folder = tmp_path / name
    folder.mkdir()
    for rank, source in caches.items():
        (tmp_path / source[0] / f"cache{source[1]}").rename(folder / f"cache{rank}")
    return folder


def test_the_first_ranks_cache_decides_for_all(forks, tmp_path):
    """Also where only some have one, and where they differ: nobody waits for anybody."""
    first = run_ranks(forks, tmp_path / "first", MEASURE)[0]["words"]
    second = run_ranks(forks, tmp_path / "second", MEASURE)[0]["words"]
    assert first != second
    folder = with_caches(tmp_path, "only the first", {0: ("first", 0)})
    assert [each["words"] for each in run_ranks(forks, folder, MEASURE)] == [first] * 2
    folder = with_caches(tmp_path, "both", {0: ("only the first", 0), 1: ("second", 1)})
    said = run_ranks(forks, folder, MEASURE)
    assert [each["words"] for each in said] == [first] * 2
    assert [each["entries"] for each in said] == [1, 1]
    folder = with_caches(tmp_path, "only the second", {1: ("second", 0)})
    third, fourth = (each["words"] for each in run_ranks(forks, folder, MEASURE))
    assert third == fourth
    assert third not in (first, second)


REFUSES = """
from pathlib import Path
from treadle.runtime.cache import Cache
from treadle.runtime.group_costs import measured_group, text_of_first

cache = Cache(Path(folder) / f"cache{rank}")
found = measured_group(GROUP, CPU, cache, measure=rank == 0)
say(found=found is None, entries=cache.count(), text=text_of_first(GROUP, CPU, f"of {rank}"))
"""


def test_nothing_is_measured_if_one_rank_says_so(forks, tmp_path):
    said = run_ranks(forks, tmp_path / "ranks", REFUSES)
    assert said == [{"found": True, "entries": 0, "text": "of 0"}] * 2


DAMAGED = """
from pathlib import Path
from treadle.runtime import group_costs
from treadle.runtime.cache import Cache
from treadle.util.errors import RuntimeFailure

meeting = group_costs._Meeting(GROUP, CPU)
cache = Cache(Path(folder) / f"cache{rank}")
cache.put(meeting.facts().key, b'{"curves": 5}')
try:
    group_costs.measured_group(GROUP, CPU, cache)
except RuntimeFailure as error:
    say(code=error.code)
"""


def test_what_is_no_measurement_is_an_error_on_every_rank(forks, tmp_path):
    assert run_ranks(forks, tmp_path / "ranks", DAMAGED) == [{"code": "TR-521"}] * 2


COSTS = """
import sys
from pathlib import Path
import torch
from testing import trace
from treadle.compat.collectives import collective_op
from treadle.compiler.communication import communication_costs
from treadle.graph.collectives import collectives_in
from treadle.runtime.cache import Cache
from treadle.targets.cpu import CPU_MODEL

own = dist.new_group([0, 1])
half = [dist.new_group([each]) for each in (0, 1)][rank]

def program(x):
    one = collective_op("all_reduce")(x, "sum", GROUP.group_name)
    two = collective_op("all_reduce")(x, "sum", own.group_name)
    three = collective_op("all_reduce")(x, "sum", half.group_name)
    return one, two, three

step = trace(program, torch.randn(256, 256))
cache = Cache(Path(folder) / f"cache{rank}")
costs = communication_costs(step, "cpu", CPU_MODEL, cache, measure=MEASURE)
quiet = trace(lambda x: x.relu(), torch.randn(2))
nothing = communication_costs(quiet, "cpu", CPU_MODEL, cache, measure=True)
words = [each.words for each in costs.groups.values()]
seconds = [costs.seconds(each) for each in collectives_in(step.graph)]
say(words=words, seconds=seconds, nothing=nothing is None)
"""


@pytest.mark.parametrize("measure", [True, False])
def test_each_group_of_a_step_is_measured_for_itself(forks, tmp_path, measure):
    one, other = run_ranks(forks, tmp_path / "ranks", COSTS.replace("MEASURE", str(measure)))
    assert one == other
    told = "measured" if measure else "not measured: processes of one host"
    assert one["words"] == [f"2 ranks, {told}"] * 2 + [
        "1 rank, not measured: processes of one host"
    ]
    assert one["seconds"][2] == 0.0
    assert min(one["seconds"][:2]) > 0.0
    assert one["nothing"]
