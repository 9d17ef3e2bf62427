"""Compiles the device code of launches before the first of them, in parallel processes.

Triton compiles where it launches: one function at a time, under the interpreter lock. A worker
(``triton_worker.py``) makes the call of a launch with substitutes for its tensors, which puts the
code into Triton's cache on disk, under the key that the launch uses, and returns what it compiled.
The launch compiles whatever is missing: another class of arguments (an unaligned address), or a
function on which a worker failed. Workers start while the functions are still being generated.
"""

import base64
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, final

from treadle.runtime.kernels.device_code import DeviceCode
from treadle.runtime.kernels.driver_launch import METADATA

_WORKER = str(Path(__file__).with_name("triton_worker.py"))
_FUNCTIONS_PER_WORKER = 4
"""A worker starts in the time that two functions take: with four, most of its time is compiling."""
_OPERATIONS_PER_WORKER = 400
"""Operations of a graph that become about four functions: the 5,000 of GPT-2 with 12 layers become
59 (``benchmarks/device_code.py``)."""
_waiting: ContextVar[tuple["subprocess.Popen[str]", ...]] = ContextVar("waiting", default=())
"""Workers that were started for the compile that runs, and have no job yet."""
Target = tuple[str, int, int]
"""A target: Triton's backend, the architecture, and the threads of a warp."""


@final
@dataclass(frozen=True, slots=True)
class CompileJob:
    """One device function for one class of arguments: ``stage`` of ``function`` of the module at
    ``path``. ``arguments``: of a tensor the name of its dtype, otherwise the number."""

    module: str
    path: str
    function: str
    stage: int
    arguments: tuple[str | int, ...]
    options: Mapping[str, int | bool]

    @property
    def line(self) -> str:
        """The job as a line that the worker reads."""
        return json.dumps(asdict(self))


@contextmanager
def workers_ahead(operations: int) -> Iterator[None]:
    """While the block runs, workers for the functions of a graph of so many ``operations`` run or
    are starting."""
    count = _count(operations // _OPERATIONS_PER_WORKER)
    with _workers(count) as workers:
        before = _waiting.set(tuple(workers))
        try:
            yield
        finally:
            _waiting.reset(before)


def compile_ahead(
    jobs: Sequence[CompileJob], target: Target
) -> list[tuple[CompileJob, DeviceCode | None]]:
    """The compiled ``jobs``, with their code, or ``None`` if Triton has to launch it. Jobs that
    take long come first in the list. If one worker would do for all, they are left to their
    launches, which take no longer."""
    count = _count(len(jobs) // _FUNCTIONS_PER_WORKER)
    if not count:
        return []
    waiting = list(reversed(jobs))
    compiled: list[tuple[CompileJob, DeviceCode | None]] = []
    with ExitStack() as stack:
        workers = list(_waiting.get()[:count])
        workers += stack.enter_context(_workers(count - len(workers)))
        _waiting.set(())
        selector = stack.enter_context(selectors.DefaultSelector())
        asked: dict[int, CompileJob] = {}  # by the number of the process

        def ask(worker: subprocess.Popen[str]) -> bool:
            asked[worker.pid] = waiting.pop()
            return _send(worker, asked[worker.pid].line)

        for worker in workers:
            if _send(worker, json.dumps([target, METADATA])) and ask(worker):
                selector.register(_output(worker), selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker: subprocess.Popen[str] = key.data
                reply = _output(worker).readline()
                compiled += _compiled(asked[worker.pid], reply)
                if not (reply and waiting and ask(worker)):
                    selector.unregister(key.fileobj)
    return compiled


def _compiled(job: CompileJob, reply: str) -> list[tuple[CompileJob, DeviceCode | None]]:
    """The worker's result for a ``job``: nothing if it failed or ended."""
    made: dict[str, Any] = json.loads(reply) if reply else {}
    if not made:
        return []
    binary = base64.b64decode(made["binary"])
    return [(job, DeviceCode.of(made["name"], made["signature"], made["metadata"], binary))]


def _count(worth: int) -> int:
    """How many workers to start if so many are worthwhile: none instead of one, and none if the
    program is not a Python interpreter."""
    is_python = sys.executable and not getattr(sys, "frozen", False)
    count = min(worth, len(os.sched_getaffinity(0)))
    return count if is_python and count > 1 else 0


@contextmanager
def _workers(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Worker processes, which end with the block and with this process."""
    paths = os.pathsep.join(path for path in sys.path if path)
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-P", _WORKER],  # this folder is no place for its imports
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        yield started
    finally:
        for worker in started:
            worker.kill()
        for worker in started:
            worker.communicate()


def _send(worker: subprocess.Popen[str], line: str) -> bool:
    """Send a line; whether the worker is alive to read it."""
    assert worker.stdin is not None
    try:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _output(worker: subprocess.Popen[str]) -> IO[str]:
    assert worker.stdout is not None
    return worker.stdout
