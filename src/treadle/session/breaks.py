"""Warnings about places where generated code stops and PyTorch's kernels continue."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from treadle.compiler.compiled import Compiled
from treadle.runtime.store.artifact import Artifact, CallStep, Launch
from treadle.util.reasons import ReasonCode, code_of
from treadle.util.warn import warn_user

if TYPE_CHECKING:
    from treadle.graph.regions.regions import Region

_SHOWN = 8
_WANTED = frozenset({ReasonCode.CHOSEN, ReasonCode.NO_CODEGEN, ReasonCode.SMALL_REGION})
"""Codes of what the user asked for, of which nobody needs to be warned."""


@dataclass(frozen=True, slots=True)
class Break:
    """One operation of one line that runs as PyTorch's kernel. ``reason`` begins with its code."""

    operation: str
    reason: str
    where: str

    @property
    def code(self) -> ReasonCode:
        """The stable code of the reason."""
        return code_of(self.reason)


def breaks_of(artifact: Artifact) -> Counter[Break]:
    """How often each stands in a step."""
    return Counter(
        Break(fallback.op, fallback.reason, fallback.origin) for fallback in artifact.fallbacks
    )


def warn_of_breaks(compiled: Compiled, known: set[Break]) -> None:
    """One warning of all breaks that are new to a step and that nobody asked for; ``known``: those
    it was warned of before."""
    counts = breaks_of(compiled.artifact)
    new = [
        found_break
        for found_break in counts
        if found_break not in known and found_break.code not in _WANTED
    ]
    known.update(new)
    if not new:
        return
    lines = [
        f"  {found_break.operation} x{counts[found_break]}: {_told(found_break)}"
        for found_break in new[:_SHOWN]
    ]
    rest = [f"  and {len(new) - _SHOWN} more"] if len(new) > _SHOWN else []
    count = sum(counts[found_break] for found_break in new)
    calls = "call runs as a PyTorch kernel" if count == 1 else "calls run as PyTorch kernels"
    head = f"{count} {calls} between generated ones; step.explain() lists all:"
    warn_user("\n".join([head, *lines, *rest]))


def _told(found_break: Break) -> str:
    return f"{found_break.reason}, {found_break.where}" if found_break.where else found_break.reason


def show_regions(compiled: Compiled) -> None:
    """Hand each region's text to whom the options name, and name its steps by what that returns."""
    show = compiled.options.regions.show
    if show is None:
        return
    regions = _regions(compiled)
    compiled.handles = tuple(show(region.text) for region in regions)
    compiled.executable.frame.actions.name_steps(_names(compiled, regions))


def _names(compiled: Compiled, regions: "Sequence[Region]") -> list[str]:
    """By host step the handle of its region: of the last one, in the order in which regions run,
    whose values it touches. What it reads of others was made earlier."""
    owner = {node.name: region.number for region in regions for node in region.nodes}
    names: list[str] = []
    for step in compiled.artifact.steps:
        numbers = [owner[name] for name in _buffers(step) if name in owner]
        names.append(compiled.handles[max(numbers)] if numbers else "")
    return names


def _buffers(step: Launch | CallStep) -> list[str]:
    if isinstance(step, Launch):
        return [name for row in step.buffers for name in row]
    names = [name for name in step.outputs if name is not None]
    return names or [view.buffer for view in step.views]


def known_regions(compiled: Compiled) -> "tuple[Region, ...]":
    """The regions of a compiled step, each with its handle if somebody gave it one, and after them
    those of its loops."""
    from treadle.compiler.regions import regions_in_loops

    regions = _regions(compiled)
    device, options = compiled.captured.device, compiled.options
    loops = regions_in_loops(compiled.step, device, options, len(regions))
    if compiled.handles:
        pairs = zip(regions, compiled.handles, strict=True)
        regions = tuple([replace(region, handle=handle) for region, handle in pairs])
    return (*regions, *loops)


def _regions(compiled: Compiled) -> "tuple[Region, ...]":
    from treadle.compiler.regions import regions_of_step  # late: few ask

    captured = compiled.captured
    return regions_of_step(compiled.step, captured.device, compiled.options)
