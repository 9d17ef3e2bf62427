"""Seconds of collectives: measured, or estimated from the messages and bytes that the usual
algorithms send; also for groups of other sizes than the measured ones.

::

    seconds(b)  =  latencies of messages one after the other  +  share(n) * b / bandwidth

    of n ranks, b bytes of the larger side     messages    share
    all-reduce                                 2 log2 n    2 (n - 1) / n
    reduce-scatter, all-gather: a ring         n - 1       (n - 1) / n
    all-to-all: pairs                          n - 1       (n - 1) / n
    broadcast: a pipelined tree                log2 n      1

Libraries reduce few bytes along trees and many along a ring, which sends the fewest bytes there
can be: the messages are those of the trees, the bytes those of the ring. A message to another
host takes longer than one within; along a ring one per host does, in a tree one per level.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
2009.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from treadle.graph.core.collectives import Collective, CollectiveKind
from treadle.targets.links import GroupMeasurement, Link
from treadle.targets.model import DeviceModel
from treadle.util.errors import PlanError


def share(kind: CollectiveKind, ranks: int) -> float:
    """How often a rank sends the bytes of its larger side."""
    once = (ranks - 1) / ranks
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * once
        case CollectiveKind.BROADCAST:
            return 1.0 if ranks > 1 else 0.0
        case _:
            return once


@final
@dataclass(frozen=True, slots=True)
class GroupLinks:
    """Ranks spread evenly over hosts: ``link`` within one, ``network`` between them."""

    ranks: int
    hosts: int
    link: Link
    network: Link

    def __post_init__(self) -> None:
        if not 0 < self.hosts <= self.ranks:
            raise PlanError(
                f"a group of {self.ranks} ranks on {self.hosts} hosts",
                code="TR-550",
                remedy="give at least one rank for each host, and at least one host",
            )

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends, along the slowest link."""
        return self.network.bandwidth if self.hosts > 1 else self.link.bandwidth

    def latency(self, kind: CollectiveKind) -> float:
        """Seconds of a collective of no bytes."""
        inside = math.ceil(self.ranks / self.hosts)
        match kind:
            case CollectiveKind.ALL_REDUCE:
                within, between = 2 * _levels(inside), 2 * _levels(self.hosts)
            case CollectiveKind.BROADCAST:
                within, between = _levels(inside), _levels(self.hosts)
            case CollectiveKind.ALL_TO_ALL:
                within, between = inside - 1, self.ranks - inside
            case _:
                within, between = self.ranks - self.hosts, self.hosts - 1
        return within * self.link.latency + between * self.network.latency

    def seconds(self, kind: CollectiveKind, nbytes: float) -> float:
        """By the formula at the top of this file."""
        return self.latency(kind) + share(kind, self.ranks) * nbytes / self.bandwidth


def _levels(count: int) -> int:
    """Of a binary tree over so many."""
    return math.ceil(math.log2(count))


