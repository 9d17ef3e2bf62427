"""How long collectives of a process group take: measured at its first use, and kept.

All ranks of a group do the same and have the same results afterwards: they decide together whether
to measure, rank 0's cache decides for all, each time is that of the slowest rank, and all ranks use
the digits of rank 0.
"""

import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from treadle.compat.distributed.collectives import collective_op, name_of_group
from treadle.runtime.machine import hardware_of
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.links import (
    Curve,
    GroupMeasurement,
    measurement_from_words,
    measurement_to_words,
)
from treadle.targets.registry import target_for
from treadle.util.errors import RuntimeFailure

SIZES = tuple(4096 << (2 * step) for step in range(8))
"""4 KiB to 64 MiB, each four times the one before: bytes of the larger side on a rank."""
_SECONDS = 0.15
"""Seconds for each kind: sizes that would take longer are not measured, and their times are
proportional to their bytes."""
_SIDE = 512
"""Rows and columns of the products beside which a collective is measured."""
_BESIDE = 1 << 22
"""Bytes of that collective."""
_ENOUGH = 0.015
"""Seconds for repeated calls of one size: at least three calls, at most 25."""
_REDUCE, _GATHER, _SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
_IMAGINED = "fake"
"""The backend whose ranks are not there."""


_KNOWN: WeakKeyDictionary[distributed.ProcessGroup, dict[torch.device, GroupMeasurement | None]] = (
    WeakKeyDictionary()
)
"""The answers for the groups of this process. They are kept because a rank that asked again might
be the only one that asks."""


def measured_group(
    group: distributed.ProcessGroup, device: torch.device, cache: Cache, *, measure: bool = True
) -> GroupMeasurement | None:
    """The times of the group's collectives on tensors of ``device``.

    The first call in a process is a collective call of all the group's ranks; later ones return the
    same without communication. ``None`` on all ranks if one of them has ``measure=False``, for a
    group of one rank or of fake ranks, and if there is no memory for it.

    ``RuntimeFailure`` TR-551 if rank 0 sends no measurement, because it runs another version of
    treadle.
    """
    known = _KNOWN.setdefault(group, {})
    if device not in known:
        alone = distributed.get_world_size(group) == 1
        imagined = alone or distributed.get_backend(group) == _IMAGINED
        known[device] = None if imagined else _agreed(_Meeting(group, device), cache, measure)
    return known[device]


def _agreed(meeting: "_Meeting", cache: Cache, measure: bool) -> GroupMeasurement | None:
    """The times from the cache of the first rank, or measured; afterwards all ranks have them
    cached."""
    if not meeting.all(measure):
        return None
    facts = meeting.facts()
    known = cache.get(facts.key)
    text = meeting.of_first("" if known is None else known.decode())
    if text:
        measurement = _read(text)
    else:
        measurement = _measured(meeting, facts)
        if measurement is None:
            return None
        text = meeting.of_first(json.dumps(measurement_to_words(measurement)))
        measurement = _read(text)
    if known is None or known.decode() != text:
        cache.put(facts.key, text.encode())
    return measurement


