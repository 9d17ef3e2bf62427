"""The links between ranks, and measurements of a group."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Link:
    """``latency``: seconds that a message takes however short it is. ``bandwidth``: bytes per
    second that a rank sends while it receives as many."""

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0.0 or not self.bandwidth > 0.0:
            raise ValueError(f"no link has {self.latency} s and {self.bandwidth} bytes/s")


LOOPBACK = Link("processes of one host", 1e-4, 6e8)
ETHERNET = Link("10 Gb/s Ethernet", 5e-5, 1e9)
NVLINK4 = Link("NVLink 4", 1.5e-6, 3.6e11)
NVLINK3 = Link("NVLink 3", 1.5e-6, 2.4e11)
PCIE4 = Link("PCIe 4 through the host", 1e-5, 1.3e10)
NDR = Link("400 Gb/s InfiniBand", 5e-6, 4e10)
HDR = Link("200 Gb/s InfiniBand", 5e-6, 2e10)
"""For groups that nobody measured: about 80 % of what data sheets give in one direction; between
processes of one host what Gloo reached on two cores."""


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one kind of collective by its bytes, between measured points a straight line of
    their logarithms; more bytes never take less time::

        seconds(b)  =  t[i] * (b / b[i]) ** (log(t[i+1] / t[i]) / log(b[i+1] / b[i]))

    Below the first point it is that point's time, and beyond the last one time grows as bytes do.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points or self.points[0][0] <= 0 or self.points[0][1] <= 0.0:
            raise ValueError("a curve has points of more than no bytes and no time")
        for (fewer, sooner), (more, later) in pairwise(self.points):
            if more <= fewer or later < sooner:
                raise ValueError(f"{more} bytes in {later} s after {fewer} bytes in {sooner} s")

    @classmethod
    def through(cls, measured: Iterable[tuple[int, float]]) -> "Curve":
        """Through measured points in any order. What else a machine does makes a call longer and
        never shorter, so one that took longer than a larger one is lowered to that."""
        found: list[tuple[int, float]] = []
        for nbytes, seconds in sorted(measured, reverse=True):
            found.append((nbytes, min(seconds, found[-1][1]) if found else seconds))
        return cls(tuple(reversed(found)))

    def seconds(self, nbytes: float) -> float:
        """The time of ``nbytes``; of none the time of the smallest that was measured."""
        first, last = self.points[0], self.points[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        for (fewer, sooner), (more, later) in pairwise(self.points):
            if nbytes <= more:
                slope = math.log(later / sooner) / math.log(more / fewer)
                return sooner * (nbytes / fewer) ** slope
        raise AssertionError(nbytes)

    @property
    def latency(self) -> float:
        """What is left of the smallest's time without its bytes, at the rate of all of them."""
        (few, soon), (many, late) = self.points[0], self.points[-1]
        rate = (late - soon) / (many - few) if many > few else 0.0
        return max(soon - rate * few, 0.0)


@final
@dataclass(frozen=True, slots=True)
class GroupMeasurement:
    """What was measured of a process group, equal on all its ranks.

    ``curves``: by the names of operators (``"all_reduce"``), over bytes of the larger side on a
    rank. ``hosts``: how many its ranks are on. ``hidden``: the share of a collective's time that
    products beside it hide; less than all where both need the same cores or the same memory.
    """

    backend: str
    ranks: int
    hosts: int
    curves: Mapping[str, Curve]
    hidden: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.hidden <= 1.0:
            raise ValueError(f"a collective is hidden to {self.hidden}, which is not a share")


def measurement_to_words(found: GroupMeasurement) -> dict[str, object]:
    """A measurement as plain data, for a file."""
    curves = {kind: [list(point) for point in curve.points] for kind, curve in found.curves.items()}
    return {
        "backend": found.backend,
        "ranks": found.ranks,
        "hosts": found.hosts,
        "curves": curves,
        "hidden": found.hidden,
    }


def measurement_from_words(words: Mapping[str, object]) -> GroupMeasurement:
    """The inverse. ``ValueError``, ``KeyError`` or ``TypeError`` for anything else."""
    told = words["curves"]
    if not isinstance(told, dict):
        raise TypeError(f"no curves: {told!r}")
    curves: dict[str, Curve] = {}
    for kind, points in told.items():
        curves[str(kind)] = Curve(tuple((int(point[0]), float(point[1])) for point in points))
    ranks, hosts = int(str(words["ranks"])), int(str(words["hosts"]))
    hidden = float(str(words["hidden"]))
    return GroupMeasurement(str(words["backend"]), ranks, hosts, curves, hidden)
