"""The command line, as a person types it."""

import json

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


def test_plan_reads_a_file(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(4, 3)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    def step(x):\n"
        "        loss = model(x).sum()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        return loss.detach()\n"
        "    return step, model, optimizer, (torch.randn(5, 4),)\n"
    )
    assert main(["plan", f"{script}:make", "--memory", "1GiB"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["nowhere.py:make", "nothing"])
def test_plan_refuses_what_is_not_there(target, capsys):
    assert main(["plan", target]) == 1
    assert "TR-203" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo", "--steps", "0"], ["fly"], []])
def test_wrong_words_are_usage_errors(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
