"""The table of ``benchmarks/budgets.py``: half of its models by a few budgets, some of them run."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import budgets  # noqa: E402

PLANNED = ("mlp", "resnet", "bert", "unet", "mamba", "accumulated")
RUN = ("vae", "whitening", "bags")


@pytest.mark.parametrize("name", PLANNED)
def test_budgets_are_used_and_larger_ones_are_never_slower(name):
    rows = budgets.table(name, 6, plans_only=True)
    assert {wrong for row in rows for wrong in row.wrong} <= {budgets.COARSE}
    used = [row.promised / row.budget for row in rows if row.promised]
    assert min(used) > 0.8


@pytest.mark.parametrize("name", RUN)
def test_what_is_measured_is_what_was_promised(name):
    rows = budgets.table(name, 2, plans_only=False)
    assert {wrong for row in rows for wrong in row.wrong} <= {budgets.COARSE}
    assert sum(row.measured is not None for row in rows) >= 2
