"""The examples of ``docs/reference/errors.md`` are run: each raises its code, and with the remedy
of its entry it works."""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from docs import errors_of_capture, errors_of_use
from docs.error_example import SHOWN
from treadle.passes import registered

PROGRAMS = errors_of_use, errors_of_capture
"""Importing them registers what they show."""

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "errors.md").read_text()
NAMES = [shown.name for shown in SHOWN]


def entry(code):
    """The text of a code, its example and its remedy."""
    found = re.search(rf"^- \*\*{code}\*\*: (.*?)(?=^- \*\*|^#|\n\n|\Z)", PAGE, re.M | re.S)
    text = " ".join(found[1].split())
    example, _, remedy = text.partition("Example: ")[2].partition("Remedy: ")
    return example, remedy


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """What a program compiled after its remedy is not found before it, and what it registered is
    not there for other tests."""
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registered, "_passes", list(registered._passes))
    monkeypatch.setattr(registered, "_meanings", dict(registered._meanings))


@pytest.mark.parametrize("shown", SHOWN, ids=NAMES)
def test_an_example_raises_its_code(shown, tmp_path):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception, match="TR-") as caught:
        shown.program(False, tmp_path)
    text = str(caught.value)
    assert re.search(r"TR-\d{3}", text)[0] == shown.code, text
    assert "remedy: " in text


@pytest.mark.parametrize("shown", SHOWN, ids=NAMES)
def test_the_remedy_works(shown, tmp_path):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        shown.program(True, tmp_path)


@pytest.mark.parametrize("shown", SHOWN, ids=NAMES)
def test_the_page_says_what_is_run(shown):
    example, remedy = entry(shown.code)
    assert shown.example in example
    assert shown.remedy in remedy


NOT_RUN = {
    "a bug in treadle": ("TR-330", "TR-331", "TR-391", "TR-392"),
    "a CUDA build of PyTorch without Triton": ("TR-431",),
    "memory that changes where PyTorch does not see it": ("TR-539",),
    "not an error: step.recompiles and explain have it": (
        "TR-305", "TR-306", "TR-315", "TR-316", "TR-317",
    ),
}  # fmt: skip
"""Codes that no test raises, and why."""


def test_every_code_is_run():
    """Here, or by a test that names it; what neither is, is known."""
    tests = Path(__file__).parent.parent
    texts = [path.read_text() for path in tests.rglob("*.py") if path.parent.name != "docs"]
    named = set(re.findall(r"TR-\d{3}", "".join(texts)))
    run = {shown.code for shown in SHOWN}
    left = set(re.findall(r"TR-\d{3}", PAGE)) - named - run
    assert left == {code for codes in NOT_RUN.values() for code in codes}
