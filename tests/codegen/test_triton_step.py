"""Whole training steps through Triton, interpreted, agree with eager."""

from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("loops", ["chosen", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_equal_eager(dtype, loops, tmp_path, interpreted):
    script = Path(__file__).parent / "triton_whole_step.py"
    done = interpreted.run(script, str(tmp_path), dtype, loops)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_loop_and_its_gradient_equal_eager(tmp_path, interpreted):
    done = interpreted.run(Path(__file__).parent / "triton_loop.py", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_compile_for_many_sizes_equals_eager(dtype, tmp_path, interpreted):
    script = Path(__file__).parent / "triton_any_size.py"
    done = interpreted.run(script, str(tmp_path), dtype)
    assert done.returncode == 0, done.stderr[-4000:]
