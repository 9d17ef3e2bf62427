"""What a step was compiled to, and where its time and memory go, as text."""

from collections.abc import Sequence
from dataclasses import replace

from treadle.capture.optimizers.eight_bits import SCALE
from treadle.graph.core.signature import Role
from treadle.graph.rewrite.passes import PassReport
from treadle.passes.memory.decisions import shown
from treadle.report.advice import advice, short_line
from treadle.report.chart import series
from treadle.report.communication import communication_text
from treadle.report.host_steps import Use
from treadle.report.stages import ORDER
from treadle.report.step_report import StepReport, VariantMemory
from treadle.runtime.store.artifact import CallStep
from treadle.schedule.timeline import AliveAtPeak
from treadle.util.errors import counted
from treadle.util.sizes import format_bytes, milliseconds
from treadle.util.wording import layer_of, operation_counts

_USES = 16
_OPERATIONS = 6
_HELD = 10


def explain(report: StepReport) -> str:
    """Next steps, capture, time by phase and kernel, fallbacks, communication, memory and compile
    time."""
    parts = [
        "next\n" + "\n".join(f"  {line}" for line in advice(report)),
        _captured(report),
        _float8(report),
        _eight_bits(report),
        _phases(report),
        _uses(report),
        report.observed.launching and f"launches: {report.observed.launching}",
        _fallbacks(report),
        report.notes.communication and communication_text(report.notes.communication),
        _memory(report),
        _alive(report),
        _times(report),
    ]
    if report.observed.recompiles:
        parts.append(
            "recompiled because\n" + "\n".join(f"  {why}" for why in report.observed.recompiles)
        )
    return "\n\n".join(part for part in parts if part)


def _captured(report: StepReport) -> str:
    counts = ", ".join(f"{input_.count} {input_.role.value}" for input_ in report.inputs)
    phases = ", ".join(f"{count} {phase}" for phase, count in report.operations.items())
    total = sum(report.operations.values())
    left = f"\n  left outside: {', '.join(report.observed.left)}" if report.observed.left else ""
    checks = counted(report.observed.conditions, "check")
    looked = f"\n  {checks} evaluated in each call, before anything is written"
    path = "".join(f"\n    {answer}: {where}" for answer, where in report.observed.decisions)
    decided = f"\n  a variant for the path that these tensor values select{path}"
    return (
        f"captured: one graph of {counted(total, 'operation')} ({phases})\n"
        f"  inputs: {counts}; {report.written_back} written back in place{left}"
        + looked * bool(report.observed.conditions)
        + decided * bool(path)
    )


_FLOAT8 = "aten._scaled_mm.default"
_MATRICES = frozenset(
    {"aten.mm.default", "aten.addmm.default", "aten.mm.dtype", "aten.addmm.dtype"}
)


def _float8(report: StepReport) -> str:
    """With ``numerics="fp8"`` how many products it concerns."""
    if report.build.facts["numerics"].strip("'") != "fp8":
        return ""
    calls = [step.op for step in report.build.artifact.steps if isinstance(step, CallStep)]
    found, others = calls.count(_FLOAT8), sum(op in _MATRICES for op in calls)
    why = (
        "\n  the others are of logits, have a size that is no multiple of 16, add to a sum, or are "
        "estimated to be no faster"
    )
    return f"products: {found} of {found + others} in float8" + why * bool(others)


def _eight_bits(report: StepReport) -> str:
    """With ``optimizer_state="8bit"`` which part of the state is in 8 bits."""
    if report.build.facts["optimizer_state"].strip("'") != "8bit":
        return ""
    names = [
        entry.name for entry in report.observed.step.signature.inputs if entry.role is Role.STATE
    ]
    coded = sum(f"{SCALE}[" in name for name in names)
    whole = len(names) - 2 * coded
    why = (
        "\n  the others are small, have a number of elements that is no multiple of 64, belong to "
        "parameters that ranks share, or are no averages"
    )
    return f"optimizer state: {coded} of {coded + whole} tensors in 8 bits" + why * bool(whole)


def _phases(report: StepReport) -> str:
    """A line per phase: its share, measured and estimated time, kernels and calls."""
    total = report.profiled_seconds
    if total is None:
        head = f"time: not measured; estimated {milliseconds(report.floor_seconds)}"
    else:
        head = (
            f"measured: {milliseconds(total)} in {len(report.host_steps)} kernels and calls, "
            f"timed one by one; estimated {milliseconds(report.floor_seconds)}"
        )
    device = report.build.hardware
    lines = [
        f"{head} at {device.bandwidth / 1e9:.4g} GB/s and the matrix-product rate of "
        f"{device.name}; data that stays in a cache takes less"
    ]
    for phase in report.phases:
        parts = [
            counted(phase.launches, "launch", "launches"),
            counted(phase.library_calls, "library call"),
            counted(phase.fallbacks, "fallback") if phase.fallbacks else "",
        ]
        times = _share_and_times(report, phase.seconds, phase.floor_seconds)
        lines.append(f"  {times}  {phase.name:10} {', '.join(part for part in parts if part)}")
    return "\n".join(lines)


