"""Events of Chrome's trace format: times in microseconds, ``X`` for a span, ``C`` for a counter,
``M`` for names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

Event = dict[str, object]


@final
@dataclass(frozen=True, slots=True)
class TraceProcess:
    """The events of one process of a trace, by the number that it has there."""

    number: int

    def named(self, what: str, track: int, name: str) -> Event:
        """``what``: ``process_name``, or ``thread_name`` for a track."""
        return {"ph": "M", "name": what, "pid": self.number, "tid": track, "args": {"name": name}}

    def span(
        self,
        track: int,
        name: str,
        category: str,
        start: float,
        length: float,
        details: Mapping[str, object],
    ) -> Event:
        """Something that begins at ``start`` and takes ``length`` microseconds."""
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self.number,
            "tid": track,
            "ts": round(start, 3),
            "dur": round(length, 3),
            "args": dict(details),
        }

    def counter(self, name: str, now: float, values: Mapping[str, int]) -> Event:
        """Numbers from ``now`` on."""
        return {
            "ph": "C",
            "name": name,
            "pid": self.number,
            "ts": round(now, 3),
            "args": dict(values),
        }
