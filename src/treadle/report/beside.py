"""Two compiled steps side by side, and a compiled step as a table in a notebook."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from treadle.passes.memory.decisions import Row
from treadle.report.host_steps import Use
from treadle.report.step_report import StepReport
from treadle.report.summary import Summary, summary_of
from treadle.util.sizes import format_bytes, milliseconds

_DIFFERENCES = 8
"""Decisions of the memory plan, and kernels, that are listed."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two compiled steps: the figures of each, and the values that one of them keeps and the other
    recomputes. ``str`` shows both side by side, with times if both were measured."""

    first: Summary
    second: Summary
    decisions: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("", "first", "second", "second / first"), *_rows(self.first, self.second)]
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        lines = [
            "  ".join(
                (row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in (1, 2, 3)))
            ).rstrip()
            for row in rows
        ]
        lines += ["memory plan"] if self.decisions else []
        lines += [f"  {line}" for line in self.decisions[:_DIFFERENCES]]
        more = len(self.decisions) - _DIFFERENCES
        return "\n".join(lines + ([f"  and {more} more"] if more > 0 else []))


def compared(first: StepReport, second: StepReport) -> Comparison:
    """The differences between ``first`` and ``second``."""
    return Comparison(summary_of(first), summary_of(second), tuple(_decided(first, second)))


def _rows(a: Summary, b: Summary) -> Iterator[tuple[str, str, str, str]]:
    yield "budget", a.budget or "none", b.budget or "none", ""
    for name, one, two in (
        ("predicted peak", a.peak_predicted_bytes, b.peak_predicted_bytes),
        ("arena", a.arena_bytes, b.arena_bytes),
    ):
        yield name, format_bytes(one), format_bytes(two), _ratio(one, two)
    if a.peak_measured_bytes is not None and b.peak_measured_bytes is not None:
        one, two = a.peak_measured_bytes, b.peak_measured_bytes
        yield "measured peak", format_bytes(one), format_bytes(two), _ratio(one, two)
    one, two = a.floor_seconds, b.floor_seconds
    yield "estimated time", milliseconds(one), milliseconds(two), _ratio(one, two)
    if a.seconds is not None and b.seconds is not None:
        yield (
            "measured time",
            milliseconds(a.seconds),
            milliseconds(b.seconds),
            _ratio(a.seconds, b.seconds),
        )
        phases = {phase.name: phase.seconds or 0.0 for phase in b.phases}
        for phase in a.phases:
            one, two = phase.seconds or 0.0, phases.get(phase.name, 0.0)
            yield f"  {phase.name}", milliseconds(one), milliseconds(two), _ratio(one, two)
    for name, one, two in (
        ("operations", a.operations, b.operations),
        ("launches", a.launches, b.launches),
        ("library calls", a.library_calls, b.library_calls),
        ("fallbacks", a.fallbacks, b.fallbacks),
    ):
        yield name, str(one), str(two), _ratio(one, two)
    one, two = a.compile_seconds, b.compile_seconds
    yield "compile", f"{one:.2f} s", f"{two:.2f} s", ""


def _ratio(one: float, two: float) -> str:
    return f"{two / one:.2f}" if one else ""


def _decided(first: StepReport, second: StepReport) -> Iterator[str]:
    """Groups of values of which more are kept, or fewer, the largest first."""
    before, after = _kept(first), _kept(second)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    sizes = {key: (before.get(key) or after[key])[1] for key in changed}
    for key in sorted(changed, key=lambda key: -sizes[key]):
        one, two = before.get(key, (0, 0))[0], after.get(key, (0, 0))[0]
        operation, kind, layer, where = key
        place = ", ".join(part for part in (layer, where) if part)
        size = format_bytes(sizes[key])
        yield f"{operation} {kind} ({size} each): {one} kept became {two}  {place}"


def _kept(report: StepReport) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    """How many values of each kind are kept for the backward, and the bytes of one."""
    counts: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for row in report.memory.decisions:
        count = row.count if row.decision.decision == "save" else 0
        known, size = counts.get(_key(row), (0, row.decision.size))
        counts[_key(row)] = known + count, size
    return counts


def _key(row: Row) -> tuple[str, str, str, str]:
    decision = row.decision
    return decision.operation, decision.type, decision.module, decision.where


def html_of(report: StepReport, text: str) -> str:
    """A step in a notebook: its figures as a table, and ``text``, what ``explain`` says, behind a
    click. Names come from users: everything is escaped."""
    summary = summary_of(report)
    measured = summary.peak_measured_bytes
    rows = [
        ("device", summary.device),
        ("predicted peak", format_bytes(summary.peak_predicted_bytes)),
        ("measured peak", "not measured" if measured is None else format_bytes(measured)),
        ("time", _time(summary)),
        ("kernels", f"{summary.launches} launches, {summary.library_calls} library calls"),
        ("fallbacks", str(summary.fallbacks)),
        ("compile", f"{summary.compile_seconds:.2f} s"),
        ("largest part", _largest(report)),
    ]
    cells = "".join(
        f"<tr><th style='text-align:left'>{name}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return (
        f"<table><caption>treadle step <code>{escape(summary.name)}</code></caption>"
        f"{cells}</table><details><summary>explain()</summary><pre>{escape(text)}</pre></details>"
    )


def _time(summary: Summary) -> str:
    if summary.seconds is None:
        return f"estimated {milliseconds(summary.floor_seconds)}"
    return f"measured {milliseconds(summary.seconds)}"


def _largest(report: StepReport) -> str:
    uses: tuple[Use, ...] = (*report.kernels, *report.calls, *report.fallbacks)
    largest = max(uses, key=lambda use: use.seconds or use.floor_seconds, default=None)
    return "" if largest is None else f"{largest.name} ({largest.phase})"
