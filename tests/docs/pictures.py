"""The pictures of the documentation, as SVG: ``docs/pictures``.

::

    python tests/docs/pictures.py measure    runs the step, and writes step.json
    python tests/docs/pictures.py            draws all pictures from it

Colours are of middle lightness, and there is no background: the same file is read on white and on
black.
"""

import json
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "pictures"
DATA = PICTURES / "step.json"

TEXT, LINE, ACCENT = "#808793", "#80879366", "#0d9488"
LIBRARIES = "results of library calls", "workspace of library calls", "held by libraries"
LAYERS = {
    "forward values": ("#0d9488", ("forward values",)),
    "backward values": ("#d97706", ("backward values",)),
    "optimizer values": ("#9561d6", ("optimizer values",)),
    "library calls": ("#d0487a", LIBRARIES),
}
INPUTS = "parameters, state, batch", "#8b93a1"
"""Below the layers: what is alive during the whole step."""
BUDGETS = (None, 0.5, 0.0)
MIB = 2**20


def measure():
    """Run a small GPT eagerly and within budgets: the bytes over each step, and the frontier."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    import gpt

    import treadle
    from treadle.runtime.meter import measure_peak

    config = gpt.Config(layers=4, width=128, heads=4)
    data = [*gpt.batches(gpt.corpus(200_000), config, 3)]

    def make():
        torch.manual_seed(0)
        model = gpt.GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, gpt.training_step(model, optimizer)

    model, optimizer, step = make()
    step(*data[0])
    states = [value for state in optimizer.state.values() for value in state.values()]
    alive = [*model.parameters(), *model.buffers(), *states, *data[2]]
    eager = measure_peak(lambda: step(*data[2]), alive).peak_bytes

    model, optimizer, step = make()
    plan = treadle.plan(step, *data[0], model=model, optimizer=optimizer)
    return {
        "step": "examples/gpt.py with 4 layers of width 128, batch 8 x 128, AdamW, CPU",
        "torch": torch.__version__,
        "eager": {"measured": eager},
        "frontier": [[point.peak_bytes, round(point.step_ms, 2)] for point in plan.frontier()],
        "plans": [_run(make, data, memory) for memory in BUDGETS],
    }


def _run(make, data, memory):
    import treadle

    model, optimizer, function = make()
    step = treadle.compile(function, model=model, optimizer=optimizer, memory=memory)
    step(*data[0])
    step.measure(*data[2])
    found = step.summary()
    with tempfile.TemporaryDirectory() as folder:
        trace = json.loads(step.trace(Path(folder) / "trace.json").read_text())
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    return {
        "memory": memory,
        "predicted": found.peak_predicted_bytes,
        "measured": found.peak_measured_bytes,
        "alive": [[round(each["ts"] / 1e3, 2), *_layers(each["args"])] for each in counters],
    }


def _layers(sizes):
    """Bytes of inputs, then of each layer."""
    layers = [sum(sizes.get(name, 0) for name in names) for _, names in LAYERS.values()]
    return [sum(sizes.values()) - sum(layers), *layers]


def timeline(data):
    """Bytes alive over the step, without a budget and within the smallest."""
    plans = [data["plans"][0], data["plans"][-1]]
    most = max(plan["predicted"] for plan in plans)
    top = max(most, data["eager"]["measured"])
    parts = []
    for number, plan in enumerate(plans):
        left, width = 64 + number * 450, 410
        last = plan["alive"][-1][0]
        parts += _panel(plan, left, width, lambda at, w=width, s=last: at / s * w, top)
        parts += _level(data["eager"]["measured"], top, left, width, "eager's peak, measured")
        parts += _level(plan["measured"], top, left, width, "peak, predicted and measured", ACCENT)
        name = "without a budget" if plan["memory"] is None else "within the smallest budget"
        parts.append(_text(left + width / 2, 24, name, "middle", size=15))
    parts.append(_text(64, 330, "estimated time, start of the step to its end →"))
    for number, (label, colour) in enumerate(_legend()):
        x = 64 + number * 172 + (28 if number else 0)
        parts.append(f'<rect x="{x}" y="344" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 355, label))
    title = f"Bytes alive during one step of {data['step']}"
    return _svg(940, 368, title, parts)


def _legend():
    return [INPUTS, *((label, colour) for label, (colour, _) in LAYERS.items())]


def _y(size, top):
    return 300 - size / top * 250


def _panel(plan, left, width, scale, top):
    """One stacked area for each layer, the uppermost first, so that lower ones lie over it."""
    for upper, (_, colour) in reversed([*enumerate(_legend(), 1)]):
        highest = {}  # of each unit of width
        for at, *sizes in plan["alive"]:
            x = round(left + scale(at))
            highest[x] = max(highest.get(x, 0), sum(sizes[:upper]))
        points = [f"V{_y(size, top):.0f}H{x}" for x, size in _steps(highest, left + width)]
        yield f'<path d="M{left} 300{"".join(points)}V300Z" fill="{colour}"/>'
    yield f'<path d="M{left} 50V300H{left + width}" fill="none" stroke="{TEXT}"/>'


def _steps(sizes, end):
    """Each size with the place up to which it holds."""
    return zip([*[*sizes][1:], end], sizes.values(), strict=True)


def _level(size, top, left, width, label, colour=TEXT):
    y = _y(size, top)
    dash = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="5 4"'
    yield f'<path d="M{left} {y:.1f}h{width}" {dash}/>'
    text = f"{label}: {size / MIB:.1f} MiB"
    yield _text(left + width, y - 6, text, "end", colour=colour)


def frontier(data):
    """Estimated time against the peak of each plan; the measured peaks of three of them."""
    points = data["frontier"]
    left, right, bottom, height = 70, 620, 300, 240
    x_of = _scale(30 * MIB, 80 * MIB, left, right)
    times = [time for _, time in points]
    y_of = _scale(min(times) - 5, max(times) + 8, bottom, bottom - height)
    path = "L".join(f"{x_of(size):.1f} {y_of(time):.1f}" for size, time in points)
    parts = [
        f'<path d="M{left} {bottom - height}V{bottom}H{right}" fill="none" stroke="{TEXT}"/>',
        f'<path d="M{path}" fill="none" stroke="{ACCENT}" stroke-width="2"/>',
        *(_dot(x_of(size), y_of(time), 4, ACCENT) for size, time in points),
    ]
    for size in range(30, 81, 10):
        parts.append(_text(x_of(size * MIB), bottom + 20, f"{size} MiB", "middle"))
    for time in range(130, 161, 10):
        parts.append(_text(left - 8, y_of(time) + 4, f"{time}", "end"))
        parts.append(f'<path d="M{left} {y_of(time):.1f}H{right}" stroke="{LINE}"/>')
    for plan in data["plans"]:
        x = x_of(plan["measured"])
        y = bottom - 6
        parts.append(f'<path d="M{x:.1f} {y}l-6 -11h12z" fill="#d97706"/>')
    eager = x_of(data["eager"]["measured"])
    dash = f'stroke="{TEXT}" stroke-dasharray="5 4"'
    parts.append(f'<path d="M{eager:.1f} {bottom - height}V{bottom}" {dash}/>')
    parts.append(_text(eager - 6, bottom - height + 14, "eager's peak, measured", "end"))
    parts.append(_text(left, 30, "estimated ms a step"))
    parts.append(_text(right, bottom + 44, "peak of the whole step", "end"))
    parts.append(_dot(left + 6, bottom + 40, 4, ACCENT))
    parts.append(_text(left + 18, bottom + 44, "planned"))
    parts.append(f'<path d="M{left + 96} {bottom + 46}l-6 -11h12z" fill="#d97706"/>')
    parts.append(_text(left + 108, bottom + 44, "measured peak of three plans"))
    return _svg(660, 356, f"The frontier of {data['step']}", parts)


def _scale(low, high, first, last):
    return lambda value: first + (value - low) / (high - low) * (last - first)


def pipeline():
    """What happens to a step, from the user's function to what runs."""
    stages = [
        ("your step", "function, model, optimizer", ""),
        ("graph", "forward, loss, backward, clipping, update", "capture"),
        ("planned graph", "what to keep, what to compute again", "passes"),
        ("loop IR", "a formula for each value, or a library call", "lower"),
        ("kernels and plan", "fused, ordered, every byte placed", "schedule"),
        ("artifact", "C++ or Triton, host program, offsets", "generate code"),
        ("call", "compare, launch, update in place", "run"),
    ]
    parts = []
    for number, (name, text, verb) in enumerate(stages):
        y = 14 + number * 74
        parts.append(
            f'<rect x="150" y="{y}" width="360" height="48" rx="8" fill="{ACCENT}22" '
            f'stroke="{ACCENT}"/>'
        )
        parts.append(_text(330, y + 20, name, "middle", size=15, weight=600))
        parts.append(_text(330, y + 38, text, "middle"))
        if verb:
            parts.append(_arrow(330, y - 26, y))
            parts.append(_text(344, y - 9, verb, colour=ACCENT))
    parts.append(f'<path d="M510 334h62V112h-54" fill="none" stroke="{TEXT}"/>')
    parts.append(f'<path d="M518 107l-8 5l8 5z" fill="{TEXT}"/>')
    parts.append(_text(582, 208, "each plan is evaluated"))
    parts.append(_text(582, 226, "by the peak of its"))
    parts.append(_text(582, 244, "own schedule"))
    return _svg(730, 530, "The pipeline of treadle", parts)


def _arrow(x, top, bottom):
    head = f'<path d="M{x - 5} {bottom - 8}l5 8l5 -8z" fill="{TEXT}"/>'
    return f'<path d="M{x} {top}V{bottom - 6}" stroke="{TEXT}"/>{head}'


def _dot(x, y, radius, colour):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'


def _text(x, y, text, anchor="start", *, size=13, weight=400, colour=TEXT):
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _svg(width, height, title, parts):
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def drawn():
    """Each picture by the name of its file."""
    data = json.loads(DATA.read_text())
    return {
        "pipeline.svg": pipeline(),
        "timeline.svg": timeline(data),
        "frontier.svg": frontier(data),
    }


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    if sys.argv[1:] == ["measure"]:
        DATA.write_text(json.dumps(measure()) + "\n")
    for name, text in drawn().items():
        (PICTURES / name).write_text(text)