def _read(text: str) -> GroupMeasurement:
    try:
        return measurement_from_words(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeFailure(
            f"the first rank of a group sent data that is not a measurement: {error}",
            code="TR-551",
            remedy=(
                "run the same version of treadle on all ranks; run `treadle cache clear` on the "
                "first"
            ),
        ) from error


@dataclass(frozen=True, slots=True)
class _GroupFacts:
    """What a measurement depends on, equal on all ranks."""

    key: str
    hosts: int


class _Meeting:
    """What the ranks of a group tell each other: small tensors, nothing else."""

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.ranks = distributed.get_world_size(group)
        self._first = distributed.get_global_rank(group, 0)
        self._synchronize = functools.partial(target_for(device).driver.synchronize, device)

    def all(self, answer: bool) -> bool:
        """Whether all ranks say yes."""
        return bool(self._reduced([float(answer)], distributed.ReduceOp.MIN)[0])

    def most(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over the ranks."""
        return self._reduced(numbers, distributed.ReduceOp.MAX)

    def of_first(self, text: str) -> str:
        """The first rank's text."""
        raw = text.encode()
        size = torch.tensor([len(raw)], device=self.device)
        distributed.broadcast(size, self._first, group=self.group)
        letters = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if distributed.get_rank(self.group) == 0 and raw:
            letters.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        distributed.broadcast(letters, self._first, group=self.group)
        return bytes(letters.tolist()).decode()

    def facts(self) -> _GroupFacts:
        """Who the ranks are: their hosts, in order, and their hardware."""
        host = hashlib.sha256(platform.node().encode()).digest()
        hardware = hashlib.sha256(hardware_of(self.device).encode()).digest()
        own = torch.frombuffer(bytearray(host + hardware), dtype=torch.uint8).to(self.device)
        gathered = [torch.empty_like(own) for _ in range(self.ranks)]
        distributed.all_gather(gathered, own, group=self.group)
        rows = [bytes(one.tolist()) for one in gathered]
        hosts = [one[: len(host)] for one in rows]
        places = [str(hosts.index(one)) for one in hosts]
        kinds = [one[len(host) :] for one in rows]
        backend = f"{distributed.get_backend(self.group)} {self.device.type}"
        key = content_key("group beside", backend, ",".join(places), torch.__version__, *kinds)
        return _GroupFacts(key, len(set(hosts)))

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one call on this rank, which all ranks begin together."""
        self.all(True)  # a barrier that asks for no device
        self._synchronize()
        begin = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - begin

    def _reduced(self, numbers: Sequence[float], by: distributed.ReduceOp.RedOpType) -> list[float]:
        told = torch.tensor(numbers, dtype=torch.float64).to(torch.float32).to(self.device)
        distributed.all_reduce(told, by, group=self.group)
        return told.tolist()


def _measured(meeting: _Meeting, facts: _GroupFacts) -> GroupMeasurement | None:
    """The median of some calls of each kind and size, of the slowest rank."""
    curves: dict[str, Curve] = {}
    for kind in (_REDUCE, _GATHER, _SCATTER):
        points = _points(meeting, kind)
        if not points:
            return None
        curves[kind] = Curve.through(points)
    backend = distributed.get_backend(meeting.group)
    return GroupMeasurement(backend, meeting.ranks, facts.hosts, curves, _hidden(meeting))


def _hidden(meeting: _Meeting) -> float:
    """The share of a gather's time that concurrent matrix products hide, on the rank where it is
    smallest."""
    gather = _prepared(meeting, _GATHER, _BESIDE)
    if gather is None:
        return 1.0
    x = torch.ones(_SIDE, _SIDE, device=meeting.device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x)

    def slowest(run: Callable[[], object]) -> float:
        run()
        return meeting.most([median([meeting.seconds(run) for _ in range(5)])])[0]

    sent, once = slowest(gather), slowest(functools.partial(products, 1))
    count = int(1.5 * sent / once) + 1  # the same on all ranks, as both times are
    alone = slowest(functools.partial(products, count))
    both = slowest(functools.partial(gather, lambda: products(count)))
    return min(max(1.0 - (both - alone) / sent, 0.0), 1.0)


def _points(meeting: _Meeting, kind: str) -> list[tuple[int, float]]:
    """The sizes from the smallest on, each with its seconds, until the time for measurements is
    used up."""
    points: list[tuple[int, float]] = []
    spent = 0.0
    for nbytes in SIZES:
        likely = 4 * points[-1][1] if points else 0.0
        if spent + 2 * likely > _SECONDS:
            break
        run = _prepared(meeting, kind, nbytes)
        if run is None:
            break
        (once,) = meeting.most([meeting.seconds(run)])
        repeats = 1 if 10 * once > _SECONDS else min(max(int(_ENOUGH / once), 3), 25)
        times = [meeting.seconds(run) for _ in range(repeats)]
        slowest, together = meeting.most([median(times), sum(times)])
        spent += once + together
        points.append((nbytes, slowest))
    return points


def _prepared(meeting: _Meeting, kind: str, nbytes: int) -> Callable[..., object] | None:
    """A call on made-up numbers; ``None`` on all ranks if one has no memory for it. ``spare``
    stands for the memory of the result."""
    count = max(nbytes // 4 // meeting.ranks, 1)
    size = count if kind == _GATHER else count * meeting.ranks
    try:
        x = torch.zeros(size, device=meeting.device)
        spare = torch.empty(count * meeting.ranks, device=meeting.device)
    except torch.OutOfMemoryError:
        x = spare = None
    if not meeting.all(spare is not None) or x is None:
        return None
    return functools.partial(_call, kind, x, meeting)


def _call(
    kind: str, x: Tensor, meeting: _Meeting, beside: Callable[[], None] | None = None
) -> None:
    """A collective by the functional operator, as in a step. ``beside``: work that runs at the same
    time."""
    reduce = () if kind == _GATHER else ("sum",)
    ranks = () if kind == _REDUCE else (meeting.ranks,)
    started = collective_op(kind)(x, *reduce, *ranks, name_of_group(meeting.group))
    if beside is not None:
        beside()
    collective_op("wait_tensor")(started)
