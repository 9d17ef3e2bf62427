"""Ordinary steps of many sizes beside eager: numbers, and how often each is compiled."""

import pytest

from sized_programs import trained

QUICK = (
    *("average_pooling", "pairs_of_halves", "parts_of_rows", "pointers", "resized", "statistics"),
    "windows",
)
"""One of each kind. ``python tests/sized_programs.py`` has the others."""


@pytest.mark.parametrize("name", QUICK)
def test_few_compiles_serve_all_sizes(name):
    reasons = trained(name)
    assert len(reasons) <= 2, reasons
