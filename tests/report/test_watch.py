"""Observers of a compile: the debug ladder, dumps, the progress line, and silence."""

import io
import sys
import time

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import treadle
from testing import forget_progress_settings
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.options import Options, from_environment
from treadle.report.progress import ProgressLine
from treadle.report.stages import PRODUCTS, Clock, Watcher, Watchers
from treadle.report.watch import watcher_for
from treadle.util.files import can_be_live


def compiled(tmp_path, **options):
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    chosen = Options(cache_dir=tmp_path / "cache", **options)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=chosen)
    step(torch.randn(4, 5))
    return step


LEVELS = {
    "treadle: capture": 1,
    "treadle: RemoveNoOps()": 2,
    "\n-": 2,
    "treadle: loops": 3,
    "kernel ": 3,
    "treadle: sources": 4,
    "#pragma": 4,
}


@pytest.mark.parametrize("debug", range(5))
def test_the_ladder_shows_more_at_each_level(tmp_path, capfd, debug):
    compiled(tmp_path, debug=debug)
    out, err = capfd.readouterr()
    assert out == ""
    assert (err == "") == (debug == 0)
    for words, level in LEVELS.items():
        assert (words in err) == (debug >= level), words


def test_a_dump_holds_every_stage_as_text(tmp_path):
    for _ in range(2):  # the second time everything is in the cache, and is dumped all the same
        step = compiled(tmp_path, dump=tmp_path / "dump")
    (folder,) = (tmp_path / "dump").iterdir()
    assert folder.name.startswith("train-")
    files = {path.name for path in folder.iterdir()}
    assert {f"{stage}.txt" for stage in PRODUCTS[:-1]} | {"sources-0.cpp", "times.txt"} <= files
    for stage in PRODUCTS[:-1]:
        assert (folder / f"{stage}.txt").read_text().strip() == step.graph(stage).strip()
    assert (folder / "sources-0.cpp").read_text() in step.graph("sources")
    passes = {path.name for path in (folder / "passes").iterdir()}
    assert {"00-start.txt", "04-RemoveNoOps.txt", "04-RemoveNoOps.diff"} <= passes
    times = (folder / "times.txt").read_text()
    assert all(stage in times for stage in ("capture", "clean", "plan memory", "build"))


def test_every_graph_of_a_dump_can_be_parsed(tmp_path):
    step = compiled(tmp_path, dump=tmp_path / "dump")
    (folder,) = (tmp_path / "dump").iterdir()
    files = [folder / f"{stage}.txt" for stage in ("captured", "clean", "planned")]
    files += sorted((folder / "passes").glob("*.txt"))
    for path in files:
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("#")]
        assert show(parse(path.read_text()), exact=True) == "\n".join(kept), path.name
    again = parse(step.graph("captured"))
    assert show(again) == show(step.compiled.captured.step)


def test_every_stage_can_be_read_of_a_step_from_the_cache(tmp_path):
    first, second = compiled(tmp_path), compiled(tmp_path)
    assert second.compiled.from_cache
    for stage in PRODUCTS:
        assert second.graph(stage) == first.graph(stage), stage
    with pytest.raises(treadle.TreadleError, match="TR-002"):
        second.graph("fried")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_line_after_a_while_and_then_nothing():
    stream = Terminal()
    line = ProgressLine(stream, after=0.05, every=0.05)
    clock = Clock(line)
    with clock.stage("plan memory"):
        time.sleep(0.3)
    line.closes()
    assert "treadle: plan memory ... 0 s" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("drawn", [{}, {"auto_refresh": False}, {"redirect_stderr": False}])
def test_the_line_gives_way_to_a_display_of_rich(drawn):
    stream = Terminal()
    console = Console(file=Terminal(), force_terminal=True)
    line = ProgressLine(stream, after=0.02, every=0.02)
    with Progress(console=console, **drawn), Clock(line).stage("plan memory"):
        time.sleep(0.2)
        assert stream.getvalue() == ""
    time.sleep(0.2)
    assert "plan memory" in stream.getvalue()
    with Progress(console=console):
        time.sleep(0.2)
        before = stream.getvalue()
        assert before.endswith("\r\x1b[K")
        time.sleep(0.1)
        assert stream.getvalue() == before
    line.closes()


def test_a_line_made_inside_a_display_writes_to_the_terminal_itself(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(console=Console(file=Terminal(), force_terminal=True)):
        line = ProgressLine(sys.stderr, after=0.02, every=0.02)
    with Clock(line).stage("build"):
        time.sleep(0.2)
    line.closes()
    assert "treadle: build" in stream.getvalue()


def test_of_two_lines_one_is_shown():
    outer, inner = Terminal(), Terminal()
    lines = [ProgressLine(each, after=0.02, every=0.02) for each in (outer, inner)]
    with Clock(lines[0]).stage("round 1"):
        time.sleep(0.1)
        with Clock(lines[1]).stage("capture"):
            time.sleep(0.1)
        lines[1].closes()
    lines[0].closes()
    assert "round 1" in outer.getvalue()
    assert inner.getvalue() == ""


def test_a_line_is_never_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = ProgressLine(stream, after=0.01, every=0.01)
    with Clock(line).stage("a stage with a long name"):
        time.sleep(0.1)
    line.closes()
    assert {len(each) for each in stream.getvalue().split("\r\x1b[K")} == {0, 19}


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_go_back_is_left_alone(monkeypatch, term):
    monkeypatch.setenv("TERM", "xterm")
    assert can_be_live(Terminal())
    monkeypatch.setenv("TERM", term)
    assert not can_be_live(Terminal())


def test_of_a_torchrun_only_the_first_process_shows_progress(monkeypatch):
    forget_progress_settings(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not from_environment().progress
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert from_environment().progress


def test_what_is_quick_stays_silent():
    stream = Terminal()
    line = ProgressLine(stream)
    with Clock(line).stage("look up"):
        pass
    line.closes()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("stream", "options", "shown"),
    [(Terminal(), {}, True), (io.StringIO(), {}, False), (Terminal(), {"progress": False}, False)],
)
def test_the_line_is_for_terminals(stream, options, shown):
    watcher = watcher_for("step", Options(**options), stream)
    watcher.begins("plan memory")
    watcher.closes()
    assert any(isinstance(each, ProgressLine) for each in watcher._watchers) == shown


def test_watchers_pass_everything_on():
    heard = []

    class Listener(Watcher):
        def begins(self, stage):
            heard.append(("begins", stage))

        def ends(self, stage, seconds):
            heard.append(("ends", stage, seconds >= 0))

        def closes(self):
            heard.append("closes")

    both = Watchers([Listener(), Watcher(), Listener()])
    clock = Clock(both)
    with pytest.raises(KeyError), clock.stage("clean"):
        raise KeyError
    both.closes()
    assert heard == [("begins", "clean")] * 2 + [("ends", "clean", True)] * 2 + ["closes"] * 2
    assert list(clock.seconds) == ["clean"]


@pytest.mark.parametrize("level", ["two", "-1", "1.5"])
def test_a_level_that_is_no_number_is_refused(monkeypatch, level):
    monkeypatch.setenv("TREADLE_DEBUG", level)
    with pytest.raises(treadle.TreadleError, match="TR-001"):
        from_environment()


def test_the_environment_reaches_the_options(monkeypatch, tmp_path):
    monkeypatch.setenv("TREADLE_DEBUG", "2")
    monkeypatch.setenv("TREADLE_DUMP", str(tmp_path))
    monkeypatch.setenv("TREADLE_NO_PROGRESS", "1")
    options = from_environment()
    assert (options.debug, options.dump, options.progress) == (2, tmp_path, False)
