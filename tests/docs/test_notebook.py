"""The tutorial is one program, on its page and as a notebook, which runs from its first cell on."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import notebook

RUNNER = """
import linecache

namespace = {"__name__": "__main__"}
for number, text in enumerate(%s, 1):
    name = f"<ipython-input-{number}>"  # code of a notebook has no file
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), namespace)
"""


def test_page_and_notebook_are_the_same():
    written = notebook.NOTEBOOK.read_text()
    assert written == notebook.render(), "run python tests/docs/notebook.py"


def test_the_notebook_runs(tmp_path, forks):
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "cells.py"
    program.write_text(RUNNER % repr(texts))
    environment = {"TREADLE_CACHE_DIR": str(tmp_path / "cache")}
    done = forks.run(program, folder=tmp_path, environment=environment, quick=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "predicted peak" in done.stdout
    assert (tmp_path / "report.html").exists()


def test_links_lead_somewhere():
    text = notebook.NOTEBOOK.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (notebook.NOTEBOOK.parent / target).exists(), target
