"""The bytes alive over a step, as a drawing: stacked areas, points in user units of an SVG."""

import itertools
from dataclasses import dataclass

from treadle.graph.signature import Role
from treadle.report.account import Account
from treadle.schedule.timeline import Timeline

WIDTH, HEIGHT = 960.0, 300.0
_COLUMNS = 480
"""More steps than this share columns; a column shows the one of its steps with most alive."""
_ROLES = {
    Role.PARAMETER: "parameters",
    Role.STATE: "optimizer state",
    Role.GRADIENT: "gradients kept",
    Role.BUFFER: "buffers",
    Role.BATCH: "batch",
    Role.SCALAR: "hyper-parameters",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one colour stands for: bytes at each step. ``points``: an outline for ``polygon``."""

    label: str
    colour: str
    at_peak: int
    points: str


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
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for role, label in _ROLES.items():
        size = sum(n for n, each in zip(line.inputs, roles, strict=True) if each is role)
        found.append((label, role.value, (size,) * steps))
    found.append(("constants", "constants", (line.constants,) * steps))
    found.append(("held by libraries", "reserve", (line.reserve,) * steps))
    for phase, sizes in line.temporaries.items():
        found.append((f"{phase or 'other'} values", phase or "other", sizes))
    found.append(("results of library calls", "calls", line.calls))
    found.append(("work space of library calls", "workspace", line.workspace))
    return [each for each in found if any(each[2])]


def chart(account: Account) -> Chart | None:
    """The drawing of a step; ``None`` where its timeline is not known or has no steps."""
    line = account.memory.timeline
    if line is None or not line.names:
        return None
    parts = series(line, account.roles)
    totals = [sum(each) for each in zip(*(sizes for _, _, sizes in parts), strict=True)]
    columns = _columns(totals)
    peak, budget = account.memory.predicted_bytes, account.memory.budget_bytes
    near = budget is not None and budget <= 2 * peak
    top = 1.05 * max(peak, budget if near and budget else 0, max(totals), 1)
    below = [0] * len(columns)
    layers: list[Layer] = []
    for label, colour, sizes in parts:
        above = [b + sizes[at] for b, at in zip(below, columns, strict=True)]
        layers.append(Layer(label, colour, sizes[line.peak_at], _outline(below, above, top)))
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


def _outline(below: list[int], above: list[int], top: float) -> str:
    """Up and down the stairs from left to right, and back along the bottom."""
    width = WIDTH / len(below)
    points: list[str] = []
    for row, order in ((above, range(len(above))), (below, reversed(range(len(below))))):
        for i in order:
            ends = (i, i + 1) if row is above else (i + 1, i)
            points += [f"{width * end:.2f},{_height(row[i], top):.2f}" for end in ends]
    return " ".join(points)
