"""``treadle bench`` and ``treadle report``, as a person types them."""

import functools
import io
import json
import math
import sys
import time

import pytest
import torch
from rich.console import Console

from testing import forget_progress_settings
from treadle.tools.bench import (
    WARMUP,
    Contestant,
    Figures,
    Result,
    _figures,
    _four_digits,
    _gap,
    bench,
    eager_peak,
    print_table,
    random_state,
)
from treadle.tools.cli import main
from treadle.tools.commands import progress
from treadle.tools.entry_point import EntryPoint, TrainingJob

SCRIPT = """
import torch
from rich.console import Console
from torch import nn

made = []

def make():
    model = nn.Sequential(nn.Linear(6, 33), nn.Dropout(0.2), nn.GELU(), nn.Linear(33, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    made.append(model)
    return step, model, optimizer, (torch.randn(67, 6),)

def same():
    if not made:
        make()
    optimizer = torch.optim.SGD(made[0].parameters(), lr=0.1)
    def step(x):
        loss = made[0](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step, made[0], optimizer, (torch.randn(67, 6),)

def nothing():
    step, *rest = make()
    def silent(x):
        step(x)
    return (silent, *rest)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def test_bench_writes_what_it_prints(script, tmp_path, capsys):
    out = tmp_path / "new" / "bench.json"
    command = ["bench", f"{script}:make", "--steps", "5", "--json", str(out), "--memory", "1MiB"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err == ""
    data = json.loads(out.read_text())
    assert (data["steps"], data["warmup_steps"], data["memory"]) == (5, WARMUP, "1MiB")
    eager, ours = data["contestants"]
    assert (eager["name"], ours["name"]) == ("eager", "treadle")
    assert (eager["ratio_to_eager"], eager["peak_ratio_to_eager"]) == (1, 1)
    assert (eager["compile_s"], eager["loss_distance"]) == (0, 0)
    for each in (eager, ours):
        assert len(each["step_ms"]) == 5
        assert each["step_ms_low"] <= each["step_ms_median"] <= each["step_ms_high"]
        assert min(each["step_ms"]) <= each["step_ms_low"]
        assert _four_digits(each["step_ms_median"]) in said.out
        assert each["loss_last"] < each["loss_first"]
    pairs = zip(ours["step_ms"], eager["step_ms"], strict=True)
    assert ours["ratio_to_eager"] == pytest.approx(sorted(a / b for a, b in pairs)[2])
    assert ours["peak_ratio_to_eager"] == ours["peak_bytes"] / eager["peak_bytes"]
    assert abs(ours["predicted_peak_bytes"] / ours["peak_bytes"] - 1) <= 0.05
    assert ours["loss_distance"] <= 1e-5  # the same masks, or it would be far more
    assert ours["compile_s"] > 0


def test_the_table_fits_into_80_columns():
    figures = [
        Figures(
            name, 12345.678, 12345.678, 12345.678, 1.0, 3 << 42, None, 10.0, 1234.5, 1.0, 1.0, 1e-5,
            (),
        )
        for name in ("eager", "treadle", "torch.compile")
    ]  # fmt: skip
    result = Result("train.py:make", 20, 3, "cpu", 2, "", "", "", None, tuple(figures))
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(console, result)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("12346 to 12346") == 3


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(1.234, "1.23"), (99.99, "99.99"), (123.46, "123.5"), (1e4, "10000")]
)
def test_times_have_four_digits(milliseconds, text):
    assert _four_digits(milliseconds) == text


def test_contestants_train_models_of_their_own_as_eager_alone_does(script):
    target = EntryPoint(f"{script}:make")
    result = bench(target, memory=None, steps=2, with_torch=False)
    job = target.make()
    losses = [job.step(*job.batch).item() for _ in range(WARMUP + 2)]
    eager, ours = result.contestants
    assert (eager.loss_first, eager.loss_last) == (losses[0], losses[-1])
    assert ours.loss_last == pytest.approx(losses[-1], rel=1e-4)


def test_a_step_that_returns_nothing_has_no_loss(script, capsys):
    assert main(["bench", f"{script}:nothing", "--steps", "1"]) == 0
    result = bench(EntryPoint(f"{script}:nothing"), memory=None, steps=1, with_torch=False)
    for each in result.contestants:
        assert each.loss_first is each.loss_last is each.loss_distance is None
        assert each.step_ms_low == each.step_ms_median == each.step_ms_high


def test_torch_compile_is_a_contestant_when_asked(script, tmp_path, capsys, monkeypatch):
    # What it compiles to is not the question.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "bench.json"
    command = ["bench", f"{script}:make", "--steps", "2", "--json", str(out)]
    assert main([*command, "--against", "eager, torch.compile"]) == 0
    eager, _, theirs = json.loads(out.read_text())["contestants"]
    assert theirs["name"] == "torch.compile"
    assert theirs["loss_distance"] == 0
    assert theirs["peak_bytes"] == pytest.approx(eager["peak_bytes"], rel=0.05)
    assert theirs["predicted_peak_bytes"] is None
    assert "torch.compile" in capsys.readouterr().out


def test_a_row_in_which_nothing_was_captured_is_refused(script, capsys):
    """The model is an ``nn.Sequential``, of which ``model.compile()`` captures nothing."""
    command = ["bench", f"{script}:make", "--steps", "1", "--against", "eager,torch.compile"]
    with torch.compiler.set_stance("force_eager"):
        assert main(command) == 3
    assert "TR-006" in capsys.readouterr().err


def test_one_model_for_two_is_refused(script, capsys):
    assert main(["bench", f"{script}:same", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "TR-203" in said
    assert "same model" in said


def seen(name, seconds, losses, gaps):
    job = TrainingJob(lambda: None, None, None, ())
    made = Contestant(name, job, job.step, random_state(), seconds, losses)
    made.gaps = [torch.tensor(gap, dtype=torch.float64) for gap in gaps]
    return made


def test_figures_are_medians_and_distances_that_nan_wins():
    eager = seen("eager", [9.0] * WARMUP + [0.2, 0.1, 0.4], [1.0], [0.0])
    other = seen("torch.compile", [8.0, 9.0, 9.0, 0.1, 0.3, 0.2], [1.0], [0.5, math.nan, 2.0])
    figures = _figures(other, eager, 7)
    assert figures.step_ms_median == pytest.approx(200)
    assert figures.ratio_to_eager == pytest.approx(0.5)
    assert (figures.step_ms_low, figures.step_ms_high) == pytest.approx((150, 250))
    assert figures.compile_s == pytest.approx(7.8)
    assert math.isnan(figures.loss_distance)
    special = torch.tensor([math.inf, math.nan, 1.0], dtype=torch.float64)
    assert _gap(special, special).item() == 0
    assert _gap(special, special + torch.tensor([0, 0, 0.25])).item() == 0.25
    assert math.isnan(_gap(special, torch.tensor([math.inf, 2.0, 1.0])).item())


def test_eagers_peak_counts_parameters_state_gradients_and_batch():
    model = torch.nn.Linear(100, 50, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    batch = (torch.randn(7, 100), {"more": torch.randn(11)})
    report = eager_peak(lambda x, more: None, model, optimizer, batch)
    assert report.before_bytes == 3 * 4 * 5000 + 4 * 700 + 44


def test_report_writes_and_prints_the_path(script, tmp_path, capsys):
    out = tmp_path / "deep" / "report.html"
    assert main(["report", f"{script}:make", "--output", str(out), "--memory", "1MiB"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert said.err == ""
    text = out.read_text()
    assert "not known" not in text
    assert "1.00 MiB" in text


@pytest.mark.parametrize(("command", "flag"), [("report", "--output"), ("bench", "--json")])
def test_a_path_that_cannot_be_written_is_found_before_the_work(
    script, tmp_path, capsys, command, flag
):
    script.write_text(SCRIPT + "\ndef never():\n    raise AssertionError('the work began')\n")
    for path in (tmp_path, script / "below.html"):
        assert main([command, f"{script}:never", flag, str(path)]) == 2
        assert "TR-004" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "bench"])
def test_a_target_that_is_none_is_refused(script, capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for target in ("nowhere.py:make", f"{script}:missing", "mine.py"):
        assert main([command, target]) == 2
        assert "TR-203" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([command, f"{script}:make", "--memory", "7 parsecs"])
    assert "TR-201" in capsys.readouterr().err
    assert {each for each in tmp_path.iterdir() if each.suffix == ".html"} <= before


def test_something_else_to_compare_with_is_refused(script, capsys):
    assert main(["bench", f"{script}:make", "--against", "eager,jax"]) == 2
    assert "TR-001" in capsys.readouterr().err


def test_progress_is_silent_off_a_terminal_and_shown_on_one(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        forget_progress_settings(monkeypatch)
        monkeypatch.setenv("TERM", "xterm-256color")
        with progress() as clock, clock.stage("time each kernel"):
            time.sleep(1.2 if shown else 0)
        assert ("time each kernel" in stream.getvalue()) == shown
