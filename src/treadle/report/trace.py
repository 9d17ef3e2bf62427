"""A compiled step as a trace that ``chrome://tracing`` and Perfetto open.

The format is the JSON object of Chrome's trace events (``trace_events.py``)::

    {"traceEvents": [{"ph": "X", "name": ..., "ts": 0.0, "dur": 12.5, "pid": 1, "tid": 1}, ...]}
"""

import itertools
import json
from collections.abc import Iterator

from treadle.report.chart import series
from treadle.report.communication import communication_events
from treadle.report.host_steps import HostStep
from treadle.report.step_report import StepReport
from treadle.report.trace_events import Event, TraceProcess

_PROCESS = TraceProcess(1)
_PHASES, _KERNELS = 1, 2
"""Tracks: phases above the kernels and calls that they consist of."""


def trace_of(report: StepReport) -> str:
    """The trace as JSON. Kernels and calls stand one after another with their measured times, or
    with their estimates where nothing was measured: ``otherData`` says which."""
    measured = report.profiled_seconds is not None
    times = "measured one by one" if measured else "estimates, nothing was measured"
    line = report.notes.communication
    events = [*_names(report, times), *_spans(report, measured)]
    data = {
        "displayTimeUnit": "ms",
        "otherData": {
            "step": report.observed.name,
            "device": report.build.artifact.device,
            "times": times,
        },
        "traceEvents": [*events, *(communication_events(line) if line else ())],
    }
    return json.dumps(data, separators=(",", ":")) + "\n"


def _names(report: StepReport, times: str) -> Iterator[Event]:
    yield _PROCESS.named("process_name", 0, f"{report.observed.name or 'step'} ({times})")
    yield _PROCESS.named("thread_name", _PHASES, "phases")
    yield _PROCESS.named("thread_name", _KERNELS, "kernels and library calls")


def _spans(report: StepReport, measured: bool) -> Iterator[Event]:
    line = report.memory.timeline
    layers = [] if line is None else series(line, report.roles)
    now = 0.0
    for phase, steps in itertools.groupby(report.host_steps, key=lambda step: step.phase):
        start = now
        for step in steps:
            length = 1e6 * ((step.seconds or 0.0) if measured else step.floor_seconds)
            yield _PROCESS.span(_KERNELS, step.name, phase, now, length, _details(step))
            if step.at:
                at = max(step.at, key=lambda place: sum(sizes[place] for _, _, sizes in layers))
                yield _PROCESS.counter(
                    "bytes alive", now, {label: sizes[at] for label, _, sizes in layers}
                )
            now += length
        yield _PROCESS.span(_PHASES, phase, "phase", start, now - start, {})
    yield _PROCESS.counter("bytes alive", now, {label: 0 for label, _, _ in layers})


def _details(step: HostStep) -> dict[str, object]:
    details: dict[str, object] = {
        "operations": ", ".join(step.info.operations),
        "module": step.info.module,
        "line": step.where,
        "bytes moved": step.bytes_moved,
        "flops": step.flops,
        "floor us": round(1e6 * step.floor_seconds, 3),
        "fallback": step.reason,
    }
    return {name: value for name, value in details.items() if value}
