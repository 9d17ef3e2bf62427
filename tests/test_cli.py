"""The command line, as a person types it."""

import json
import re
import sys

import pytest

from treadle.cli import main


def test_doctor_says_what_the_machine_has(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text
    assert "python" in text


def test_demo_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "new" / "out.json"
    assert main(["demo", "--steps", "4", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    eager, compiled, small = data["runs"]
    assert data["max_loss_diff_50"] <= 1e-4
    assert eager["predicted_peak_bytes"] is None
    for run in (compiled, small):
        assert abs(run["predicted_peak_bytes"] / run["peak_bytes"] - 1) <= 0.05
    assert small["peak_bytes"] <= 0.6 * eager["peak_bytes"]
    assert "ms/step" in capsys.readouterr().out


SCRIPT = """
import torch
from beside import WIDTH

def make():
    layers = torch.nn.Linear(4, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 3)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step, model, optimizer, (torch.randn(5, 4),)

def three():
    return make()[:3]

def draws():
    step, *rest = make()
    return (lambda x: step(x + torch.randn(()).item()), *rest)

number = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "beside.py").write_text("WIDTH = 7\n")
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("beside", None)


@pytest.mark.parametrize("more", [[], ["--device", "a100"], ["--fake"], ["--memory", "1GiB"]])
def test_plan_reads_a_file(script, capsys, more):
    assert main(["plan", f"{script}:make", *more]) == 0
    assert capsys.readouterr().out.startswith("fits")


def test_plan_says_no(script, capsys):
    assert main(["plan", f"{script}:make", "--memory", "64B"]) == 1
    assert capsys.readouterr().out.startswith("does not fit 64 B on cpu")


def test_verify_compares_with_eager(script, capsys):
    assert main(["verify", f"{script}:make", "--steps", "2"]) == 0
    assert "2 steps: every result" in capsys.readouterr().out


def test_explain_measures(script, capsys):
    assert main(["explain", f"{script}:make", "--memory", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert "measured peak" in text
    assert "GB/s" in text


@pytest.mark.parametrize("command", ["plan", "verify", "explain"])
@pytest.mark.parametrize("name", ["nothing", "number", "three"])
def test_a_function_that_is_none_is_refused(script, capsys, command, name):
    assert main([command, f"{script}:{name}"]) == 1
    assert "TR-203" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["nowhere.py:make", "nothing", "tests:make"])
def test_a_file_that_is_none_is_refused(target, capsys):
    assert main(["plan", target]) == 1
    assert "TR-203" in capsys.readouterr().err


def test_a_step_that_cannot_be_captured_is_an_error_with_a_line(script, capsys):
    assert main(["verify", f"{script}:draws"]) == 1
    text = capsys.readouterr().err
    assert "TR-102" in text
    assert "mine.py" in text


def test_the_cache_can_be_seen_and_cleared(script, capsys):
    def said(*command):
        assert main([*command]) == 0
        return capsys.readouterr().out

    said("verify", f"{script}:make", "--steps", "1")
    count = re.search(r" (\d+) entries", said("cache"))[1]
    assert int(count) > 1
    assert f"removed {count} entries" in said("cache", "clear")
    assert "0 entries, 0 B of" in said("cache", "size")
    assert "removed 0 entries" in said("cache", "clear")
    said("verify", f"{script}:make", "--steps", "1")


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["fly"], []])
def test_wrong_words_are_usage_errors(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