@final
@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What collectives of one group cost: ``now`` are its links.

    ``measured``: of this group, or of one like it with other ranks or hosts, whose links were
    ``then``. Of a measured time, the latency scales with that of the formula for the two groups,
    and the rest with the bytes that a rank sends and with the bandwidth.
    """

    now: GroupLinks
    measured: GroupMeasurement | None = None
    then: GroupLinks | None = None

    def seconds(self, kind: CollectiveKind, nbytes: int) -> float:
        """From its start to its end with nothing before it; ``nbytes`` of the larger side."""
        measurement, then = self.measured, self.then or self.now
        curve = None if measurement is None else measurement.curves.get(kind)
        if curve is not None and then == self.now:
            return curve.seconds(nbytes)
        if then.ranks == 1 or then.latency(kind) == 0.0:  # it says nothing of others
            return self.now.seconds(kind, nbytes)
        if curve is None:
            slower, narrower = (
                (1.0, 1.0) if measurement is None else self._over_formula(measurement, then)
            )
            bytes_alone = share(kind, self.now.ranks) * nbytes / self.now.bandwidth
            return slower * self.now.latency(kind) + narrower * bytes_alone
        whole = curve.seconds(nbytes)
        latency = min(curve.latency, whole)
        longer = self.now.latency(kind) / then.latency(kind)
        more = share(kind, self.now.ranks) / share(kind, then.ranks)
        return longer * latency + more * then.bandwidth / self.now.bandwidth * (whole - latency)

    def among(self, ranks: int, device: DeviceModel) -> "CollectiveCost":
        """For a group of other ranks: as many to a host as there were where it spans several, else
        as many as a host of ``device`` has."""
        then = self.then or self.now
        if then.hosts > 1:
            hosts = math.ceil(ranks * then.hosts / then.ranks)
        else:
            hosts = device.hosts_of(ranks)
        return replace(self, now=replace(self.now, ranks=ranks, hosts=hosts), then=then)

    @property
    def words(self) -> str:
        """``8 ranks, measured``; ``64 ranks on 8 hosts, as 8 measured ones would be``; or which
        links its times are those of."""
        now, then = self.now, self.then or self.now
        who = f"{now.ranks} rank{'s' * (now.ranks > 1)}"
        who += f" on {now.hosts} hosts" if now.hosts > 1 else ""
        if self.measured is None or then.ranks == 1:
            links = now.link.name + (f" and {now.network.name}" if now.hosts > 1 else "")
            return f"{who}, not measured: {links}"
        return f"{who}, measured" if now == then else f"{who}, as {then.ranks} measured ones say"

    def _over_formula(self, measurement: GroupMeasurement, then: GroupLinks) -> tuple[float, float]:
        """Measured latency and measured time of bytes, each as a multiple of the formula's: the
        means over the kinds that were measured, for a kind that was not."""
        slower: list[float] = []
        narrower: list[float] = []
        for name, curve in measurement.curves.items():
            kind = CollectiveKind(name)
            most, longest = curve.points[-1]
            told = share(kind, then.ranks) * most / then.bandwidth
            slower.append(curve.latency / then.latency(kind))
            narrower.append((longest - curve.latency) / told)
        if not slower:
            return 1.0, 1.0
        return sum(slower) / len(slower), sum(narrower) / len(narrower)


@final
@dataclass(frozen=True, slots=True)
class CommunicationModel:
    """What the collectives of a step cost, by the names of its groups.

    Groups do not slow each other down here, whatever wires they share. ``interference``: a compute
    second takes ``1 + interference`` while something is communicated.
    """

    groups: Mapping[str, CollectiveCost]
    interference: float = 0.0

    def seconds(self, collective: Collective) -> float:
        """Of one collective with nothing before it. ``PlanError`` TR-550 for an unknown group."""
        return self._group(collective.group).seconds(collective.kind, collective.nbytes)

    def with_interference(self) -> "CommunicationModel":
        """The same with the interference that was measured, of the group that hides least; none
        where no group was. Nothing hides less than a hundredth."""
        hidden = [group.measured.hidden for group in self.groups.values() if group.measured]
        return replace(self, interference=1.0 / max(min(hidden, default=1.0), 0.01) - 1.0)

    def among(self, ranks: int | Mapping[str, int], device: DeviceModel) -> "CommunicationModel":
        """The same groups with other numbers of ranks, each with as many bytes per rank as now:
        one number for all of them, or those of some by name."""
        wanted = dict.fromkeys(self.groups, ranks) if isinstance(ranks, int) else ranks
        changed = {name: self._group(name).among(count, device) for name, count in wanted.items()}
        return replace(self, groups={**self.groups, **changed})

    def _group(self, name: str) -> CollectiveCost:
        group = self.groups.get(name)
        if group is None:
            known = ", ".join(sorted(self.groups)) or "none"
            remedy = "give the number of ranks of each group of the step"
            raise PlanError(
                f"there is no measurement of the group {name!r}, only of {known}",
                code="TR-550",
                remedy=remedy,
            )
        return group


def unmeasured(ranks: Mapping[str, int], device: DeviceModel) -> CommunicationModel:
    """For groups of so many ranks, by name, that nobody has measured: the links of ``device``."""
    return CommunicationModel(
        {
            name: CollectiveCost(_links(count, device.hosts_of(count), device))
            for name, count in ranks.items()
        }
    )


def from_measurements(
    measurements: Mapping[str, GroupMeasurement], device: DeviceModel
) -> CommunicationModel:
    """For groups that were measured as they are."""
    groups: dict[str, CollectiveCost] = {}
    for name, measurement in measurements.items():
        links = _links(measurement.ranks, measurement.hosts, device)
        groups[name] = CollectiveCost(links, measurement, links)
    return CommunicationModel(groups)


def _links(ranks: int, hosts: int, device: DeviceModel) -> GroupLinks:
    return GroupLinks(ranks, hosts, device.link, device.network)
