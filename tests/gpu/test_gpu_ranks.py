"""Steps of several ranks on a real GPU, each rank in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ranks_on_one_gpu.py"


@pytest.mark.parametrize(("backend", "ranks", "cases"), [("nccl", 1, 8), ("gloo", 2, 8)])
def test_steps_are_eagers(backend, ranks, cases):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), backend],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count(": equal") == cases
