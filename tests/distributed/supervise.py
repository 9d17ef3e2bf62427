"""The program that ``launch`` runs: forks one process per rank, and ends what the others leave.

It is itself forked from a process that has imported PyTorch and treadle, has no threads and no
process group, so that a rank costs milliseconds and not seconds.
"""

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_PARENT_DIES = 1  # PR_SET_PDEATHSIG of prctl(2)


def supervise(place: Path) -> None:
    """Run the job in ``place``; ``codes.json`` is written last. A rank that has not ended when the
    time is out, or ``patience`` seconds after another one failed, is killed with its children."""
    job = json.loads((place / "job.json").read_text())
    function = _function(Path(job["file"]), job["function"])  # what it imports is imported once
    for name in job["imports"]:
        importlib.import_module(name)
    began = time.monotonic()
    ranks = {_fork(job, function, rank, place): rank for rank in range(job["world"])}
    codes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    end = began + job["timeout"]
    while len(codes) < len(ranks):
        number, status = os.waitpid(-1, os.WNOHANG)
        if number == 0:
            if time.monotonic() > end:
                break
            time.sleep(0.005)
            continue
        rank = ranks[number]
        codes[rank] = os.waitstatus_to_exitcode(status)
        seconds[rank] = time.monotonic() - began
        if codes[rank] != 0:
            end = min(end, time.monotonic() + job["patience"])
    for number in ranks:
        _kill_group(number)
    late = [rank for rank in ranks.values() if rank not in codes]
    for _ in late:
        os.waitpid(-1, 0)
    found = {"codes": codes, "seconds": seconds, "late": late}
    (place / "codes.json").write_text(json.dumps(found))


def _kill_group(number: int) -> None:
    """The group of a rank: itself, if it still runs, and what it started."""
    try:
        os.killpg(number, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


def _fork(job: dict, function: Callable[..., object], rank: int, place: Path) -> int:
    number = os.fork()
    if number:
        return number
    ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
    os.setpgid(0, 0)
    code = 1
    try:
        output = os.open(place / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = _rank(job, function, rank, place)
    except BaseException as error:
        # As the interpreter does for an error that nobody handles, before its ``atexit``.
        sys.last_exc = sys.last_value = error
        traceback.print_exc()
    finally:
        _end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _end() -> None:
    """What the interpreter does at its end."""
    import atexit

    atexit._run_exitfuncs()


def _rank(job: dict, function: Callable[..., object], rank: int, place: Path) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["world"]), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo",
        store=_store(job, rank, place),
        rank=rank,
        world_size=job["world"],
        timeout=timedelta(seconds=job["group_timeout"]),
    )
    args = torch.load(place / "args", weights_only=False)
    value = function(*args)
    torch.save(value, place / f"value{rank}")
    if job["closes"]:
        dist.destroy_process_group()
    return 0


def _store(job: dict, rank: int, place: Path) -> dist.Store:
    limit = timedelta(seconds=job["group_timeout"])
    if job["store"] == "file":
        store: dist.Store = dist.FileStore(str(place / "store"), job["world"])
        store.set_timeout(limit)
        return store
    told = place / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        (place / "port.new").write_text(str(store.port))
        (place / "port.new").rename(told)
        return store
    while not told.exists():
        time.sleep(0.002)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), wait_for_workers=False, timeout=limit)


def _function(file: Path, name: str):
    """``name`` of ``file``, which is imported as the module that a reader would expect."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    supervise(Path(sys.argv[1]))
