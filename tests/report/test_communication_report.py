"""Communication in words and as a trace, for ranks that are there and for ranks that are not."""

import json

import pytest
import torch

from passes.comm.collective_programs import WAIT, all_reduced, start_all_reduce, two_layers
from testing import refusal, trace
from treadle.passes.comm.cost import CollectiveCost, CommunicationModel, GroupLinks
from treadle.passes.comm.simulate import simulate_communication
from treadle.report.communication import (
    SimulatedStep,
    communication_events,
    communication_text,
    simulate_step,
)
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.targets.links import Link

X, A, B = (torch.randn(64, 64) for _ in range(3))
LINK = Link("told", 0.0, 1e8)


def model(groups=("0",), interference=0.0):
    cost = CollectiveCost(GroupLinks(2, 1, LINK, LINK))
    return CommunicationModel(dict.fromkeys(groups, cost), interference)


def hidden(x, a, b):
    """One collective that two products hide in part, and one of another group behind them."""
    started = start_all_reduce(x)
    y = torch.tanh(x @ a) @ b
    return WAIT(started), all_reduced(y, "1")


def line(program=hidden, **given):
    step = trace(program, X, A, B)
    return simulate_communication(step, model(("0", "1"), **given), CPU_MODEL)


def test_the_words_of_a_step():
    assert communication_text(line()) == (
        "communication: 2 collectives of 32.00 KiB, 0.328 ms as simulated, "
        "0.306 ms exposed (93.4 %)\n"
        "  step 0.328 ms: 0.022 ms of compute and what is exposed; at most 16.00 KiB in flight\n"
        "  group 0: 2 ranks, not measured: told\n"
        "    1 all_reduce  16.00 KiB  0.164 ms, 0.142 ms exposed (86.8 %), beside mm, tanh\n"
        "  group 1: 2 ranks, not measured: told\n"
        "    1 all_reduce  16.00 KiB  0.164 ms, 0.164 ms exposed (100.0 %)\n"
        "  exposed most\n"
        "    2 x all_reduce of 16.00 KiB (forward): 0.306 ms of 0.328 ms"
    )


def test_without_collectives_there_are_no_words():
    quiet = simulate_communication(trace(lambda x: x.relu(), X), model(), CPU_MODEL)
    assert communication_text(quiet) == ""
    assert SimulatedStep(quiet).table() == "communication: none"


def test_what_compute_loses_beside_communication_is_told():
    assert "  compute takes 0.005 ms longer beside it" in communication_text(
        line(interference=0.25)
    )


def test_rows_of_a_trace_are_the_timeline():
    found = line()
    events = list(communication_events(found))
    assert {each["pid"] for each in events} == {2}, "not where the kernels are"
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {
        1: "compute",
        2: "group 0: 2 ranks, not measured: told",
        3: "group 1: 2 ranks, not measured: told",
    }
    rows = {each["args"]["node"]: each for each in events if each["ph"] == "X"}
    for span in (*found.compute, *found.collectives):
        row = rows.pop(span.node)
        assert row["ts"] == pytest.approx(1e6 * span.start, abs=2e-3)
        assert row["dur"] == pytest.approx(1e6 * (span.end - span.start), abs=2e-3)
    assert rows == {}


def test_a_row_tells_of_its_collective():
    events = communication_events(line())
    first = next(each for each in events if each.get("cat") == "communication")
    assert (first["name"], first["tid"], first["ts"]) == ("all_reduce 16.00 KiB", 2, 0.0)
    assert first["args"] == {
        "node": "all_reduce",
        "phase": "forward",
        "bytes": 16384,
        "issued us": 0.0,
        "awaited us": pytest.approx(21.6, abs=0.1),
        "exposed us": pytest.approx(142.2, abs=0.1),
        "hidden us": pytest.approx(21.6, abs=0.1),
        "beside": "mm 0.017 ms, tanh 0.004 ms",
    }


def test_ranks_that_are_not_there(tmp_path):
    step = trace(two_layers, X, A, B)
    few, many = (simulate_step(step, ranks=ranks, device=H200) for ranks in (8, 1024))
    assert few.timeline.compute_seconds == many.timeline.compute_seconds
    assert few.timeline.exposed_seconds < many.timeline.exposed_seconds
    assert "group 0: 1024 ranks on 128 hosts" in many.table()
    path = many.trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(each.get("cat") == "communication" for each in events) == 2


def test_ranks_of_some_groups():
    step = trace(hidden, X, A, B)
    found = simulate_step(step, ranks={"0": 4, "1": 16}, device=H200)
    groups = dict(found.timeline.groups)
    assert groups["0"].startswith("4 ranks, ")
    assert groups["1"].startswith("16 ranks on 2 hosts, ")
    told = simulate_step(step, ranks={"1": 4}, device=CPU_MODEL, costs=model(("0", "1")))
    assert [words[:7] for _, words in told.timeline.groups] == ["2 ranks", "4 ranks"]


def test_refusals(tmp_path):
    step = trace(hidden, X, A, B)
    assert refusal(lambda: simulate_step(step, ranks=0, device=H200)) == (
        "a group of 0 ranks on 0 hosts"
    )
    words = refusal(lambda: simulate_step(step, ranks={"0": 2}, device=H200))
    assert words == "there is no measurement of the group '1', only of 0"
    found = simulate_step(step, ranks=2, device=H200)
    assert "cannot" in refusal(lambda: found.trace(tmp_path))
