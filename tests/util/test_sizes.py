import pytest

from treadle.util.errors import PlanError
from treadle.util.sizes import Budget


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
