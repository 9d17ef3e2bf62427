"""What is loaded, and when: a process that trains waits for no more than it needs."""

import json
import subprocess
import sys

import pytest

HEAVY = (
    "jinja2", "scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
PROGRAM = """
import json, os, sys
import torch  # seconds, and so once: each text goes on in a process of its own
print(json.dumps(["import torch", list(sys.modules)]), flush=True)
for code in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        exec(code, {})
        print(json.dumps([code, list(sys.modules)]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""
MODULE, NAME = "import treadle", "import treadle; treadle.compile"
ALL_NAMES = "from treadle import *"
MAY_START = "import treadle; treadle.compile, treadle.load, treadle.Options"
IN_DIR = "import treadle; assert set(treadle.__all__) <= set(dir(treadle)) & set(vars(treadle))"
NO_NAME = "import treadle; hasattr(treadle, '__wrapped__')"
OF_A_MODULE = "import treadle; assert not hasattr(treadle, 'nothing'); treadle.options.Options"
CODES = MODULE, NAME, ALL_NAMES, MAY_START, IN_DIR, NO_NAME, OF_A_MODULE


def printed_by(*command: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", *command], capture_output=True, text=True, check=True
    )
    return run.stdout


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, set[str]]:
    """What is loaded after ``import torch`` and each of ``CODES``."""
    lines = printed_by(PROGRAM, json.dumps(CODES)).splitlines()
    return {code: set(loaded) for code, loaded in map(json.loads, lines)}


@pytest.mark.parametrize("code", [MODULE, NAME, ALL_NAMES], ids=["module", "name", "all"])
def test_what_only_a_compile_needs_is_not_imported(loaded_by, code):
    more = loaded_by[code] - loaded_by["import torch"]
    assert "treadle" in more
    assert not {each for each in HEAVY if each in more}


def test_a_step_that_may_start_from_the_cache_brings_no_compiler(loaded_by):
    loaded = loaded_by[MAY_START]
    rooms = {tuple(name.split(".")[:2]) for name in loaded if name.startswith("treadle.")}
    assert not rooms & {("treadle", room) for room in ("loop", "lower", "schedule", "codegen")}
    assert not {"treadle.compiler.pipeline", "treadle.capture.step", "rich"} & loaded


def test_words_of_the_command_line_need_no_torch():
    code = (
        "import sys\nfrom treadle.tools.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print(*sys.modules)"
    )
    for words in (["--help"], ["--version"], ["plan", "--help"], ["nothing"]):
        loaded = set(printed_by(code, *words).splitlines()[-1].split())
        assert not loaded & {"torch", "numpy", "rich", "treadle.api"}


def test_names_are_there_when_they_are_asked_for(loaded_by):
    assert "treadle.api" in loaded_by[IN_DIR]
    assert "treadle.api" not in loaded_by[NO_NAME]
    assert "treadle.options" in loaded_by[OF_A_MODULE]


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
    assert printed_by(code).split() == ["True"]
