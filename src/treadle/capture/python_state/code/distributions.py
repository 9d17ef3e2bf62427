"""The files that an installer has installed.

Beside what it installs, an installer leaves a folder ``name-version.dist-info`` whose ``RECORD``
lists the files, also where the folder is none of Python's own (``pip install --target``). An
editable install stays in its own folder, because it is code under development.
"""

import functools
import sys
from pathlib import Path


def is_installed(filename: str) -> bool:
    """Whether an installer's record lists the file, by its folder or module below ``sys.path``."""
    for folder in sys.path:
        start = folder.rstrip("/") + "/"
        if len(start) > 1 and filename.startswith(start):
            top = filename[len(start) :].partition("/")[0]
            if top in _installed_in(folder):
                return True
    return False


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """The top-level folders and modules that are in a record."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf-8").splitlines()
        names |= {line.partition("/")[0].partition(",")[0] for line in lines}
    return frozenset(names)
