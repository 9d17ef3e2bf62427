"""Runs a function on several ranks, each in a process of its own.

::

    def average(x):
        torch.distributed.all_reduce(x, "avg")
        return x

    def test_average(launch):
        for rank in launch(2, average, torch.ones(3)):
            assert ...(rank.value)
"""

import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forks import Forks
from treadle.compat.distributed.process_groups import store_of

PROGRAM = Path(__file__).parent / "supervise.py"
PATIENCE = 1.0
_MISSED = "Gloo connectFullMesh failed"
"""What Gloo says where ranks do not find each other, as when a port was given to somebody else
meanwhile (seen once in some thousand launches). Nothing of a test has run then."""


@dataclass(frozen=True)
class RankResult:
    """What became of a rank. ``code``: its exit code, negative for the signal that killed it, or
    ``None`` for one that had to be killed at the end. ``value``: what the function returned."""

    rank: int
    code: int | None
    output: str
    value: Any
    seconds: float


class Launcher:
    """``launcher(world, function, *args)`` runs ``function(*args)`` on each rank of a group.

    ``cache``: where what one launch compiles is found by the next; in ``folder`` by default."""

    def __init__(self, forks: Forks, folder: Path, cache: Path | None = None) -> None:
        self._forks = forks
        self._cache = {"TREADLE_CACHE_DIR": str(cache or folder / "cache")}
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        world: int,
        function: Callable[..., object],
        *args: object,
        timeout: float = 60,
        patience: float = PATIENCE,
        check: bool = True,
        store: str = "file",
        group_timeout: float = 30,
        closes: bool = True,
        seed: int = 0,
        environment: dict[str, str] | None = None,
        imports: tuple[str, ...] = (),
    ) -> list[RankResult]:
        """``function`` is one that a module has at its top; results and ``args`` are what
        ``torch.save`` takes. Ranks that still run ``timeout`` seconds after the start, or
        ``patience`` after one failed, are killed. ``check``: any failure is one of the test, with
        the output of all. ``store``: ``"file"``, or ``"tcp"`` held by rank 0. ``closes``: whether
        ranks destroy their process group at the end. ``imports``: modules that all ranks will need,
        and that one process imports before it is forked for each of them."""
        file = Path(inspect.getsourcefile(function) or "")
        job = {
            "world": world, "file": str(file), "function": function.__name__, "seed": seed,
            "timeout": timeout, "patience": patience, "store": store, "closes": closes,
            "group_timeout": group_timeout, "imports": imports,
        }  # fmt: skip
        found = self._launch(job, args, environment or {})
        if check and any(_MISSED in each.output for each in found):
            found = self._launch(job, args, environment or {})
        if check:
            assert all(each.code == 0 for each in found), told(found)
        return found

    def _launch(
        self, job: dict[str, Any], args: tuple[object, ...], environment: dict[str, str]
    ) -> list[RankResult]:
        self._count += 1
        place = self._folder / f"launch{self._count}"
        place.mkdir()
        torch.save(args, place / "args")
        (place / "job.json").write_text(json.dumps(job))
        started = self._forks.start(
            PROGRAM,
            str(place),
            folder=place,
            quick=True,
            environment=self._cache | environment,
        )
        done = self._forks.finish(started, job["timeout"] + 20)
        assert done.returncode == 0, done.stderr
        return _results(place, job["world"])


def say_over() -> None:
    """In a rank: what the test is about has happened here."""
    store_of(dist.group.WORLD).set(f"test/over/{dist.get_rank()}", "")


def stay_until_over(*ranks: int, seconds: float) -> None:
    """In a rank: be there until all of ``ranks`` say so, and for so long at most."""
    store = store_of(dist.group.WORLD)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not store.check([f"test/over/{each}" for each in ranks]):
        time.sleep(0.01)


def told(ranks: list[RankResult]) -> str:
    """All that the ranks have written, for the message of a test that fails."""
    ends = {None: "did not end, and was killed"}
    heads = [
        f"---- rank {each.rank}: {ends.get(each.code, f'code {each.code}')}, {each.seconds:.1f} s"
        for each in ranks
    ]
    return "\n".join(f"{head}\n{each.output}" for head, each in zip(heads, ranks, strict=True))


def _results(place: Path, world: int) -> list[RankResult]:
    known = json.loads((place / "codes.json").read_text())
    return [
        RankResult(
            rank,
            known["codes"].get(str(rank)),
            _text(place / f"output{rank}"),
            _value(place / f"value{rank}"),
            known["seconds"].get(str(rank), 0.0),
        )
        for rank in range(world)
    ]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _value(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else None
