"""``treadle reduce FILE``, as a person types it."""

import pytest
import torch
from torch import nn

import treadle
from treadle.graph.analysis.reduce import count_of
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.lower import registry
from treadle.options import Options
from treadle.passes import registered
from treadle.tools.cli import main
from treadle.tools.exit_status import Exit
from treadle.tools.reduce import Trial

aten = torch.ops.aten
GRAPH = """
w: f32[8, 8]  # parameter
x: f32[6, 8]  # batch
mm: f32[6, 8] = mm(x, w)
relu: f32[6, 8] = relu(mm)
cumsum: f32[6, 8] = cumsum(relu, 0)
mul: f32[6, 8] = mul.Tensor(cumsum, 0.5)
tanh: f32[6, 8] = tanh(mul)
mean: f32[] = mean(tanh)
t: f32[8, 6] = t(x)
mm.1: f32[8, 8] = mm(t, mul)
mul.1: f32[8, 8] = mul.Tensor(mm.1, 0.1)
sub: f32[8, 8] = sub.Tensor(w, mul.1)
return [mean]
w <- sub
"""


@pytest.fixture(autouse=True)
def _nothing_registered(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registered, "_passes", [])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "captured.txt"
    path.write_text(GRAPH)
    return path


def lower_as(monkeypatch, op, rule):
    monkeypatch.setitem(registry._RULES, op, rule)


def test_a_wrong_lowering_is_found(file, tmp_path, monkeypatch, capsys):
    exp = registry.rule_for(aten.exp.default)
    lower_as(monkeypatch, aten.tanh.default, exp)
    assert main(["reduce", str(file)]) == Exit.DONE
    out, err = capsys.readouterr()
    smallest = tmp_path / "captured.reduced.txt"
    text = smallest.read_text()
    assert "10 operations, 2 inputs, 2 results: out0 differs from eager by up to" in out
    assert f"written to {smallest}; to reproduce: treadle reduce {smallest}" in out
    assert "treadle: operations: 1 operation, 1 input, 1 result after" in err
    assert text.startswith("# result 0 differs from eager by up to")
    assert text.splitlines()[3:] == [
        "from_mul: f32[1, 1]  # batch",
        "tanh: f32[1, 1] = tanh(from_mul)  # forward",
        "return [tanh]  # ['result 0']",
    ]
    assert main(["reduce", str(smallest), "--output", str(tmp_path / "again.txt")]) == Exit.DONE
    assert parse((tmp_path / "again.txt").read_text()).signature == parse(text).signature


def test_a_write_that_is_wrong_is_found(file, tmp_path, monkeypatch):
    """The numbers of what is written count as those of results do."""
    add = registry.rule_for(aten.add.Tensor)
    lower_as(monkeypatch, aten.sub.Tensor, add)
    assert main(["reduce", str(file)]) == Exit.DONE
    found = parse((tmp_path / "captured.reduced.txt").read_text())
    assert show(found).splitlines()[-2].endswith("= sub.Tensor(w, w)")
    assert count_of(found).inputs == 1


def test_a_rule_that_raises_is_found(file, tmp_path, monkeypatch, capsys):
    def broken(*_args, **_kwargs):
        raise KeyError("no such axis")

    lower_as(monkeypatch, aten.cumsum.default, broken)
    assert main(["reduce", str(file)]) == Exit.DONE
    assert "TR-900 KeyError: " in capsys.readouterr().out
    text = (tmp_path / "captured.reduced.txt").read_text()
    assert "no such axis" in text.splitlines()[0]
    step = parse(text)
    assert count_of(step).operations == 1
    assert "= cumsum(" in show(step)


def test_a_broken_pass_of_the_users_is_imported(file, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("""
from dataclasses import dataclass
import torch, treadle

@dataclass(frozen=True)
class Approximate(treadle.GraphPass):
    def run(self, step):
        found = step.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        for node in found:
            node.target = torch.ops.aten.sigmoid.default
        return len(found)

treadle.register_pass(Approximate())
""")
    assert main(["reduce", str(file), "--import", str(mine)]) == Exit.DONE
    text = (tmp_path / "captured.reduced.txt").read_text()
    assert f"# to reproduce: treadle reduce {tmp_path}/captured.reduced.txt --import {mine}" in text
    assert count_of(parse(text)).operations == 1


def test_what_a_dump_holds_can_be_reduced(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = Options(dump=tmp_path / "dump", cache_dir=tmp_path / "cache")
    treadle.compile(train, model=model, optimizer=optimizer, options=options)(torch.randn(4, 5))
    (folder,) = (tmp_path / "dump").iterdir()
    assert main(["reduce", str(folder / "captured.txt")]) == Exit.NO
    lower_as(monkeypatch, aten.tanh_backward.default, registry.rule_for(aten.mul.Tensor))
    assert main(["reduce", str(folder / "planned.txt")]) == Exit.DONE
    found = parse((folder / "planned.reduced.txt").read_text())
    assert count_of(found).operations == 1
    assert "= tanh_backward(" in show(found)


def test_what_is_interrupted_has_written_the_smallest_so_far(file, tmp_path, monkeypatch):
    lower_as(monkeypatch, aten.tanh.default, registry.rule_for(aten.exp.default))
    failure, tries = Trial.failure, []

    def interrupted(trial, step):
        tries.append(step)
        if len(tries) > 4:
            raise KeyboardInterrupt
        return failure(trial, step)

    monkeypatch.setattr(Trial, "failure", interrupted)
    assert main(["reduce", str(file)]) == Exit.INTERRUPTED
    found = parse((tmp_path / "captured.reduced.txt").read_text())
    assert 1 <= count_of(found).operations < 10


def test_a_graph_that_does_not_fail(file, capsys):
    assert main(["reduce", str(file)]) == Exit.NO
    out = capsys.readouterr().out
    assert out.strip() == f"{file} does not fail: it compiles, and its results equal eager's"
    assert not file.with_name("captured.reduced.txt").exists()


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (None, Exit.USAGE, ("TR-008", "cannot be read: No such file", "TREADLE_DUMP")),
        (b"\xff\xfe", Exit.USAGE, ("TR-008", "it is not text")),
        (b"import torch\n", Exit.USAGE, ("TR-007", "line 1, column 8", "import torch")),
        (b"x: f32[2]\ny: f32[2] = neg(z)\n", Exit.USAGE, ("TR-007", "no value 'z'", "^")),
    ],
)
def test_files_that_hold_no_graph(tmp_path, capsys, text, status, words):
    path = tmp_path / "graph.txt"
    if text is not None:
        path.write_bytes(text)
    assert main(["reduce", str(path)]) == status
    err = capsys.readouterr().err
    assert all(each in err for each in words), err


