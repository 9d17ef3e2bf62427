import re

import pytest

from treadle.util.errors import PlanError
from treadle.util.sizes import Budget, at_least, parse_bytes


@pytest.mark.parametrize(
    ("memory", "nbytes", "between"),
    [("1 KiB", 1024, 1024), (7, 7, 7), (0.0, None, 100), (0.25, None, 150), (1.0, None, 300)],
)
def test_a_budget_is_bytes_or_a_share_of_the_way_between_plans(memory, nbytes, between):
    budget = Budget.of(memory)
    assert budget.nbytes == nbytes
    assert budget.between(100, 300) == between


@pytest.mark.parametrize("memory", [-0.1, 1.5, float("nan"), 0, -3, True, "12 bananas"])
def test_what_is_neither_is_refused(memory):
    with pytest.raises(PlanError) as caught:
        Budget.of(memory)
    assert caught.value.code == "TR-201"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("memory", "meant"),
    [
        ("0.5", 0.5), (".5", 0.5), ("60%", 0.6), ("5 %", 0.05), ("1.0", 1.0), (1, 1.0), (0, 0.0),
        ("12", 12), ("1e9", 10**9),
    ],
)  # fmt: skip
def test_the_remedy_says_what_was_meant(memory, meant):
    with pytest.raises(PlanError, match="TR-201") as caught:
        Budget.of(memory)
    (named,) = re.findall(r"memory=([\d.]+\d)", caught.value.remedy)
    assert named == repr(meant)
    assert Budget.of(meant).limit == meant


@pytest.mark.parametrize("count", [1, 1023, 1024, 9556, 3 * 2**20 + 1, 5 * 2**30 - 1])
def test_a_size_in_words_is_enough_and_little_more(count):
    assert count <= parse_bytes(at_least(count)) <= 1.01 * count
