"""Programs in processes of their own, without the seconds that it takes to import PyTorch.

One process imports what all of them import, runs nothing of it, and is forked for each program.
"""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src"
SERVER = """
import gc, json, os, runpy, sys, traceback, warnings
import scipy.sparse.csgraph, torch, torch._dynamo, torch.utils.data, treadle
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import compiles, conftest, treadle.capture.step, treadle.compiler.pipeline, treadle.exports
import treadle.report.watch
from treadle.compat.tracing import load_tracer
from treadle.runtime.kernels.compilers import find_cxx
from treadle.util.frames.data_stack import call_with_room
from treadle.util.package import own_digest

load_tracer()
compiles.share()
own_digest()  # of the files of the package, which every compile asks for
find_cxx("")  # as it is asked in programs: what is known of ``find_cxx()`` would not be found
gc.collect()
gc.freeze()

def begin(job):
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, name in enumerate(("input", "output", "errors")):
        file = os.open(os.path.join(job["place"], name), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    if job["quick"]:
        compiles.quickly()
    if job["quiet"]:
        warnings.simplefilter("ignore")
    sys.argv = [job["program"], *job["arguments"]]
    sys.stdin = os.fdopen(0)
    call_with_room(runpy.run_path, (job["program"],), {"run_name": "__main__"})

def status(action, *given):
    try:
        action(*given)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        code = status(begin, job)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
os._exit(0)  # libraries that are taken down say on stderr what they leave
"""


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """``start`` a program, ``finish`` it; or both in ``run``. ``always``: the environment of all
    programs, beside that of the tests, and of the imports before them."""

    def __init__(self, folder: Path, always: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._always = always or {}
        self._count = 0
        self._server: subprocess.Popen[str] | None = None

    def start(
        self,
        program: str | Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        quick: bool = False,
        quiet: bool = False,
    ) -> tuple[int, Path]:
        """The process' number, and where its output goes. ``program``: a file or its text.
        ``environment``: beside that of the tests now. ``quick``: compiles less hard, and ``quiet``:
        without warnings."""
        self._count += 1
        place = self._folder / f"process{self._count}"
        place.mkdir()
        if isinstance(program, str):
            (place / "program.py").write_text(textwrap.dedent(program))
            program = place / "program.py"
        job = {
            "program": str(program), "arguments": arguments, "quick": quick, "quiet": quiet,
            "environment": {**os.environ, **self._always, **(environment or {})},
            "folder": str(folder or Path.cwd()), "place": str(place),
        }  # fmt: skip
        return int(self._ask(job)), place

    def finish(self, process: tuple[int, Path], seconds: float = 200) -> Done:
        """Wait for it, and end it if that takes longer."""
        number, place = process
        code = int(self._ask({"wait": number}, seconds, number))
        return Done(code, (place / "output").read_text(), (place / "errors").read_text())

    def run(self, program: str | Path, *arguments: str, seconds: float = 200, **given) -> Done:
        """``finish(start(...))``."""
        return self.finish(self.start(program, *arguments, **given), seconds)

    def close(self) -> None:
        """No more processes."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(60)

    def _ask(self, question: dict[str, object], seconds: float = 200, child: int = 0) -> str:
        if self._server is None:
            self._server = _serving([SRC, TESTS], self._always)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        if child and not select.select([self._server.stdout], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        return self._server.stdout.readline()


def _serving(paths: Sequence[Path], always: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | always | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
