"""The facts that are reported about a compiled step: its variants, and their memory."""

from collections.abc import Iterable, Sequence

from treadle.compiler.compiled import Compiled
from treadle.graph.core.signature import Role
from treadle.loop.printing import dtype_name
from treadle.report.advice import short_line
from treadle.report.step_report import Observed, VariantMemory


def memory_of_variants(variants: Iterable[Compiled], last: Compiled) -> tuple[VariantMemory, ...]:
    """Those that take turns in the arena of ``last``, one for each program."""
    programs = {id(variant.executable): variant for variant in (*variants, last)}
    return tuple(
        _memory_of(program)
        for program in programs.values()
        if program.executable.takes_turns_with(last.executable)
    )


def _memory_of(compiled: Compiled) -> VariantMemory:
    artifact, executable = compiled.artifact, compiled.executable
    return VariantMemory(
        _kind(compiled),
        artifact.arena_bytes,
        artifact.peak_bytes,
        executable.is_recorded,
        executable.own_bytes,
    )


def _kind(compiled: Compiled) -> str:
    """What tells a variant from the others: the layouts of its batch, and its path."""
    artifact = compiled.artifact
    entries = zip(compiled.step.signature.inputs, artifact.inputs, strict=True)
    batch = [artifact.buffers[name] for entry, name in entries if entry.role is Role.BATCH]
    shapes = [f"{dtype_name(buffer.dtype)}{list(buffer.shape)}" for buffer in batch]
    path = [
        f"{short_line(decision.where)} is {decision.answer}"
        for decision in compiled.captured.dependencies.path.decisions
    ]
    return ", ".join((*shapes, *path)) or "no batch"


def observed_of(
    compiled: Compiled,
    name: str,
    recompiles: Sequence[str] = (),
    variants: Iterable[Compiled] = (),
) -> Observed:
    """A variant of a step, to be told about, and the ``variants`` that there are."""
    captured = compiled.captured
    tail = "it runs after the graph, and its memory is not in the plan"
    eager = [
        (
            f"{type(optimizer.optimizer).__name__}.step",
            f"{optimizer.reason.code}: {optimizer.reason.words}; {tail}",
        )
        for optimizer in captured.optimizers.eager
    ]
    return Observed(
        name=name,
        step=compiled.step,
        build=compiled,
        options=compiled.options,
        left=tuple(change.place.label for change in captured.result.left),
        eager=tuple(eager),
        kernel_seconds=compiled.kernel_seconds,
        measured_peak=compiled.measured_peak,
        has_run=compiled.has_run,
        recompiles=tuple(recompiles),
        launching=compiled.executable.replay.note if compiled.executable.replay else "",
        conditions=len(captured.dependencies.conditions),
        decisions=captured.dependencies.path.taken,
        variants=memory_of_variants(variants, compiled),
        step_bytes=compiled.executable.promised_bytes,
        place_bytes=compiled.executable.place_bytes,
        start=compiled.start.words,
    )
