"""The cost of a step's collectives and what overlaps with them: as text and as a trace, before it
runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.signature import StepGraph
from treadle.passes.comm.cost import CommunicationModel, unmeasured
from treadle.passes.comm.simulate import (
    CollectiveSpan,
    CommunicationTimeline,
    simulate_communication,
)
from treadle.report.trace_events import Event, TraceProcess
from treadle.targets.model import DeviceModel
from treadle.util.files import write_output
from treadle.util.sizes import format_bytes
from treadle.util.wording import layer_of

_EXPOSED = 5
_PROCESS = TraceProcess(2)
_COMPUTE = 1


@final
@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step's compute and collectives on a timeline; ``timeline`` has the seconds and bytes."""

    timeline: CommunicationTimeline

    def table(self) -> str:
        """The collectives by kind and group, what overlaps with them, and the exposed share."""
        return communication_text(self.timeline) or "communication: none"

    def trace(self, path: str | Path) -> Path:
        """Write a trace for ``chrome://tracing`` or Perfetto: one row for compute, and one for each
        group's collectives. TR-004 if it cannot be written."""
        events = list(communication_events(self.timeline))
        data = {"displayTimeUnit": "ms", "traceEvents": events}
        write_output(Path(path), json.dumps(data, separators=(",", ":")) + "\n")
        return Path(path)


def simulate_step(
    step: StepGraph,
    *,
    ranks: int | Mapping[str, int],
    device: DeviceModel,
    costs: CommunicationModel | None = None,
) -> SimulatedStep:
    """A step on ``ranks`` that need not be there: of every group, or by the names of groups. Each
    rank has the batch, and each collective the bytes, that ``step`` has.

    ``device``: whose compute and links. ``costs``: of groups that were measured, from which other
    numbers of ranks are extrapolated. ``PlanError`` TR-550 for a group without ranks.
    """
    if costs is not None:
        return SimulatedStep(simulate_communication(step, costs.among(ranks, device), device))
    names = {collective.group for collective in collectives_in(step.graph)}
    counts = dict.fromkeys(names, ranks) if isinstance(ranks, int) else ranks
    return SimulatedStep(simulate_communication(step, unmeasured(counts, device), device))


def communication_text(line: CommunicationTimeline) -> str:
    """The collectives by kind and group, what hides them, and the exposed share::

    communication: 3 collectives of 3.0 MiB, 5.619 ms as simulated, 1.453 ms exposed (25.9 %)
      step 42.348 ms: 40.894 ms of compute and what is exposed; at most 3.0 MiB in flight
      group 0: 4 ranks, measured
        3 all_reduce  3.0 MiB  5.619 ms, 1.453 ms exposed (25.9 %), beside mm, mul
      exposed most
        all_reduce of 1.0 MiB, blocks.0.up (backward): 1.200 of 1.873 ms
    """
    if not line.collectives:
        return ""
    count, total = len(line.collectives), sum(collective.nbytes for collective in line.collectives)
    lines = [
        f"communication: {count} collective{'s' * (count > 1)} of {format_bytes(total)}, "
        f"{_ms(line.communication_seconds)} as simulated, {_exposed(line)}",
        f"  step {_ms(line.seconds)}: {_ms(line.compute_seconds)} of compute and what is exposed; "
        f"at most {format_bytes(line.in_flight_bytes)} in flight",
    ]
    if line.inflation_seconds:
        lines.append(f"  compute takes {_ms(line.inflation_seconds)} longer beside it")
    for name, words in line.groups:
        lines.append(f"  group {name}: {words}")
        lines += [f"    {row}" for row in _kinds(line.collectives, name)]
    return "\n".join([*lines, *_most_exposed(line.collectives)])


def _exposed(line: CommunicationTimeline) -> str:
    return f"{_ms(line.exposed_seconds)} exposed ({100 * line.exposed_share:.1f} %)"


def _kinds(spans: Sequence[CollectiveSpan], group: str) -> Iterator[str]:
    """A row for each kind of a group's collectives. Seconds are summed over their flights."""
    own = [span for span in spans if span.group == group]
    for kind in dict.fromkeys(span.kind for span in own):
        same = [span for span in own if span.kind is kind]
        seconds, exposed = sum(e.seconds for e in same), sum(e.exposed for e in same)
        beside: dict[str, float] = {}
        for name, spent in (pair for span in same for pair in span.beside):
            beside[name] = beside.get(name, 0.0) + spent
        names = sorted(beside, key=lambda name: (-beside[name], name))[:_EXPOSED]
        share = 100 * exposed / seconds if seconds else 0.0
        yield (
            f"{len(same)} {kind}  {format_bytes(sum(span.nbytes for span in same))}  "
            f"{_ms(seconds)}, {_ms(exposed)} exposed ({share:.1f} %)"
            + (f", beside {', '.join(names)}" if names else "")
        )


def _most_exposed(spans: Sequence[CollectiveSpan]) -> list[str]:
    """Those of equal layers as one row."""
    rows: dict[tuple[str, int, str, str], list[CollectiveSpan]] = {}
    for span in spans:
        if span.exposed:
            key = span.kind.value, span.nbytes, layer_of(span.module), span.phase
            rows.setdefault(key, []).append(span)
    items = sorted(rows.items(), key=lambda row: -sum(span.exposed for span in row[1]))
    lines = ["  exposed most"] if items else []
    for (kind, nbytes, module, phase), same in items[:_EXPOSED]:
        where = f", {module}" if module else ""
        exposed, seconds = sum(e.exposed for e in same), sum(e.seconds for e in same)
        lines.append(
            f"    {len(same)} x {kind} of {format_bytes(nbytes)}{where} ({phase}): "
            f"{_ms(exposed)} of {_ms(seconds)}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def communication_events(line: CommunicationTimeline) -> Iterator[Event]:
    """Rows of a Chrome trace, as a process of their own: they are simulated, and begin at 0. One of
    compute, and one of each group."""
    tracks = {name: track for track, (name, _) in enumerate(line.groups, _COMPUTE + 1)}
    yield _PROCESS.named("process_name", 0, "compute and communication (simulated)")
    yield _PROCESS.named("thread_name", _COMPUTE, "compute")
    for name, words in line.groups:
        yield _PROCESS.named("thread_name", tracks[name], f"group {name}: {words}")
    for span in line.compute:
        details: dict[str, object] = {"node": span.node, "module": span.module}
        yield _span(_COMPUTE, span.operation, span.phase, (span.start, span.end), details)
    for collective in line.collectives:
        name = f"{collective.kind} {format_bytes(collective.nbytes)}"
        times = collective.start, collective.end
        yield _span(tracks[collective.group], name, "communication", times, _told(collective))


def _span(
    track: int, name: str, category: str, times: tuple[float, float], details: Mapping[str, object]
) -> Event:
    """From one time to another, in seconds, without what there is nothing to say of."""
    start, end = (1e6 * time for time in times)
    told = {key: value for key, value in details.items() if value != ""}
    return _PROCESS.span(track, name, category, start, end - start, told)


def _told(span: CollectiveSpan) -> dict[str, object]:
    beside = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in span.beside)
    waits = {} if span.awaited is None else {"awaited us": round(1e6 * span.awaited, 3)}
    return {
        "node": span.node,
        "module": span.module,
        "phase": span.phase,
        "bytes": span.nbytes,
        "issued us": round(1e6 * span.issued, 3),
        **waits,
        "exposed us": round(1e6 * span.exposed, 3),
        "hidden us": round(1e6 * span.hidden, 3),
        "beside": beside,
    }
