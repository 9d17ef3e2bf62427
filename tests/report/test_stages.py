"""``Step.stages`` and the ladder: every pass of every stage, with what it made of the nodes."""

import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

import treadle
from treadle import Options
from treadle.graph.rewrite.passes import GraphPass
from treadle.passes import registered
from treadle.report import watch
from treadle.report.products import size_of
from treadle.report.stages import ORDER, PRODUCTS, Watcher

PLAN = ("ReadMasksAsBytes()", "Recompute(", "UpdateEarly()")
FLOW = re.compile(r"(\d+) changes, (\d+) -> (\d+) nodes")


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registered, "_passes", [])


@dataclass(frozen=True)
class Nothing(GraphPass):
    """A pass of a user's."""

    def run(self, step):
        return 0


def prepared(tmp_path, memory=0.0, **options):
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.5)) for _ in range(6)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = Options(cache_dir=tmp_path, codegen=False, memory=memory, **options)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=chosen)
    step.prepare(torch.randn(64, 48))
    return step


def sections(text):
    """Of each stage: its line, and those of its passes."""
    found = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            found[line.split("  ")[0]] = lines = []
        lines.append(line)
    return found


def test_each_stage_has_its_reason_its_flow_and_its_passes(tmp_path):
    step = prepared(tmp_path)
    found = sections(step.stages())
    assert list(found) == [stage.name for stage in ORDER]
    for stage in ORDER:
        assert found[stage.name][0].endswith(stage.why)
    nodes = {name: step.graph(name).count(" = ") for name in ("captured", "clean", "planned")}
    assert nodes["planned"] > nodes["clean"]  # something is computed again
    for name in ("clean", "plan memory"):
        line, *passes = found[name]
        flows = [tuple(map(int, FLOW.search(each).groups())) for each in passes]
        assert f"{flows[0][1]} nodes -> {flows[-1][2]} nodes" in line
        assert all(one[2] == other[1] for one, other in pairwise(flows))
    assert [each.split("  ")[1].partition("(")[0] for each in found["plan memory"][1:]] == [
        each.partition("(")[0] for each in PLAN
    ]
    assert re.search(r"\d+ nodes -> 0 kernels, \d+ calls", found["lower and schedule"][0])
    assert list(step.compiled.seconds) == [
        stage.name for stage in ORDER if stage.name not in ("start", "extend", "tune")
    ]


class Makers(Watcher):
    """In which stage each product was told."""

    def __init__(self):
        self.open = None
        self.found = {}

    def begins(self, stage):
        self.open = stage

    def ends(self, stage, seconds):
        self.open = None

    def produced(self, name, product):
        self.found[name] = self.open


def test_what_is_written_of_a_product_is_time_of_the_stage_that_made_it(tmp_path, monkeypatch):
    makers = Makers()
    monkeypatch.setattr(watch, "watcher_for", lambda *_: makers)
    prepared(tmp_path)
    expected = {product: stage.name for stage in ORDER for product in stage.makes}
    # what is captured is written once it has met the cache; loops, once their schedule is final
    expected |= {"captured": "clean", "loops": "generate code", "kernels": "generate code"}
    assert makers.found == expected


def test_a_step_from_the_cache_shows_the_passes_of_its_first_compile(tmp_path):
    first, second = prepared(tmp_path), prepared(tmp_path)
    assert second.compiled.from_cache
    one, two = (re.sub(r" +[\d.]+ s| +not run", "", each.stages()) for each in (first, second))
    assert two.startswith(one)


def test_what_users_register_is_a_stage(tmp_path):
    treadle.register_pass(Nothing())
    for _ in range(2):  # it runs whether or not the rest is found
        step = prepared(tmp_path)
        line, *passes = sections(step.stages())["extend"]
        assert "Nothing()" in passes[-1]
        assert "not run" not in "".join([line, *passes])
        assert re.search(r"\d+ nodes -> \d+ nodes", line)
        assert list(step.compiled.seconds)[:3] == ["import", "capture", "extend"]
    assert step.compiled.from_cache


def test_the_ladder_shows_what_a_plan_does_to_the_graph(tmp_path, capfd):
    prepared(tmp_path, debug=2)
    err = capfd.readouterr().err
    again = re.search(r"Recompute\(all but \d+ values\): (\d+) changes", err)
    assert again is not None
    assert int(again[1]) > 0
    for each in PLAN:
        shown, text = f"treadle: {each}", err.partition(f"treadle: {each}")[2]
        assert shown in err
        assert "\n+" in text.partition("treadle: ")[0], "no diff"


def test_a_dump_has_every_pass_of_a_plan(tmp_path):
    step = prepared(tmp_path, dump=tmp_path / "dump")
    (folder,) = (tmp_path / "dump").iterdir()
    names = {path.name.partition("-")[2] for path in (folder / "passes").iterdir()}
    assert {"ReadMasksAsBytes.diff", "Recompute.diff", "UpdateEarly.diff"} <= names
    last = max(folder.glob("passes/*-UpdateEarly.txt")).read_text()
    assert last.partition("\n")[2].strip() == step.graph("planned").strip()


def test_products_stand_in_one_list_and_have_a_size():
    assert PRODUCTS == (
        "captured", "clean", "planned", "decisions", "loops", "kernels", "sources",
    )  # fmt: skip
    assert size_of(()) == ""