def _share_and_times(report: StepReport, seconds: float | None, floor: float) -> str:
    """``23.1 %   12.50 ms  estimate    3.10 ms``; without a measurement, shares of estimates."""
    total = report.profiled_seconds
    if total is None:
        share = 100 * floor / max(report.floor_seconds, 1e-12)
        return f"{share:5.1f} %  estimate {milliseconds(floor):>11}"
    share = 100 * (seconds or 0.0) / max(total, 1e-12)
    return f"{share:5.1f} % {milliseconds(seconds or 0.0):>11}  estimate {milliseconds(floor):>11}"


def _uses(report: StepReport) -> str:
    kernels = report.kernels
    lines = [
        f"kernels: {counted(report.launches, 'launch', 'launches')} of "
        f"{counted(len(kernels), 'generated function')} "
        f"({counted(sum(kernel.loops for kernel in kernels), 'loop')}); "
        f"{counted(sum(call.launches for call in report.calls), 'library call')}"
    ]
    if report.build.library:
        lines.append(
            "  no compiler was found, or codegen is off: everything runs with PyTorch's kernels"
        )
    measured = report.profiled_seconds is not None
    every = (*kernels, *report.calls, *report.fallbacks)
    uses = sorted(
        (kernel for kernel in every if not kernel.inside),
        key=lambda use: (use.seconds or 0.0) if measured else use.floor_seconds,
        reverse=True,
    )
    for use in uses[:_USES]:
        lines += _use(report, use)
    if len(uses) > _USES:
        rest = uses[_USES:]
        seconds = sum(use.seconds or 0.0 for use in rest)
        times = _share_and_times(report, seconds, sum(use.floor_seconds for use in rest))
        lines.append(f"  {times}  {len(rest)} more; step.report(path) lists all")
    inside = [kernel for kernel in every if kernel.inside]
    taken = [kernel for kernel in inside if kernel.name.endswith("(if taken)")]
    rounds = [kernel for kernel in inside if kernel not in taken]
    lines += _inside("in each iteration of loops", rounds)
    return "\n".join([*lines, *_inside("in branches, of which each call runs one", taken)])


def _inside(head: str, uses: Sequence[Use]) -> list[str]:
    """What functions of loops and branches run, without times: how often is not known."""
    lines = [f"  {head}"] if uses else []
    for use in uses[:_USES]:
        operations = operation_counts(use.operations, _OPERATIONS) if use.source else ""
        count = max(use.loops, use.launches)
        tail = f": {operations}" if operations else ""
        lines.append(f"    {use.name} x{count}  {use.phase}{tail}  {short_line(use.where)}")
    more = len(uses) - _USES
    return [*lines, f"    {more} more; step.report(path) lists all"] if more > 0 else lines


def _use(report: StepReport, use: Use) -> list[str]:
    """Its costs and its operations; in the next line their place in the source."""
    times = _share_and_times(report, use.seconds, use.floor_seconds)
    rate = f" {use.bytes_moved / use.seconds / 1e9:.1f} GB/s" if use.seconds else ""
    operations = operation_counts(use.operations, _OPERATIONS) if use.source else ""
    head = f"  {times}  {use.name} x{max(use.loops, use.launches)}{rate}"
    where = ", ".join(part for part in (use.module, short_line(use.where)) if part)
    return [f"{head}  {use.phase}{': ' if operations else ''}{operations}", f"{'':10}{where}"]


def _fallbacks(report: StepReport) -> str:
    reasons = [
        (
            fallback.name,
            fallback.launches,
            ", ".join(filter(None, (fallback.reason, short_line(fallback.where)))),
        )
        for fallback in report.fallbacks
    ]
    reasons += [(name, 1, reason) for name, reason in report.observed.eager]
    if not reasons:
        return "fallbacks: none"
    lines = [f"  {name} x{count}: {reason}" for name, count, reason in reasons]
    return f"fallbacks: {sum(count for _, count, _ in reasons)}\n" + "\n".join(lines)


def _memory(report: StepReport) -> str:
    memory = report.memory
    measured = memory.measured_bytes
    lines = [
        f"memory: predicted peak {format_bytes(memory.predicted_bytes)}, "
        f"arena {format_bytes(memory.arena_bytes)}"
        + (f", measured peak {format_bytes(measured)}" if measured else "")
    ]
    if memory.bound_bytes is not None:
        least = format_bytes(memory.bound_bytes)
        lines.append(f"  no plan that is estimated to be as fast has a peak below {least} (proved)")
    if memory.planner:
        lines.append(f"  planned with {memory.planner}")
    if memory.micro_batches:
        lines.append(f"  micro-batches: {memory.micro_batches}")
    count, size = memory.bounds
    if count:
        lines.append(
            f"  the sizes of {count} values are known only at run time; each counts with its "
            f"upper bound, {format_bytes(size)} in total"
        )
    if len(memory.variants) > 1:
        arena = max(variant.arena_bytes for variant in memory.variants)
        lines.append(
            f"  {len(memory.variants)} variants share one arena of at most "
            f"{format_bytes(arena)}; predicted peak of any call {format_bytes(memory.step_bytes)}"
        )
        lines += [f"    {_variant(variant)}" for variant in memory.variants[:12]]
    if memory.place_bytes:
        lines.append(f"  recordings share {format_bytes(memory.place_bytes)} for their inputs")
    rows = [
        replace(row, decision=replace(row.decision, where=short_line(row.decision.where)))
        for row in memory.decisions[:12]
    ]
    return "\n".join(lines + [f"  {shown(row)}" for row in rows])


