"""What became of a step, in words."""

from collections.abc import Sequence

from treadle.passes.memory.decisions import shown
from treadle.pipeline import Compiled
from treadle.report.account import Account, CallUse, KernelUse, account_of
from treadle.util.sizes import format_bytes


def explain(compiled: Compiled, recompiles: Sequence[str] = ()) -> str:
    """Capture, kernels, library calls, fallbacks, memory and compile time as one text."""
    account = account_of(compiled, recompiles=recompiles)
    parts = [
        _captured(account),
        _kernels(account),
        _timed(account),
        _fallbacks(account),
        _memory(account),
        _times(account),
    ]
    if recompiles:
        parts.append("recompiled because\n" + "\n".join(f"  {why}" for why in recompiles))
    return "\n\n".join(part for part in parts if part)


def _captured(account: Account) -> str:
    counts = ", ".join(f"{each.count} {each.role}" for each in account.inputs)
    phases = ", ".join(f"{count} {phase}" for phase, count in account.operations)
    total = sum(count for _, count in account.operations)
    left = f"\n  left outside: {', '.join(account.left)}" if account.left else ""
    return (
        f"captured: one graph of {total} operations ({phases})\n"
        f"  inputs: {counts}; {account.written_back} written back in place{left}"
    )


def _kernels(account: Account) -> str:
    kernels = account.kernels
    lines = [
        f"kernels: {account.launches} launches of {len(kernels)} generated functions "
        f"({sum(each.loops for each in kernels)} loops); "
        f"{sum(each.count for each in account.calls)} library calls"
    ]
    if account.library:
        lines.append("  no compiler was found or wanted: everything is PyTorch's kernels")
    for each in sorted(kernels, key=lambda use: -use.bytes_moved)[:8]:
        moved = format_bytes(each.bytes_moved)
        lines.append(f"  {each.function:28} {moved:>11}  x{each.loops} {each.where}")
    most = sorted(account.calls, key=lambda use: -use.count)[:8]
    return "\n".join(lines + [f"  {each.op:40} x{each.count}" for each in most])


def _timed(account: Account) -> str:
    """Kernels and library calls by measured time, if ``Step.profile`` has measured them."""
    total = account.profiled_seconds
    if total is None:
        return ""
    lines = [f"measured: {1e3 * total:.2f} ms in {account.host_steps} steps, one by one"]
    uses = [*account.kernels, *account.calls, *account.fallbacks]
    for use in sorted(uses, key=lambda use: -(use.seconds or 0.0))[:16]:
        lines.append(_time_line(use, total))
    return "\n".join(lines)


def _time_line(use: KernelUse | CallUse, total: float) -> str:
    seconds = use.seconds or 0.0
    share = 100 * seconds / max(total, 1e-12)
    if isinstance(use, KernelUse):
        name, count = use.function, use.launches
        rate = f"{use.bytes_moved / max(seconds, 1e-12) / 1e9:8.1f} GB/s"
    else:
        name, count, rate = use.op, use.count, " " * 13
    return f"  {name:46} {1e3 * seconds:9.3f} ms {share:5.1f} % {rate} x{count}"


def _fallbacks(account: Account) -> str:
    reasons = account.fallbacks
    if not reasons:
        return "fallbacks: none"
    lines = [f"  {each.op} x{each.count}: {each.reason}" for each in reasons]
    return f"fallbacks: {sum(each.count for each in reasons)}\n" + "\n".join(lines)


def _memory(account: Account) -> str:
    memory = account.memory
    measured = memory.measured_bytes
    lines = [
        f"memory: predicted peak {format_bytes(memory.predicted_bytes)}, "
        f"arena {format_bytes(memory.arena_bytes)}"
        + (f", measured peak {format_bytes(measured)}" if measured else "")
    ]
    return "\n".join(lines + [f"  {shown(row)}" for row in memory.decisions[:12]])


def _times(account: Account) -> str:
    source = "from the cache" if account.from_cache else "compiled"
    stages = ", ".join(f"{name} {value:.2f} s" for name, value in account.stages)
    return f"time: {source}; {stages}"
