"""Public training scripts in small: equal to eager, and never compiled again without a cause."""

import pytest

from scripts import harness

KNOWN: dict[str, str] = {}
"""Scripts that fail today, and what for."""


def _case(each: harness.Script) -> object:
    marks = [pytest.mark.xfail(reason=KNOWN[each.name], strict=False)] if each.name in KNOWN else []
    return pytest.param(each, id=each.name, marks=marks)


@pytest.mark.parametrize("each", [_case(each) for each in harness.scripts()])
def test_a_script_is_as_in_eager_and_compiles_for_reasons(each):
    assert harness.outcome(each).wrong == []
