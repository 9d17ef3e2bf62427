"""Advice about a compiled step: the reasons why it is slow or large, the most important first."""

from collections.abc import Iterator
from pathlib import Path

from treadle.report.host_steps import Use
from treadle.report.step_report import StepReport
from treadle.util.sizes import format_bytes

_LITTLE = 0.02
"""Share of a step below which fallbacks are listed, and no reason for anything."""
_MOST = 0.7
_SHORT = 5e-6
"""Seconds below which starting a kernel costs as much as running it."""
_OVER = 1.02
"""A measured peak above this multiple of the predicted one breaks the promise."""
_FAR = 4.0
"""Multiple of its estimate from which a kernel is worth a look."""


def advice(report: StepReport) -> tuple[str, ...]:
    """One sentence each, the most telling first; never empty."""
    lines = tuple(_advice(report))
    return lines or (
        "nothing stands out: the step is near the limit that its bytes and products set",
    )


def _advice(report: StepReport) -> Iterator[str]:
    yield from _not_ours(report)
    yield from _of_memory(report)
    total = report.profiled_seconds
    if total is None:
        how = (
            "run step.profile(*batch)"
            if report.observed.whole
            else "run inside backend.profiling()"
        )
        yield f"times are estimates, not measured: {how} once, then explain again"
        return
    yield from _of_time(report, total)


def _not_ours(report: StepReport) -> Iterator[str]:
    """What runs as in eager, and is therefore not faster than eager."""
    if report.build.library:
        yield (
            "everything runs with PyTorch's kernels, at most as fast as eager: install g++ or "
            "clang++ (`treadle doctor` shows what was found), or leave out Options(codegen=False)"
        )
    for name, reason in report.observed.eager:
        yield f"{name} runs outside the graph, with eager's time and memory: {reason}"
    share = _share(report, report.fallbacks)
    if share >= _LITTLE and not report.build.library:
        first = report.fallbacks[0]
        yield (
            f"fallbacks take {100 * share:.0f} % of the step, at eager's speed; the largest is "
            f"{first.name} ({first.reason}){_at(first)}: replace it, or register a lowering "
            "(treadle.register_lowering)"
        )


def _of_memory(report: StepReport) -> Iterator[str]:
    memory = report.memory
    measured = memory.measured_bytes
    if measured is not None and measured > _OVER * memory.step_bytes:
        over = format_bytes(measured - memory.step_bytes)
        yield (
            f"the measured peak is {over} above the predicted one: please report it, with this text"
        )
    line = memory.timeline
    free = report.observed.whole and not memory.budget
    if free and line is not None and line.arena > 0.5 * memory.predicted_bytes:
        yield (
            f"temporaries are {format_bytes(line.arena)} of the peak: memory=0.5 trades some of "
            "them for time, and `treadle plan` shows the whole trade-off"
        )


def _of_time(report: StepReport, total: float) -> Iterator[str]:
    uses = sorted(
        (*report.kernels, *report.calls), key=lambda use: use.seconds or 0.0, reverse=True
    )
    library = sum(use.seconds or 0.0 for use in report.calls) / max(total, 1e-12)
    if library > _MOST and not report.build.library:
        yield (
            f"library calls (products, convolutions, attention) take {100 * library:.0f} % of "
            "the step, at eager's speed: lower precision (torch.autocast) or a larger batch "
            "helps more than fusion"
        )
    short = [step for step in report.host_steps if (step.seconds or 0.0) < _SHORT]
    if len(short) > len(report.host_steps) / 2:
        yield (
            f"{len(short)} of {len(report.host_steps)} kernels and calls take less than "
            f"{1e6 * _SHORT:.0f} us: the step is bound by launch overhead; a larger batch is "
            "nearly free"
        )
    for use in uses[:1]:
        yield _largest(use, total)
    far = [
        use
        for use in uses[1:]
        if (use.seconds or 0.0) > max(_FAR * use.floor_seconds, 0.05 * total)
    ]
    for use in far[:2]:
        yield _largest(use, total, "also far from its estimate: ")


def _largest(use: Use, total: float, lead: str = "the largest part: ") -> str:
    seconds = use.seconds or 0.0
    times = seconds / use.floor_seconds if use.floor_seconds else float("inf")
    near = "near its estimate" if times < _FAR else f"{times:.0f} x its estimate"
    share = 100 * seconds / max(total, 1e-12)
    return f"{lead}{use.name} with {share:.0f} % of the step, {near}{_at(use)}"


def _share(report: StepReport, uses: tuple[Use, ...]) -> float:
    """Of the measured time, or of the estimates."""
    total = report.profiled_seconds
    if total is None:
        return sum(use.floor_seconds for use in uses) / max(report.floor_seconds, 1e-12)
    return sum(use.seconds or 0.0 for use in uses) / max(total, 1e-12)


def _at(use: Use) -> str:
    return f", {short_line(use.where)}" if use.where else ""


def short_line(where: str) -> str:
    """A source line as it is found from where the process runs: ``models/gpt.py:48: text``."""
    return where.removeprefix(str(Path.cwd()) + "/")
