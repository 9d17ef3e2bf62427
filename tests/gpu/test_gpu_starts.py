"""A second process starts without a trace on a GPU too."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys

from gpu.small_language import small_language

train, model, optimizer, tokens = small_language()
if sys.argv[1] == "eager":
    model(tokens)

import treadle

step = treadle.compile(train, model=model, optimizer=optimizer)
losses = [step(tokens).item() for _ in range(4)]
print(step.compiled.untraced, step.compiled.start.differs, losses)
"""

OF_SIZES = """
import sys

import torch

import treadle
from gpu.small_language import small_language

train, model, optimizer, tokens = small_language()
step = treadle.compile(train, model=model, optimizer=optimizer)
state = {name: value.clone() for name, value in model.state_dict().items()}
for length in map(int, sys.argv[1:]):
    model.load_state_dict(state)
    for slots in optimizer.state.values():
        for value in slots.values():
            value.zero_()
    batch = tokens[:, :length].contiguous()
    compiled = step(batch)
    after = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(state)
    print(length, step.compiled.untraced, f"{compiled.item():.4f}")
    for slots in optimizer.state.values():
        for value in slots.values():
            value.zero_()
    torch.testing.assert_close(compiled, train(batch), rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(after, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
"""


@pytest.fixture
def process(tmp_path):
    """Runs a script with arguments, each in a process of its own, and returns its lines."""
    environment = {**os.environ, "TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def run(script, *arguments):
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, str(tmp_path / "train.py"), *map(str, arguments)]
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout.splitlines()

    return run


@pytest.mark.parametrize("before", ["nothing", "eager"])
def test_a_second_process_traces_nothing_under_autocast(before, process):
    first, second = process(SCRIPT, before)[-1], process(SCRIPT, before)[-1]
    assert first.startswith("False")
    assert second == first.replace("False", "True", 1)


def test_a_second_process_has_any_size(process):
    first = process(OF_SIZES, 33, 17, 8)
    assert [line.split()[1] for line in first] == ["False"] * 3
    assert [line.split()[1] for line in process(OF_SIZES, 21, 33, 5, 8)] == ["True"] * 4
