"""Each block of code in README and docs runs alone, but for those of the tutorial, which is one
program (``test_notebook.py``)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALONE = [page for page in PAGES if page.parent.name != "tutorial"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [p for p in ALONE if BLOCK.search(p.read_text())], ids=lambda p: p.name
)
def test_each_block_runs_alone(page, tmp_path, forks):
    cache = str(tmp_path / "cache")
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block)
        done = forks.run(
            program, folder=tmp_path, environment={"TREADLE_CACHE_DIR": cache}, quick=True
        )
        assert done.returncode == 0, f"{program.name}: {done.stdout}{done.stderr}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tests_that_promises_name_are_there():
    text = (ROOT / "docs" / "reference" / "contract.md").read_text()
    folders = [ROOT / "tests", ROOT / "tests" / "contract", ROOT / "tests" / "optimizers"]
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert any((folder / name).exists() for folder in folders), name
