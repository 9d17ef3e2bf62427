"""What the backend compiled can be explained, summed up, reported and traced."""

import json

import torch
from torch import nn

from treadle import backend
from treadle.backend import treadle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(9, 17)
        self.down = nn.Linear(17, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def test_what_was_compiled_tells_as_much_as_a_step(tmp_path):
    before = set(backend.compiled())
    model = torch.compile(Net(), backend=treadle)
    batch = torch.randn(5, 9)
    model(batch).square().sum().backward()
    (graph,) = (each for each in backend.compiled() if each not in before)
    assert graph.name.endswith("forward and backward")
    assert graph.summary().seconds is None
    assert "inside backend.profiling()" in graph.explain()
    with backend.profiling():
        model(batch).square().sum().backward()
    found = graph.summary()
    assert found.seconds > 0
    assert {part.name for part in found.phases} >= {"forward", "backward"}
    assert all(part.seconds > 0 for part in found.phases if part.name != "optimizer")
    assert found.launches + found.library_calls > 0
    assert "inputs:" in graph.explain()
    page = graph.report(tmp_path / "page.html").read_text()
    assert "A graph of the torch.compile backend" in page
    data = json.loads(graph.trace(tmp_path / "trace.json").read_text())
    assert data["traceEvents"]
    assert "test_backend_reports.py" in graph.explain()
    assert "self.down(torch.tanh(self.up(x)))" in graph.explain()
    last = graph.summary().seconds
    model(batch)
    assert graph.summary().seconds == last  # not timed any more


def test_what_is_gone_is_not_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    before = len(backend.compiled())
    compiled = torch.compile(lambda x: x.sin() + 1, backend=treadle)
    compiled(torch.randn(7))
    assert len(backend.compiled()) == before + 1
    del compiled
    torch._dynamo.reset()
    assert len(backend.compiled()) <= before


def test_the_ladder_and_the_dump_show_the_joint_graph(tmp_path, monkeypatch, capfd):
    """What is decided about a joint graph is decided by passes, and shown as those of a step."""
    monkeypatch.setenv("TREADLE_NO_CODEGEN", "1")
    monkeypatch.setenv("TREADLE_DEBUG", "2")
    monkeypatch.setenv("TREADLE_DUMP", str(tmp_path / "dump"))
    torch._dynamo.reset()
    model = nn.ModuleList([Net(), nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Dropout(0.5))])

    def forward(x):
        for each in (*model, *model):
            x = torch.sin(each(x))
        return x

    compiled = torch.compile(forward, backend=treadle, options={"memory": 0.0})
    compiled(torch.randn(64, 9)).sum().backward()
    err = capfd.readouterr().err
    shown = [line.split("(")[0] for line in err.splitlines() if line.startswith("treadle: ")]
    for each in ("DrawInMemoryOrder", "RemoveNoOps", "ReadMasksAsBytes", "Recompute"):
        assert f"treadle: {each}" in shown
    assert sum(line.startswith("treadle: plan memory") for line in shown) == 1
    (folder,) = (tmp_path / "dump").iterdir()
    assert folder.name.partition("-")[0] == "joint"
    assert (folder / "planned.txt").exists()
    assert (folder / "kernels.txt").exists()
