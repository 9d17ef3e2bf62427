"""Drawings of a step as SVG: the bytes alive over it, and the frontier of its plans."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.graph.core.signature import Role
from treadle.report.step_report import StepReport
from treadle.schedule.timeline import Timeline

WIDTH, HEIGHT = 960.0, 300.0
_MARGIN = 40.0
_COLUMNS = 480
"""More steps than this share columns; a column shows the one of its steps with most alive."""
_ROLES = {
    Role.PARAMETER: "parameters",
    Role.STATE: "optimizer state",
    Role.GRADIENT: "gradients kept",
    Role.BUFFER: "buffers",
    Role.BATCH: "batch",
    Role.SCALAR: "hyper-parameters",
    Role.CARRIED: "carried from the previous call",
    Role.TANGENT: "incoming gradients",
    Role.SAVED: "kept by the forward",
    Role.SEED: "seeds",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one colour stands for: bytes at each step. ``path``: its upper edge and all below, in
    whole units; layers below are drawn over it."""

    label: str
    colour: str
    at_peak: int
    path: str


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal line at some bytes; ``y`` in units of the drawing."""

    label: str
    size_bytes: int
    y: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Layers from the bottom up; ``at``: the step where most is alive, ``x`` and ``y`` its top."""

    layers: tuple[Layer, ...]
    lines: tuple[Line, ...]
    steps: int
    at: int
    at_name: str
    at_phase: str
    alive_bytes: int
    unused_bytes: int
    x: float
    y: float


def series(line: Timeline, roles: tuple[Role, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Label, colour and bytes at each step of everything that is alive, from the bottom up."""
    steps = len(line.names)
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    for role, label in _ROLES.items():
        size = sum(n for n, owner in zip(line.inputs, roles, strict=True) if owner is role)
        rows.append((label, role.value, (size,) * steps))
    rows.append(("constants", "constants", (line.constants,) * steps))
    rows.append(("held by libraries", "reserve", (line.reserve,) * steps))
    for phase, sizes in line.temporaries.items():
        rows.append((f"{phase or 'other'} values", phase or "other", sizes))
    rows.append(("results of library calls", "calls", line.calls))
    rows.append(("workspace of library calls", "workspace", line.workspace))
    return [row for row in rows if any(row[2])]


def chart(report: StepReport) -> Chart | None:
    """The drawing of a step; ``None`` where its timeline is not known or has no steps."""
    line = report.memory.timeline
    if line is None or not line.names:
        return None
    parts = series(line, report.roles)
    totals = [sum(row) for row in zip(*(sizes for _, _, sizes in parts), strict=True)]
    columns = _columns(totals)
    peak, budget = report.memory.predicted_bytes, report.memory.budget_bytes
    near = budget is not None and budget <= 2 * peak
    top = 1.05 * max(peak, budget if near and budget else 0, max(totals), 1)
    below = [0] * len(columns)
    layers: list[Layer] = []
    for label, colour, sizes in parts:
        above = [b + sizes[at] for b, at in zip(below, columns, strict=True)]
        layers.append(Layer(label, colour, sizes[line.peak_at], _stairs(above, top)))
        below = above
    lines = [Line("predicted peak", peak, _height(peak, top))]
    if near and budget is not None:
        lines.append(Line("budget", budget, _height(budget, top)))
    alive = totals[line.peak_at]
    column = columns.index(line.peak_at)
    return Chart(
        tuple(layers),
        tuple(lines),
        len(totals),
        line.peak_at,
        line.names[line.peak_at],
        line.phases[line.peak_at],
        alive,
        max(0, peak - alive),
        round((column + 0.5) * WIDTH / len(columns), 2),
        _height(alive, top),
    )


def _columns(totals: list[int]) -> list[int]:
    """For each column the step that it shows."""
    count = min(len(totals), _COLUMNS)
    edges = [len(totals) * i // count for i in range(count + 1)]
    return [
        max(range(begin, end), key=totals.__getitem__) for begin, end in itertools.pairwise(edges)
    ]


def _height(size: float, top: float) -> float:
    return round(HEIGHT * (1 - size / top), 2)


def _stairs(above: list[int], top: float) -> str:
    """From the left along the stairs to the right: ``M0,300v-40h2v-3h5...V300z``."""
    x, y = 0, round(HEIGHT)
    parts = [f"M0,{y}"]
    for i, size in enumerate(above):
        level = round(_height(size, top))
        if level != y:
            here = round(WIDTH * i / len(above))
            parts += [f"h{here - x}" if here != x else "", f"v{level - y}"]
            x, y = here, level
    return "".join([*parts, f"H{WIDTH:.0f}V{HEIGHT:.0f}z"])


@dataclass(frozen=True, slots=True)
class Dot:
    """A plan on the frontier; ``x`` and ``y`` in units of the drawing."""

    peak_bytes: int
    seconds: float
    bound_bytes: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans from the fastest to the smallest, and where the peak of the chosen one lies."""

    dots: tuple[Dot, ...]
    path: str
    chosen_x: float


def frontier_chart(points: Sequence[tuple[int, float, int]], peak_bytes: int) -> Frontier | None:
    """``points``: predicted peak, estimated seconds and lower bound of the peaks of plans as fast,
    of each plan. ``None`` for less than two."""
    if len(points) < 2:
        return None
    left = min(peak_bytes, *(size for size, _, _ in points))
    right = max(peak_bytes, *(size for size, _, _ in points))
    most, least = max(s for _, s, _ in points), min(s for _, s, _ in points)

    def across(size: float) -> float:
        return round(_MARGIN + (WIDTH - 2 * _MARGIN) * (size - left) / max(right - left, 1), 1)

    def down(seconds: float) -> float:
        share = (seconds - least) / max(most - least, 1e-12)
        return round(HEIGHT - _MARGIN - (HEIGHT - 2 * _MARGIN) * share, 1)

    dots = tuple(Dot(size, s, bound, across(size), down(s)) for size, s, bound in points)
    path = "M" + "L".join(f"{dot.x:g},{dot.y:g}" for dot in dots)
    return Frontier(dots, path, across(peak_bytes))
