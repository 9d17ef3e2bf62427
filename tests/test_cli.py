"""The command line, as a person types it."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import treadle
from testing import small_demo
from treadle.lower import registry
from treadle.tools.cli import _memory, main
from treadle.tools.exit_status import Exit


def test_doctor_says_what_the_machine_has(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text
    assert "python" in text


def test_doctor_prints_json(capsys, tmp_path):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["treadle"] == treadle.__version__
    assert found["torch"] == torch.__version__
    path = tmp_path / "new" / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    again = json.loads(path.read_text())
    assert {**again, "cache": ""} == {**found, "cache": ""}  # which other tests fill meanwhile
    assert "torch  " in capsys.readouterr().out


def test_figures_of_each_command_are_json_on_standard_output(script, capsys):
    def figures(*words):
        assert main([words[0], f"{script}:make", *words[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert figures("plan", "--memory", "1GiB")["fits"] is True
    assert figures("plan", "--optimizer-state", "8bit")["fits"] is True
    assert figures("verify", "--steps", "1") == {"steps": 1, "difference": None}
    assert figures("explain")["launches"] >= 0
    assert figures("explain", "--stages")["stages"]
    assert main(["cache", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {
        "directory", "entries", "bytes", "limit_bytes",
    }  # fmt: skip


def test_options_of_one_meaning_have_one_name(capsys):
    """``--json FILE`` for figures, ``--output FILE`` for a page or a graph, ``--steps`` to run."""
    found = {}
    for command in ("demo", "plan", "verify", "explain", "report", "bench", "reduce", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        found[command] = set(re.findall(r"--[a-z]+", capsys.readouterr().out))
    assert {name for name in found if "--json" in found[name]} == {
        "demo", "plan", "verify", "explain", "bench", "doctor",
    }  # fmt: skip
    assert {name for name in found if "--output" in found[name]} == {"report", "reduce"}
    assert {name for name in found if "--steps" in found[name]} == {"demo", "verify", "bench"}


def test_demo_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TREADLE_NO_PROGRESS", raising=False)
    small_demo(monkeypatch.setattr)
    out = tmp_path / "new" / "out.json"
    assert main(["demo", "--steps", "4", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    eager, compiled, small = data["runs"]
    assert data["max_loss_diff_50"] <= 1e-4
    assert eager["predicted_peak_bytes"] is None
    for run in (compiled, small):
        assert abs(run["predicted_peak_bytes"] / run["peak_bytes"] - 1) <= 0.05
    assert small["peak_bytes"] <= 0.6 * eager["peak_bytes"]
    assert (eager["ratio_to_eager"], eager["compile_s"]) == (1, 0)
    text = capsys.readouterr().out
    assert "ms/step" in text
    assert "\x1b" not in text  # lines, where the output is no terminal
    for line in ("compile: compiled", "compile: budget", "step 1 of 4: loss eager ", "step 4 of 4"):
        assert line in text


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

def fails():
    raise ValueError("no data here")

def fails_later():
    step, model, optimizer, _ = make()
    return step, model, optimizer, torch.randn(5, 9)

def alone():
    return (*make()[:3], torch.randn(5, 4))

def too_many():
    step, model, optimizer, batch = make()
    return step, model, optimizer, (*batch, 1, 2)

def takes(width):
    raise AssertionError

def noisy():
    # the gradient of a shift of all logits is zero, and Adam divides by its size
    model = torch.nn.Linear(4, 3)
    model.shift = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    def step(x, y):
        loss = torch.nn.functional.cross_entropy(model(x) + model.shift, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step, model, optimizer, (torch.randn(64, 4), torch.randint(3, (64,)))

def curved():
    model = torch.nn.Linear(4, 3)
    return lambda x: model(x).sin().sum(), model, (), torch.randn(5, 4)

def stops():
    raise SystemExit("bye")

def draws():
    step, *rest = make()
    return (lambda x: step(x + len({torch.randn(()).item()})), *rest)

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


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--device", "a100"],
        ["--fake"],
        ["--memory", "1GiB"],
        ["--memory", "0.0"],
        ["--planner", "greedy"],
        ["--planner", '{"estimator": "constant", "bans": ["compute-intensive"]}'],
    ],
)
def test_plan_reads_a_file(script, capsys, more):
    assert main(["plan", f"{script}:make", *more]) == 0
    assert capsys.readouterr().out.startswith("fits")


@pytest.mark.parametrize("planner", ["quick", '{"solver": 1}', "{", '{"bans": ["none"]}'])
def test_a_planner_that_is_none(script, capsys, planner):
    with pytest.raises(SystemExit) as left:
        main(["plan", f"{script}:make", "--planner", planner])
    assert left.value.code == Exit.USAGE
    said = capsys.readouterr().err
    assert "argument --planner: " in said
    assert "TR-001" in said


def test_plan_says_no(script, capsys):
    assert main(["plan", f"{script}:make", "--memory", "64B"]) == 1
    assert capsys.readouterr().out.startswith("does not fit 64 B on cpu")


def test_verify_compares_with_eager(script, capsys):
    assert main(["verify", f"{script}:make", "--steps", "2"]) == 0
    assert "2 steps: every result, parameter, buffer and state agrees" in capsys.readouterr().out


def test_verify_says_where_a_difference_starts(script, capsys, monkeypatch):
    monkeypatch.setitem(
        registry._RULES, torch.ops.aten.sin.default, registry._RULES[torch.ops.aten.cos.default]
    )
    assert main(["verify", f"{script}:curved"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 0: result 0 differs from eager by ")
    assert "starts at sin" in second
    assert "mine.py" in second


def test_verify_has_tolerances(script, capsys):
    assert main(["verify", f"{script}:noisy", "--steps", "1"]) == 1
    out = capsys.readouterr().out
    assert "step 0: shift differs from eager by " in out
    assert "optimizer.step()" in out  # where rounding is divided by its own size
    assert main(["verify", f"{script}:noisy", "--steps", "1", "--atol", "0.5"]) == 0
    assert main(["verify", f"{script}:noisy", "--steps", "1", "--rtol", "1e-9"]) == 1


def test_explain_measures(script, capsys):
    assert main(["explain", f"{script}:make", "--memory", "1MiB"]) == 0
    text = capsys.readouterr().out
    assert "measured peak" in text
    assert "GB/s" in text


def test_explain_shows_the_stages(script, capsys):
    assert main(["explain", f"{script}:make", "--stages"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if "RemoveNoOps()" in line and "nodes" in line]
    assert "measured" not in text  # nothing ran


@pytest.mark.parametrize("command", ["plan", "verify", "explain"])
@pytest.mark.parametrize("name", ["nothing", "number", "three", "takes"])
def test_a_function_that_is_none_is_refused(script, capsys, command, name):
    assert main([command, f"{script}:{name}"]) == Exit.USAGE
    assert "TR-203" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "verify", "explain", "report", "bench"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py:make", "nowhere.py does not exist"),
        ("nothing", "nothing does not exist"),
        (".:make", ". is a directory"),
        (":make", ". is a directory"),
    ],
)
def test_a_file_that_is_none_is_refused_and_named(target, words, command, capsys):
    assert main([command, target]) == Exit.USAGE
    text = capsys.readouterr().err
    assert "TR-203" in text
    assert words in text


def test_a_function_that_is_not_named_is_refused_with_those_there_are(script, capsys):
    assert main(["plan", f"{script}"]) == Exit.USAGE
    assert "it has make, three, fails" in capsys.readouterr().err
    assert main(["plan", f"{script}:takes"]) == Exit.USAGE
    assert "takes needs arguments: 'width'" in capsys.readouterr().err
    assert main(["plan", f"{script}:mak"]) == Exit.USAGE
    assert "it has make, three, fails" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", ["ValueError: no data here", 'raise ValueError("no data here")']),
        ("fails_later", ["[5, 9]", "loss = model(x)"]),
        ("stops", ["ended the process (bye)"]),
    ],
)
def test_an_error_of_the_users_code_is_shown_with_their_lines(script, capsys, name, words):
    assert main(["verify", f"{script}:{name}"]) == Exit.USERS_CODE
    out, err = capsys.readouterr()
    assert all(each in err for each in words)
    assert "TR-" in err
    assert "Traceback" not in out + err
    assert "site-packages" not in err


@pytest.mark.parametrize("text", ["def make(:\n", "import no_such_module_here\n", "1 / 0\n"])
def test_a_file_that_cannot_be_imported_is_named(tmp_path, capsys, text):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\n" + text)
    assert main(["plan", f"{path}:make"]) == Exit.USERS_CODE
    err = capsys.readouterr().err
    assert "TR-206" in err
    assert "broken.py:2" in err
    assert "Traceback" not in err


def test_a_batch_that_does_not_fit_the_step_is_refused(script, capsys):
    assert main(["plan", f"{script}:too_many"]) == Exit.USAGE
    assert "(3 arguments)" in capsys.readouterr().err


def test_one_tensor_is_a_batch_of_one_argument(script, capsys):
    assert main(["plan", f"{script}:alone"]) == 0
    assert capsys.readouterr().out.startswith("fits")


def test_a_budget_that_cannot_be_met_is_a_refusal(script, capsys):
    assert main(["explain", f"{script}:make", "--memory", "64"]) == Exit.REFUSED
    assert "TR-202" in capsys.readouterr().err


def test_a_bug_says_so_and_shows_where(script, capsys, monkeypatch):
    def wrong(*_args, **_kwargs):
        return {}["inside"]

    monkeypatch.setattr("treadle.compiler.planning.capture", wrong)
    monkeypatch.setattr(
        "treadle.tools.entry_point.is_users", lambda _path: False
    )  # these lines are ours
    assert main(["plan", f"{script}:make"]) == Exit.BUG
    err = capsys.readouterr().err
    assert "this is a bug in treadle" in err
    assert "KeyError" in err


def test_ctrl_c_ends_quietly(script, capsys, monkeypatch):
    def stopped(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.tools.run.plan", stopped)
    assert main(["plan", f"{script}:make"]) == Exit.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_ends_it_quietly(script, capsys, monkeypatch):
    def gone(*_args, **_kwargs):
        raise BrokenPipeError

    monkeypatch.setattr("treadle.tools.run._say", gone)
    monkeypatch.setattr("sys.stdout", sys.stdout)  # put back afterwards
    assert main(["doctor"]) == Exit.NO_READER
    assert capsys.readouterr().err == ""


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"treadle {treadle.__version__}\n"


def test_every_command_has_help_and_the_statuses_are_told(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = ["demo", "plan", "verify", "explain", "report", "bench", "reduce", "why", "doctor",
                "cache"]  # fmt: skip
    for words in [[], *([each] for each in commands)]:
        with pytest.raises(SystemExit) as stop:
            main([*words, "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert max(map(len, told.splitlines())) <= 80
        assert re.search(rf"example: .*treadle {' '.join(words)}", told, re.DOTALL)
    page = Path(__file__).parent.parent / "docs" / "reference" / "command-line.md"
    statuses = re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE)
    assert [int(each) for each in statuses] == [each.value for each in Exit]


def test_a_step_that_cannot_be_captured_is_an_error_with_a_line(script, capsys):
    assert main(["verify", f"{script}:draws"]) == Exit.REFUSED
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--atol", "-1", "x.py:make"], "not a number from 0 to below 1"),
        (["demo", "--steps", "0"], "not a whole number of at least 1"),
        (["demo", "--steps", "1e3"], "not a whole number of at least 1"),
        (["plan", "--points", "1", "x.py:make"], "not a whole number of at least 2"),
        (["plan", "x.py:make", "--memory", "1.5"], "not a ratio between 0.0 and 1.0"),
        (["plan", "x.py:make", "--memory", "12 bananas"], "is not a size in bytes"),
        (["explain", "x.py:make", "--memory", "0"], "is not a size in bytes"),
        (["plan", "x.py:make", "--device", "abacus"], "no device named 'abacus'"),
        (["cache", "burn"], "invalid choice"),
        (["fly"], "invalid choice"),
        ([], "required"),
        (["plan"], "required"),
    ],
)
def test_wrong_words_are_usage_errors(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == Exit.USAGE
    assert words in capsys.readouterr().err


def test_wrong_words_that_come_up_later_are_usage_errors_too(script, capsys, tmp_path, monkeypatch):
    for words in (["report", "--output", str(tmp_path)], ["bench", "--against", "abacus"]):
        assert main([words[0], f"{script}:make", *words[1:]]) == Exit.USAGE
    assert main(["bench", f"{script}:make", "--json", str(tmp_path)]) == Exit.USAGE
    monkeypatch.setenv("TREADLE_DEBUG", "two")
    assert main(["doctor"]) == Exit.USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), (".5", 0.5), ("1.0", 1.0), ("4096", 4096), ("12GiB", "12GiB")],
)
def test_a_budget_is_a_size_or_a_ratio(text, value):
    assert _memory(text) == value
    assert type(_memory(text)) is type(value)