def _variant(variant: VariantMemory) -> str:
    words = (
        f"{variant.name}: arena {format_bytes(variant.arena_bytes)}",
        f"predicted peak {format_bytes(variant.peak_bytes)}",
        "recorded" if variant.is_recorded else "",
        f"{format_bytes(variant.own_bytes)} of its own" if variant.own_bytes else "",
    )
    return ", ".join(filter(None, words))


def _alive(report: StepReport) -> str:
    """What fills the memory at the step where most is in use, and the largest temporaries."""
    line = report.memory.timeline
    if line is None or not line.names:
        return ""
    at = line.peak_at
    lines = [f"alive at the peak, {at + 1} of {len(line.names)}: {during(report)}"]
    parts = [(label, sizes[at]) for label, _, sizes in series(line, report.roles)]
    for label, size in sorted(parts, key=lambda part: -part[1]):
        lines += [f"  {format_bytes(size):>11}  {label}"] if size else []
    lines.append("  the largest temporaries among these")
    for count, value in held_rows(line.held)[:_HELD]:
        where = ", ".join(
            part for part in (layer_of(value.module), short_line(value.where)) if part
        )
        size = format_bytes(count * value.size_bytes)
        lines.append(f"  {size:>11}  {count} x {value.name} {value.type} {value.phase}: {where}")
    return "\n".join(lines)


def during(report: StepReport) -> str:
    """``treadle_7 (backward: mul, sum), examples/gpt.py:48: text``: where most is alive."""
    step = report.at_peak
    if step is None:
        return "not known"
    operations = f": {operation_counts(step.info.operations, _OPERATIONS)}" if step.function else ""
    where = f", {short_line(step.where)}" if step.where else ""
    return f"{step.name} ({step.phase}{operations}){where}"


def held_rows(held: Sequence[AliveAtPeak]) -> list[tuple[int, AliveAtPeak]]:
    """Equal layers' values as one, the largest total first; each by the name of its first."""
    groups: dict[tuple[str, ...], list[AliveAtPeak]] = {}
    for value in held:
        key = (value.type, value.phase, layer_of(value.module), value.where)
        groups.setdefault(key, []).append(value)
    rows = [(len(same), same[0]) for same in groups.values()]
    return sorted(rows, key=lambda row: -row[0] * row[1].size_bytes)


def _times(report: StepReport) -> str:
    source = "from the cache" if report.build.from_cache else "compiled"
    stages = ", ".join(f"{name} {value:.2f} s" for name, value in report.build.seconds.items())
    start = f"\n  {report.observed.start}" if report.observed.start else ""
    return f"compile: {source}; {stages}{start}"


def explain_stages(report: StepReport) -> str:
    """The stages of the compile in their order: seconds, what each was given and made of it, why it
    stands there, and what each of its passes made of the nodes of the graph::

        clean       0.021 s  112 nodes -> 98 nodes    before planning: what is merged or dropped ...
          RemoveNoOps()      0.001 s  9 changes, 112 -> 103 nodes
    """
    seconds = dict(report.build.seconds)
    lines: list[str] = []
    before = ""
    for stage in ORDER:
        sizes = map(report.notes.sizes.get, (stage.name, *reversed(stage.makes)))
        flow = after = next(filter(None, sizes), "")
        if before and after:
            flow = f"{before} -> {after}"
        before = after or before
        took = _seconds(seconds.get(stage.name))
        lines.append(f"{stage.name:20}{took}  {flow:40}  {stage.why}")
        for graph_pass, spent in zip(
            report.notes.passes, report.build.log.pass_seconds, strict=True
        ):
            if graph_pass.stage == stage.name:
                lines.append(_pass(graph_pass.report, spent))
    if report.build.from_cache:
        lines.append("from the cache: the passes are those of the first compile")
    return "\n".join(lines)


def _pass(report: PassReport, seconds: float | None) -> str:
    nodes = f"{report.nodes_before} -> {report.nodes_after} nodes"
    return f"  {report.name:38}{_seconds(seconds)}  {report.matches} changes, {nodes}"


def _seconds(seconds: float | None) -> str:
    return "   not run" if seconds is None else f"{seconds:8.3f} s"
