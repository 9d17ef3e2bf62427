"""A slice of PyTorch's operator database: the same one until its operators change.

All of it is a command: ``python tests/opdb/run.py --shard 1/8``, and so on to 8.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
sys.path.insert(0, str(Path(__file__).parent))

from opdb_cases import every_case, shard
from opdb_check import Outcome
from run import run


@pytest.mark.parametrize(("number", "of", "kernels"), [(7, 160, "library"), (2, 300, "generated")])
def test_a_slice(number, of, kernels, monkeypatch):
    monkeypatch.setenv("TREADLE_NO_CODEGEN", "0")
    cases = shard(every_case(), number, of)
    assert len(cases) > 4
    bad = [
        each for each in run(cases, kernels, 1) if each.outcome in (Outcome.WRONG, Outcome.ERROR)
    ]
    assert not bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_wrong_numbers_are_seen(dtype, monkeypatch):
    """The comparison itself: a backend that adds a little is caught."""
    import opdb_check

    case = next(c for c in every_case() if c.op.name == "mul" and c.dtype is dtype and not c.grad)
    monkeypatch.setattr(opdb_check, "treadle", lambda module, inputs: _off(module))
    assert opdb_check.checked(case, 1).outcome is Outcome.WRONG


def _off(module):
    return lambda *args: tuple(each * 1.001 for each in module(*args))
