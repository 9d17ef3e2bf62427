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
SERVER = """
import os, runpy, sys, traceback
import scipy.sparse.csgraph, torch, torch._dynamo, treadle
import conftest, treadle.runtime.build
treadle.runtime.build.find_cxx = conftest.quick
for line in sys.stdin:
    path, folder = line.split()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            os.environ["TREADLE_CACHE_DIR"] = os.path.join(folder, "cache")
            out = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            runpy.run_path(path, run_name="__main__")
            sys.stdout.flush(), sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Runs each file that it is told of in a process of its own, which has only imported what all of
them import."""


@pytest.fixture(scope="module")
def server():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name
)
def test_each_block_runs_alone(page, tmp_path, server):
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block)
        print(program, tmp_path, file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        assert status == "0", f"{program.name}: {(tmp_path / 'output').read_text()}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
