"""What a package says of itself: its page, its versions, its extras."""

import importlib.util
import re
import tomllib
from pathlib import Path

import treadle

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def page():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.for_package_page((ROOT / "README.md").read_text())


def test_the_page_of_a_package_has_no_dead_links():
    text = page()
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "![" not in text
    assert "docs/pictures" not in text
    assert "budgets, plans, dynamic shapes" in text
    assert "```python\nimport torch\n" in text


def test_there_is_one_version():
    assert PROJECT["version"] == treadle.__version__
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert cited == treadle.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == treadle.__version__


def test_the_examples_import_what_their_extra_installs():
    extra = {re.split(r"[<>=]", each)[0] for each in PROJECT["optional-dependencies"]["examples"]}
    imported = set()
    for path in (ROOT / "examples").glob("*.py"):
        found = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
        imported |= {name for name in found if name in ("accelerate", "lightning", "transformers")}
    assert imported == extra
    assert "treadle[examples]" in PROJECT["optional-dependencies"]["dev"]
