"""What became of a step, in words."""

from collections import Counter
from collections.abc import Sequence

from treadle.graph.signature import Role
from treadle.pipeline import Compiled
from treadle.runtime.artifact import CallStep, Launch
from treadle.util.sizes import format_bytes


def explain(compiled: Compiled, recompiles: Sequence[str] = ()) -> str:
    """Capture, kernels, library calls, fallbacks, memory and compile time as one text."""
    parts = [
        _captured(compiled),
        _kernels(compiled),
        _timed(compiled),
        _fallbacks(compiled),
        _memory(compiled),
        _times(compiled),
    ]
    if recompiles:
        parts.append("recompiled because\n" + "\n".join(f"  {why}" for why in recompiles))
    return "\n\n".join(part for part in parts if part)


def _captured(compiled: Compiled) -> str:
    step = compiled.captured.step
    roles = Counter(entry.role for entry in step.signature.inputs)
    counts = ", ".join(f"{roles[role]} {role}" for role in Role if roles[role])
    phases = Counter(node.meta["phase"] for node in step.graph.nodes if node.op == "call_function")
    nodes = ", ".join(f"{count} {phase}" for phase, count in phases.items())
    writes = sum(out.writes is not None for out in step.signature.outputs)
    return (
        f"captured: one graph of {sum(phases.values())} operations ({nodes})\n"
        f"  inputs: {counts}; {writes} written back in place"
    )


def _kernels(compiled: Compiled) -> str:
    steps = compiled.artifact.steps
    launches = [step for step in steps if isinstance(step, Launch)]
    instances = sum(len(launch.buffers) for launch in launches)
    functions = {launch.function for launch in launches}
    calls = Counter(step.op for step in steps if isinstance(step, CallStep) and not step.reason)
    lines = [
        f"kernels: {len(launches)} launches of {len(functions)} generated functions "
        f"({instances} loops); {sum(calls.values())} library calls"
    ]
    if compiled.library:
        lines.append("  no compiler was found or wanted: everything is PyTorch's kernels")
    for launch in sorted(launches, key=lambda each: -each.bytes_moved)[:8]:
        moved = format_bytes(launch.bytes_moved)
        lines.append(f"  {launch.function:28} {moved:>11}  x{len(launch.buffers)} {launch.origin}")
    lines += [f"  {op:40} x{count}" for op, count in calls.most_common(8)]
    return "\n".join(lines)


def _timed(compiled: Compiled) -> str:
    """Kernels and library calls by measured time, if ``Step.profile`` has measured them."""
    if not compiled.kernel_seconds:
        return ""
    found: dict[str, list[tuple[float, int]]] = {}
    for step, seconds in zip(compiled.artifact.steps, compiled.kernel_seconds, strict=True):
        is_launch = isinstance(step, Launch)
        name, moved = (step.function, step.bytes_moved) if is_launch else (step.op, 0)
        found.setdefault(name, []).append((seconds, moved))
    total = sum(compiled.kernel_seconds)
    lines = [f"measured: {1e3 * total:.2f} ms in {len(compiled.kernel_seconds)} steps, one by one"]
    sums = {
        name: (sum(s for s, _ in each), sum(b for _, b in each)) for name, each in found.items()
    }
    for name, (seconds, moved) in sorted(sums.items(), key=lambda item: -item[1][0])[:16]:
        rate = f"{moved / max(seconds, 1e-12) / 1e9:8.1f} GB/s" if moved else " " * 13
        share = 100 * seconds / max(total, 1e-12)
        count = len(found[name])
        lines.append(f"  {name:46} {1e3 * seconds:9.3f} ms {share:5.1f} % {rate} x{count}")
    return "\n".join(lines)


def _fallbacks(compiled: Compiled) -> str:
    reasons = Counter((step.op, step.reason) for step in compiled.artifact.fallbacks)
    for each in compiled.captured.eager:
        words = f"{each.reason.code}: {each.reason.words}; it steps after the graph, and its memory"
        reasons[type(each.optimizer).__name__ + ".step", f"{words} is not in the plan"] += 1
    if not reasons:
        return "fallbacks: none"
    lines = [f"  {op} x{count}: {why}" for (op, why), count in reasons.most_common()]
    return f"fallbacks: {sum(reasons.values())}\n" + "\n".join(lines)


def _memory(compiled: Compiled) -> str:
    artifact = compiled.artifact
    measured = compiled.measured_peak
    lines = [
        f"memory: predicted peak {format_bytes(artifact.peak_bytes)}, "
        f"arena {format_bytes(artifact.arena_bytes)}"
        + (f", measured peak {format_bytes(measured)}" if measured else "")
    ]
    lines += [f"  {row}" for row in compiled.story.texts.get("decisions", "").splitlines()[:12]]
    return "\n".join(lines)


def _times(compiled: Compiled) -> str:
    source = "from the cache" if compiled.from_cache else "compiled"
    stages = ", ".join(f"{name} {value:.2f} s" for name, value in compiled.seconds.items())
    return f"time: {source}; {stages}"
