"""The notebook of the tutorial, ``examples/first_step.ipynb``, from its page.

``python tests/docs/notebook.py`` writes it again. What the page shows as output is left out: a
notebook has its own.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tutorial" / "first-step.md"
NOTEBOOK = ROOT / "examples" / "first_step.ipynb"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def render():
    """The notebook's text."""
    cells, at = [], 0
    page = PAGE.read_text()
    for block in _BLOCK.finditer(page):
        cells.append(_prose(page[at : block.start()]))
        cells.append(_code(block[2]) if block[1] == "python" else None)
        at = block.end()
    cells.append(_prose(page[at:]))
    kept = [cell for cell in cells if cell is not None]
    for number, cell in enumerate(kept):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": kept,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _prose(text):
    """A cell of text, if there is any; links lead from ``examples/`` to the documentation."""
    text = re.sub(r"\]\(\.\./", "](../docs/", text).strip()
    if not text:
        return None
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text):
    source = text.rstrip("\n").splitlines(keepends=True)
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source,
    }


if __name__ == "__main__":
    NOTEBOOK.write_text(render())
    sys.stdout.write(f"{NOTEBOOK}\n")
