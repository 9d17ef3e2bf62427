"""Whole training steps through Triton, interpreted, agree with eager."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("loops", ["chosen", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_equal_eager(dtype, loops, tmp_path):
    script = Path(__file__).parent / "triton_whole_step.py"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(script), str(tmp_path), dtype, loops]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
