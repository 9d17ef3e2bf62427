"""Makes ``testing`` importable however pytest was started, with readable failures; compiles less
hard where machine code is not the question; and begins with what takes longest."""

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import treadle.runtime.build as building
from treadle.runtime.compilers import Compiler, find_cxx

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from forks import Forks  # noqa: E402

pytest.register_assert_rewrite("testing")  # a failing check_pass shows a diff of the text

QUICK = frozenset(
    {
        "backend", "capture", "compiler", "contract", "docs", "examples", "models", "optimizers",
        "test_bad_input.py",
    }
)  # fmt: skip
"""Rooms whose tests are about steps. Those about generated code (``codegen``, ``lower``,
``schedule``, ``runtime``) have the flags that users have, and so have others beside this file."""


LONGEST = (
    "models/test_transformers.py",
    "contract/test_checkpointing.py",
    "contract/test_reads_kinds.py",
    "contract/test_reads_generator.py",
    "test_bad_input.py",
    "examples/test_loops.py",
    "contract/test_effects_generator.py",
    "docs/test_documentation.py",
    "contract/test_dynamic_shapes.py",
)
"""Files that take a minute or more, the longest first: one that begins last is waited for."""


def pytest_collection_modifyitems(items):
    places = {_HERE / Path(name): at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """What is there before a file's tests, mostly modules, stays: collections pass over it."""
    gc.collect()
    gc.freeze()


def quick(preferred: str = "") -> Compiler | None:
    """The compiler, asked for a quarter of the work on each file: ``-Og`` instead of ``-O3``."""
    found = find_cxx(preferred)
    if found is None:
        return None
    return replace(found, flags=tuple("-Og" if each == "-O3" else each for each in found.flags))


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs programs in processes of their own."""
    forks = Forks(tmp_path_factory.mktemp("processes"))
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def quick_compiles(request, monkeypatch):
    room = request.path.relative_to(_HERE).parts[0]
    if room in QUICK and request.node.get_closest_marker("users_flags") is None:
        monkeypatch.setattr(building, "find_cxx", quick)
