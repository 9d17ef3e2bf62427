"""The table of options has every option and every variable that the code reads."""

import re
import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import options_page

from treadle.options import PREFIX, VARIABLES, Options

SRC = Path(__file__).parent.parent.parent / "src"


def test_the_page_is_what_the_code_says():
    assert options_page.PAGE.read_text() == options_page.render(), (
        "run python tests/docs/options_page.py"
    )


def test_every_option_is_described():
    assert list(options_page.meanings()) == [field.name for field in fields(Options)]


def test_every_variable_that_is_read_is_there():
    text = "".join(path.read_text() for path in SRC.rglob("*.py"))
    read = {
        *re.findall(rf"{PREFIX}([A-Z]+(?:_[A-Z]+)*)", text),
        *re.findall(r'PREFIX \+ "([A-Z_]+)"', text),
    }
    assert read <= VARIABLES.keys() | options_page.OTHER_VARIABLES.keys()
    assert options_page.OTHER_VARIABLES.keys() <= read


def test_every_variable_sets_its_option(monkeypatch):
    from treadle.options import from_environment

    values = {
        "SKIP": "RemoveNoOps",
        "DEBUG": "2",
        "BUCKETS": "1MiB",
        "TARGET": "python",
        "LOGS": "all",
        "PLANNER": "greedy",
    }
    for name, each in VARIABLES.items():
        monkeypatch.setenv(PREFIX + name, values.get(name, "1"))
        assert getattr(from_environment(), each.option) != getattr(Options(), each.option), name
        monkeypatch.delenv(PREFIX + name)
