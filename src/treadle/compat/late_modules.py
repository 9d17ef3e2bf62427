"""Modules that a trace loads, and a process without one does not."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

LATE_MODULES: set[str] = set()
"""Their names. What they register anywhere, such as classes with those of ``collections.abc``, is
nothing that a step finds in every process."""


@contextmanager
def loading_late() -> Iterator[None]:
    """Inside, the machinery of traces is loaded."""
    before = set(sys.modules)
    try:
        yield
    finally:
        LATE_MODULES.update(sys.modules.keys() - before)
