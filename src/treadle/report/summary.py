"""The numbers of a compiled step as one object, for scripts and dashboards."""

from dataclasses import dataclass

from treadle.report.advice import advice
from treadle.report.host_steps import PhaseSummary
from treadle.report.step_report import StepReport, VariantMemory


@dataclass(frozen=True, slots=True)
class Summary:
    """A compiled step in numbers: bytes, seconds and counts. ``dataclasses.asdict`` gives JSON.

    ``peak_predicted_bytes``: the plan's promise for the whole step, including parameters and state;
    ``peak_measured_bytes``: ``None`` before ``Step.measure``. ``arena_bytes``: the bytes of
    temporaries. ``peak_bound_bytes``: within a budget, a proved lower bound of the peak of every
    plan whose estimated time is as short; otherwise ``None``. ``variants`` share one arena, and
    ``peak_of_any_call_bytes`` is the bound of every call: the largest of their peaks, plus what
    each keeps for itself (``own_bytes``) and what their recordings share. ``budget``: ``memory=``
    as text, empty for none; ``micro_batches``: with ``micro_batch=``, which ones, and why;
    ``planner``: what of ``planner=`` is not the default. ``launches``: of the ``functions``
    generated functions; ``library_calls``: made by choice; ``fallbacks``: including optimizers that
    step eagerly. ``floor_seconds`` and ``seconds``: of all kernels and calls, as in
    ``PhaseSummary``; ``stages``: seconds of each stage of the compile, ``compile_seconds`` in
    total. ``advice``: the first lines of ``explain``.
    """

    name: str
    device: str
    operations: int
    launches: int
    functions: int
    library_calls: int
    fallbacks: int
    peak_predicted_bytes: int
    peak_measured_bytes: int | None
    peak_bound_bytes: int | None
    peak_of_any_call_bytes: int
    arena_bytes: int
    variants: tuple[VariantMemory, ...]
    budget: str
    micro_batches: str
    planner: str
    floor_seconds: float
    seconds: float | None
    phases: tuple[PhaseSummary, ...]
    compile_seconds: float
    stages: dict[str, float]
    from_cache: bool
    recompiles: tuple[str, ...]
    advice: tuple[str, ...]


def summary_of(report: StepReport) -> Summary:
    """The numbers of ``report``."""
    memory = report.memory
    fallbacks = sum(call.launches for call in report.fallbacks) + len(report.observed.eager)
    return Summary(
        name=report.observed.name,
        device=report.build.artifact.device,
        operations=sum(report.operations.values()),
        launches=report.launches,
        functions=len(report.kernels),
        library_calls=sum(call.launches for call in report.calls),
        fallbacks=fallbacks,
        peak_predicted_bytes=memory.predicted_bytes,
        peak_measured_bytes=memory.measured_bytes,
        peak_bound_bytes=memory.bound_bytes,
        peak_of_any_call_bytes=memory.step_bytes,
        arena_bytes=memory.arena_bytes,
        variants=memory.variants,
        budget=memory.budget,
        micro_batches=memory.micro_batches,
        planner=memory.planner,
        floor_seconds=report.floor_seconds,
        seconds=report.profiled_seconds,
        phases=report.phases,
        compile_seconds=report.compile_seconds,
        stages=dict(report.build.seconds),
        from_cache=report.build.from_cache,
        recompiles=report.observed.recompiles,
        advice=advice(report),
    )
