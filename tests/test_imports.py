"""What is loaded, and when: a process that trains waits for no more than it needs."""

import subprocess
import sys

import pytest

HEAVY = (
    "jinja2", "scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
LOADED = "import sys; print(*(name for name in sys.modules))"


def loaded_by(code: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\n{LOADED}", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    ["import treadle", "import treadle; treadle.compile", "from treadle import *"],
    ids=["module", "name", "all"],
)
def test_what_only_a_compile_needs_is_not_imported(code):
    more = loaded_by(f"import torch; {code}") - loaded_by("import torch")
    assert "treadle" in more
    assert not {each for each in HEAVY if each in more}


def test_a_step_that_may_start_from_the_cache_brings_no_compiler():
    loaded = loaded_by("import treadle; treadle.compile, treadle.load, treadle.Options")
    rooms = {tuple(name.split(".")[:2]) for name in loaded if name.startswith("treadle.")}
    assert not rooms & {("treadle", room) for room in ("loop", "lower", "schedule", "codegen")}
    assert not {"treadle.compiler.pipeline", "treadle.capture.step", "rich"} & loaded


def test_words_of_the_command_line_need_no_torch():
    code = "from treadle.tools.cli import main\ntry: main()\nexcept SystemExit: pass"
    for words in (["--help"], ["--version"], ["plan", "--help"], ["nothing"]):
        assert not loaded_by(code, *words) & {"torch", "numpy", "rich", "treadle.api"}


def test_names_are_there_when_they_are_asked_for():
    code = "import treadle; assert set(treadle.__all__) <= set(dir(treadle)) & set(vars(treadle))"
    assert "treadle.api" in loaded_by(code)
    assert "treadle.api" not in loaded_by("import treadle; hasattr(treadle, '__wrapped__')")
    loaded_by("import treadle; assert not hasattr(treadle, 'nothing'); treadle.options.Options")


def test_what_a_first_call_imports_draws_no_random_numbers_of_the_users(tmp_path):
    code = f"""
import random
import numpy as np
import torch
import treadle

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def states():
    return random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()

before = states()
options = treadle.Options(cache_dir={str(tmp_path)!r})
step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
step(torch.ones(2, 3))
step.explain(), step.stages(), step.summary(), step.graph()
print(repr(before) == repr(states()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]
