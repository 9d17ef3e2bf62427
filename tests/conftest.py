"""Makes ``testing`` importable however pytest was started, with readable failures; compiles less
hard where machine code is not the question; and begins with what takes longest."""

import gc
import os
import sys
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from forks import Forks  # noqa: E402

os.environ.setdefault("TREADLE_NO_MEASURE", "1")
"""Plans are the same on every machine that runs the tests. Tests of measuring ask for it."""

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
"""Inductor compiles in the process of the test, and starts none that import PyTorch again."""

if os.environ.get("TREADLE_TARGET") == "python":
    from targets.python_target import add

    add()

pytest.register_assert_rewrite("testing")  # a failing check_pass shows a diff of the text

QUICK = frozenset(
    {
        "backend", "capture", "compiler", "contract", "docs", "examples", "models", "optimizers",
        "report", "scripts", "lower/test_write_back.py", "passes/test_attention_masks.py",
        "passes/test_channels_last.py", "passes/test_chunked_loss.py",
        "passes/test_ordinary_programs.py", "passes/test_registered.py", "runtime/test_garbage.py",
        "test_api.py", "test_bad_input.py", "test_cli.py", "test_find_nan.py", "test_planning.py",
        "test_reduce_command.py", "test_saved.py", "test_step_object.py", "test_verify_regions.py",
    }
)  # fmt: skip
"""Rooms and files whose tests are about steps. Those about generated code (``codegen``, ``lower``,
``schedule``, ``runtime``) have the flags that users have, and so have others beside this file."""


LONGEST = (
    "contract/test_starts.py",
    "contract/test_numbers_generator.py",
    "docs/test_documentation.py",
    "docs/test_notebook.py",
    "distributed/test_sharded.py",
    "distributed/test_data_parallel.py",
    "scripts/test_scripts.py",
    "contract/test_start_generator.py",
    "test_imports.py",
    "models/test_transformers.py",
    "distributed/test_faults.py",
    "contract/test_sizes_seen.py",
    "contract/test_dynamic_shapes.py",
    "distributed/test_row_shards.py",
    "contract/test_carry.py",
    "passes/test_registered.py",
    "schedule/test_joined.py",
    "test_planning.py",
    "schedule/test_schedule_fuzz.py",
    "contract/test_mistakes.py",
    "contract/test_checks.py",
    "contract/test_checkpointing.py",
    "contract/test_reads_generator.py",
    "passes/test_attention_masks.py",
    "passes/test_narrow_weights.py",
    "contract/test_outside.py",
    "distributed/test_group_costs.py",
    "optimizers/test_optimizers.py",
)
"""Files that take twenty seconds or more, the longest first: one that begins last is waited for."""


def pytest_collection_modifyitems(items):
    places = {_HERE / Path(name): at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


gc.set_threshold(600_000, 10, 10)
"""Python begins collections by itself less often than for a user (700), since a compile leaves
hundreds of thousands of objects. Tests about collections ask for them."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """As by itself, with room for the frames of what a test calls: eager steps, oracles, PyTorch's
    own tracer."""
    from treadle.util.frames.data_stack import call_with_room

    names = pyfuncitem._fixtureinfo.argnames
    call_with_room(pyfuncitem.obj, (), {name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """What is there before a file's tests, mostly modules, stays: collections pass over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs programs in processes of their own."""
    forks = Forks(tmp_path_factory.mktemp("processes"))
    yield forks
    forks.close()


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory):
    import compiles  # the process that hands out tests needs none

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    folder = folder / "compiled"
    folder.mkdir(exist_ok=True)
    os.environ[compiles.FOLDER] = str(folder)
    compiles.share()


@pytest.fixture(autouse=True)
def quick_compiles(request, monkeypatch):
    file = request.path.relative_to(_HERE)
    if (
        QUICK.isdisjoint((file.parts[0], file.as_posix()))
        or request.node.get_closest_marker("users_flags") is not None
    ):
        return
    import compiles

    compiles.quickly(monkeypatch.setattr)
