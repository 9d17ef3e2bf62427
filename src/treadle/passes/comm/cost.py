"""Seconds that collectives take: measured, or by the number of messages and bytes that the usual
algorithms send; and for groups of other sizes than were measured.

::

    seconds(b)  =  messages(n) * latency  +  share(n) * b / bandwidth

    of n ranks, b bytes of the larger side     messages        share
    all-reduce, a ring                         2 (n - 1)       2 (n - 1) / n
    reduce-scatter, all-gather, a ring         n - 1           (n - 1) / n
    all-to-all, in pairs                       n - 1           (n - 1) / n
    broadcast, a scatter and an all-gather     log2 n + n - 1  2 (n - 1) / n

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; that a ring sends the fewest bytes: Patarasuk and Yuan, "Bandwidth Optimal All-reduce
Algorithms for Clusters of Workstations", 2009.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from treadle.graph.collectives import Collective, CollectiveKind
from treadle.targets.links import GroupMeasurement, Link
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError


def messages(kind: CollectiveKind, ranks: int) -> int:
    """How many messages are sent one after the other."""
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * (ranks - 1)
        case CollectiveKind.BROADCAST:
            return math.ceil(math.log2(ranks)) + ranks - 1
        case _:
            return ranks - 1


def share(kind: CollectiveKind, ranks: int) -> float:
    """How often a rank sends the bytes of its larger side."""
    once = (ranks - 1) / ranks
    return 2 * once if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST) else once


@final
@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What collectives of one group cost.

    ``link``: the slowest between its ranks. ``measured``: of this group, or of a smaller or larger
    one like it, whose ranks were joined by ``measured_link``: its latencies grow as messages and
    those of the links do, and the rest of its times as the bytes sent do and bandwidths do not.
    """

    ranks: int
    link: Link
    measured: GroupMeasurement | None = None
    measured_link: Link | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PlanError(
                f"a group of {self.ranks} ranks", code="TR-520", remedy="give at least one rank"
            )

    def seconds(self, kind: CollectiveKind, nbytes: int) -> float:
        """From its start to its end with nothing before it; ``nbytes`` of the larger side."""
        if self.ranks == 1 and self.measured is None:
            return 0.0
        found = self.measured
        if found is None or not found.curves or found.ranks == 1 < self.ranks:
            return self._by_messages(kind, nbytes, self.link)
        if kind not in found.curves:
            return self._by_messages(kind, nbytes, self._like(found))
        return self._scaled(found, kind, nbytes)

    def among(self, ranks: int, device: DeviceModel) -> "CollectiveCost":
        """For a group of other ranks, as it would be on hosts of ``device``."""
        hosts = 1 if self.measured is None else self.measured.hosts
        link = self.link if hosts > 1 else device.link_of(ranks)
        return replace(self, ranks=ranks, link=link)

    def _by_messages(self, kind: CollectiveKind, nbytes: int, link: Link) -> float:
        sent = share(kind, self.ranks) * nbytes
        return messages(kind, self.ranks) * link.latency + sent / link.bandwidth

    def _scaled(self, found: GroupMeasurement, kind: CollectiveKind, nbytes: int) -> float:
        """Exact for times that are the sum above; the measured ones for the measured ranks."""
        curve = found.curves[kind]
        whole = curve.seconds(nbytes)
        same = self.ranks == found.ranks and self.measured_link in (None, self.link)
        if same or found.ranks == 1:
            return whole
        slower, narrower = self._ratios()
        more = messages(kind, self.ranks) / messages(kind, found.ranks)
        larger = share(kind, self.ranks) / share(kind, found.ranks)
        latency = min(curve.latency, whole)
        return more * slower * latency + larger * narrower * (whole - latency)

    def _ratios(self) -> tuple[float, float]:
        """How much longer a message takes than when it was measured, and how much longer a byte."""
        before = self.measured_link or self.link
        slower = self.link.latency / before.latency if before.latency else 1.0
        return slower, before.bandwidth / self.link.bandwidth

    def _like(self, found: GroupMeasurement) -> Link:
        """The link that would explain what was measured of another kind."""
        if found.ranks == 1:
            return self.link
        name = min(found.curves)
        kind, curve = CollectiveKind(name), found.curves[name]
        most, longest = curve.points[-1]
        slower, narrower = self._ratios()
        latency = slower * curve.latency / messages(kind, found.ranks)
        rest = max(longest - curve.latency, 1e-12)
        bandwidth = share(kind, found.ranks) * most / rest / narrower
        return Link(f"as measured of {name}", latency, bandwidth)


@final
@dataclass(frozen=True, slots=True)
class CommunicationModel:
    """What the collectives of a step cost, by the names of its groups.

    Groups do not slow each other down here, whatever wires they share. ``interference``: a compute
    second takes ``1 + interference`` while something is communicated.
    """

    groups: Mapping[str, CollectiveCost]
    interference: float = 0.0

    def seconds(self, each: Collective) -> float:
        """Of one collective with nothing before it. ``PlanError`` TR-520 for an unknown group."""
        return self._group(each.group).seconds(each.kind, each.nbytes)

    def among(self, ranks: int | Mapping[str, int], device: DeviceModel) -> "CommunicationModel":
        """The same groups with other numbers of ranks, each with as many bytes per rank as now:
        one number for all of them, or those of some by name."""
        wanted = dict.fromkeys(self.groups, ranks) if isinstance(ranks, int) else ranks
        changed = {name: self._group(name).among(count, device) for name, count in wanted.items()}
        return replace(self, groups={**self.groups, **changed})

    def _group(self, name: str) -> CollectiveCost:
        found = self.groups.get(name)
        if found is None:
            known = ", ".join(sorted(self.groups)) or "none"
            remedy = "give the number of ranks of each group of the step"
            raise PlanError(
                f"nothing is known of the group {name!r}, only of {known}",
                code="TR-520",
                remedy=remedy,
            )
        return found


def unmeasured(ranks: Mapping[str, int], device: DeviceModel) -> CommunicationModel:
    """For groups of so many ranks, by name, that nobody has measured: the links of ``device``."""
    return CommunicationModel({
        name: CollectiveCost(count, device.link_of(count)) for name, count in ranks.items()
    })


def from_measurements(
    found: Mapping[str, GroupMeasurement], device: DeviceModel
) -> CommunicationModel:
    """For groups that were measured as they are."""
    groups: dict[str, CollectiveCost] = {}
    for name, each in found.items():
        link = device.network if each.hosts > 1 else device.link
        groups[name] = CollectiveCost(each.ranks, link, each, link)
    return CommunicationModel(groups)


__all__ = [
    "CollectiveCost",
    "CommunicationModel",
    "from_measurements",
    "messages",
    "share",
    "unmeasured",
]
