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


@pytest.mark.parametrize("before", ["nothing", "eager"])
def test_a_second_process_traces_nothing_under_autocast(before, tmp_path):
    environment = {**os.environ, "TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def process():
        command = [sys.executable, str(tmp_path / "train.py"), before]
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        return run.stdout.splitlines()[-1]

    first, second = process(), process()
    assert first.startswith("False")
    assert second == first.replace("False", "True", 1)
