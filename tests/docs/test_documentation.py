"""Each block of code in README and docs runs alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A process of its own per block, which has only imported what all of them import.
EACH = """
import os, runpy, sys, traceback
import torch, treadle
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{path} failed")
"""


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name
)
def test_each_block_runs_alone(page, tmp_path):
    programs = []
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        programs.append(tmp_path / f"block_{number}.py")
        programs[-1].write_text(block)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "TREADLE_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", EACH, *map(str, programs)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