def test_an_output_that_cannot_be_written(file, tmp_path, capsys):
    assert main(["reduce", str(file), "--output", str(tmp_path)]) == Exit.USAGE
    assert "TR-004" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--rtol", "--tolerance"])
def test_the_tolerance_has_the_name_that_verify_gives_it_and_its_earlier_one(
    name, file, tmp_path, monkeypatch, capsys
):
    lower_as(monkeypatch, aten.tanh.default, registry.rule_for(aten.exp.default))
    assert main(["reduce", str(file), name, "0.01"]) == Exit.DONE
    assert f"reduce {tmp_path / 'captured.reduced.txt'} --rtol 0.01\n" in capsys.readouterr().out
    lower_as(monkeypatch, aten.tanh.default, registry.rule_for(aten.sin.default))
    assert main(["reduce", str(file), name, "0.9"]) == Exit.NO


@pytest.mark.parametrize(
    "words", [["--rtol", "x"], ["--rtol", "2"], ["--tolerance", "2"], ["--memory", "x"]]
)
def test_wrong_words(file, words):
    with pytest.raises(SystemExit) as left:
        main(["reduce", str(file), *words])
    assert left.value.code == Exit.USAGE


calls = []


@torch.library.custom_op("treadle_reduce_tests::launch", mutates_args=())
def launch(x: torch.Tensor) -> torch.Tensor:
    calls.append(x)
    return x.clone()


@launch.register_fake
def _(x):
    return torch.empty_like(x)


USERS = """
x: f32[3]
y: f32[3] = treadle_reduce_tests.launch(x)
tanh: f32[3] = tanh(y)
return [tanh]
"""


def test_operators_of_users_are_not_run(tmp_path, capsys):
    path = tmp_path / "graph.txt"
    path.write_text(USERS)
    assert main(["reduce", str(path)]) == Exit.REFUSED
    err = capsys.readouterr().err
    assert "TR-009" in err
    assert "treadle_reduce_tests.launch.default, which is not run on random inputs" in err
    assert calls == []


def test_a_compile_that_fails_needs_no_run(tmp_path, monkeypatch):
    def broken(*_args, **_kwargs):
        raise KeyError("no such axis")

    lower_as(monkeypatch, aten.tanh.default, broken)
    path = tmp_path / "graph.txt"
    path.write_text(USERS)
    assert main(["reduce", str(path)]) == Exit.DONE
    assert calls == []
    assert count_of(parse((tmp_path / "graph.reduced.txt").read_text())).operations == 1


def test_graphs_that_eager_does_not_run(tmp_path):
    text = "x: b1[]\ntreadle: NoneType = treadle.expect(x)\nn: b1[] = logical_not(x)\nreturn [n]"
    trial = Trial(Options(cache_dir=tmp_path), 1e-4)
    assert trial.failure(parse(text)) is None
    assert trial.unseen == "a check of the graph fails on random inputs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the graph's device must be missing")
def test_a_graph_for_a_device_that_is_not_here(tmp_path, capsys):
    path = tmp_path / "graph.txt"
    path.write_text("x: f32[4] on cuda:0\ny: f32[4] on cuda:0 = relu(x)\nreturn [y]")
    assert main(["reduce", str(path)]) == Exit.REFUSED
    assert "cannot be created on this machine" in capsys.readouterr().err


def test_numbers_of_half_precision_have_room(tmp_path):
    text = "x: bf16[64]\ny: bf16[64] = exp(x)\nz: bf16[64] = mul.Tensor(y, y)\nreturn [z]"
    assert Trial(Options(cache_dir=tmp_path), 1e-4).failure(parse(text)) is None


@pytest.mark.parametrize("dtype", ["f32", "i64", "b1", "bf16"])
def test_memory_that_nobody_wrote_is_not_compared(tmp_path, dtype):
    text = f"x: {dtype}[64]\ny: {dtype}[64] = empty_like(x)\nreturn [y]"
    trial = Trial(Options(cache_dir=tmp_path), 1e-4)
    assert trial.failure(parse(text)) is None
    assert not torch.are_deterministic_algorithms_enabled()
