"""A library is calm wherever it lies: in ``site-packages``, in a folder that an installer filled,
or beside the script. What fills at first use compiles nothing; what it reads still counts."""

import sys

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.python_state.code import distributions, frames

LIBRARY = """
import functools, time
from torch import nn

RATES, SEEN, CHOSEN = {}, set(), None
FACTOR = 2.0

@functools.lru_cache(maxsize=None)
def table(n):
    return tuple(FACTOR * i for i in range(n))

@functools.lru_cache(maxsize=64)
def bounded(n):
    return 1.0 / n

def rates(n):
    if n not in RATES:
        RATES[n] = [float(i) for i in range(n)]
    return RATES[n]

def chosen():
    global CHOSEN
    if CHOSEN is None:
        CHOSEN = "plain"
    return CHOSEN

class Config:
    def __init__(self):
        self.scale, self.epoch, self.dir = 2.0, 0, "out"
    @functools.cached_property
    def derived(self):
        return self.scale * 3

class Block(nn.Module):
    KNOWN = {}
    def __init__(self):
        super().__init__()
        self.linear, self.config, self.memory = nn.Linear(4, 4), Config(), {}
    def forward(self, x):
        Block.KNOWN[type(self).__name__] = type(self)
        SEEN.add(x.dtype)
        n = x.shape[-1]
        if n not in self.memory:
            self.memory[n] = sum(rates(n)) + sum(table(n)) + bounded(n)
        y = self.linear(x) * self.memory[n] * self.config.derived * sum(table(n))
        return y if chosen() == "plain" else -y
"""
OPTIONS = treadle.Options(codegen=False, progress=False)
RECORD = "installed_{name}.py,sha256=,\ninstalled_{name}-1.0.dist-info/RECORD,,\n"


@pytest.fixture
def library(tmp_path, monkeypatch, request):
    """A library in a folder of ``sys.path``, with or without an installer's record."""
    folder = tmp_path / request.param
    info = folder / f"installed_{request.param[:4]}-1.0.dist-info"
    info.mkdir(parents=True)
    name = f"installed_{request.param[:4]}"
    (folder / f"{name}.py").write_text(LIBRARY)
    if request.param == "target":
        (info / "RECORD").write_text(RECORD.format(name=request.param[:4]))
    monkeypatch.syspath_prepend(str(folder))
    yield __import__(name)
    del sys.modules[name]


@pytest.mark.parametrize("library", ["site-packages", "target", "vendored"], indirect=True)
def test_what_a_library_remembers_compiles_nothing(library):
    torch.manual_seed(0)
    model = library.Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=OPTIONS)
    for at in range(4):
        library.table(20 + at), library.bounded(20 + at), library.rates(20 + at)
        model.config.epoch += 1
        compiled(torch.randn(3, 4))
    assert compiled.recompiles == []
    assert len(compiled.recaptures) <= 2  # once what is remembered is there


@pytest.mark.parametrize("library", ["target", "vendored"], indirect=True)
def test_what_a_library_reads_counts(library):
    step = treadle.compile(
        lambda x: x * library.table(4)[1], model=nn.Module(), optimizer=(), options=OPTIONS
    )
    x = torch.ones(2)
    library.table(4)
    assert step(x)[0] == 2.0
    library.FACTOR = 5.0
    assert step(x)[0] == 2.0  # as in eager: it is remembered
    library.table.cache_clear()
    assert step(x)[0] == (lambda x: x * library.table(4)[1])(x)[0] == 5.0
    library.FACTOR = 7.0
    library.table.cache_clear()
    library.table(4)
    assert step(x)[0] == 7.0


def test_whose_code_it_is_says_the_record_of_an_installer(tmp_path, monkeypatch):
    (tmp_path / "some-1.0.dist-info").mkdir()
    (tmp_path / "some-1.0.dist-info" / "RECORD").write_text("some/a.py,,\none.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    distributions._installed_in.cache_clear()
    for name, owner in {
        "some/b/c.py": frames.CodeOwner.INSTALLED,
        "one.py": frames.CodeOwner.INSTALLED,
        "two.py": frames.CodeOwner.USER,
        "other/a.py": frames.CodeOwner.USER,
    }.items():
        assert frames.code_owner(str(tmp_path / name)) is owner
