"""A compiled step as one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Sequence
from importlib.resources import files

from treadle.report.advice import advice, short_line
from treadle.report.chart import HEIGHT, WIDTH, chart, frontier_chart
from treadle.report.explain import during, held_rows
from treadle.report.host_steps import Use
from treadle.report.step_report import StepReport
from treadle.util.sizes import format_bytes, milliseconds
from treadle.util.wording import layer_of, operation_counts


def page(report: StepReport, frontier: Sequence[tuple[int, float, int]] = ()) -> str:
    """The whole file. Names and source lines come from users: everything is escaped.

    ``frontier``: predicted peak, estimated seconds and lower bound of plans for other budgets."""
    from jinja2 import Environment, StrictUndefined  # late: few write a page

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = {"size": format_bytes, "ms": milliseconds, "counted": operation_counts}
    environment.filters.update({**filters, "line": short_line, "layer": layer_of})
    text = files("treadle.report").joinpath("page.html").read_text(encoding="utf-8")
    line = report.memory.timeline
    return environment.from_string(text).render(
        a=report,
        o=report.observed,
        m=report.memory,
        c=chart(report),
        f=frontier_chart(frontier, report.memory.predicted_bytes),
        uses=_uses(report),
        total=_total(report),
        advice=advice(report),
        during=during(report),
        held=held_rows(line.held)[:_HELD] if line is not None else [],
        operations=sum(report.operations.values()),
        width=WIDTH,
        height=HEIGHT,
    )


_HELD = 16
"""Temporaries alive at the peak that are listed."""


def _total(report: StepReport) -> float:
    """The whole that shares refer to: the measured time, or the estimates."""
    measured = report.profiled_seconds
    return max(report.floor_seconds if measured is None else measured, 1e-12)


def _uses(report: StepReport) -> list[Use]:
    """Kernels and calls together, the longest first."""
    uses = [*report.kernels, *report.calls, *report.fallbacks]
    measured = report.profiled_seconds is not None
    return sorted(uses, key=lambda use: -((use.seconds or 0.0) if measured else use.floor_seconds))
