"""A plan becomes an artifact: launches and calls in order, and where every buffer lives."""

from collections.abc import Mapping, Sequence

from treadle.codegen.cpp.rng import DRAWS
from treadle.codegen.languages import printer_of
from treadle.compat.operators.operator_facts import Effect, facts_by_name
from treadle.loop.kernel import KernelLaunch, KernelPlan
from treadle.loop.nest import stored
from treadle.loop.program import Buffer, BufferKind, Call, TensorRef
from treadle.runtime.kernels.rng import OPERATOR
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Launch, Storage, View
from treadle.util.nested import Plain, map_leaves


def artifact_of(
    plan: KernelPlan,
    launches: Sequence[KernelLaunch | Call],
    *,
    device: str,
    language: str,
    contract: bool = True,
) -> Artifact:
    """``plan`` as sources and host steps, in the order of ``launches``. ``contract``: whether a
    product and a sum may round once."""
    printer = printer_of(language, plan.buffers, contract=contract)
    steps = [
        call_step(launch) if isinstance(launch, Call) else printer.launch(launch)
        for launch in launches
    ]
    sources = printer.sources()
    if any(isinstance(step, Call) and step.out == OPERATOR for step in plan.steps):
        sources = (*sources, DRAWS)
    specs = {
        name: spec_of(buffer, plan.offsets, plan.device) for name, buffer in plan.buffers.items()
    }
    kept = frozenset(ref.buffer for ref in plan.results if ref is not None)
    return Artifact(
        device=device,
        sources=sources,
        buffers=specs,
        steps=tuple(steps),
        releases=_releases(steps, specs, kept),
        inputs=plan.inputs,
        results=tuple(None if ref is None else _view(ref) for ref in plan.results),
        arena_bytes=plan.arena_bytes,
        peak_bytes=plan.peak_bytes,
        constants=plan.constants,
        untouched=_untouched(launches, frozenset(plan.inputs)),
        host_bytes=plan.host_bytes,
    )


def _untouched(launches: Sequence[KernelLaunch | Call], inputs: frozenset[str]) -> int:
    """How many come before the first that writes to an input or meets other processes."""
    for at, launch in enumerate(launches):
        if isinstance(launch, Call):
            written = set(launch.writes)
            leaves_it = facts_by_name(launch.op).effects & (Effect.WRITES | Effect.COMMUNICATES)
        else:
            written = {name for kernel in launch.kernels for name in stored(kernel.body)}
            leaves_it = Effect.NONE
        if leaves_it or not inputs.isdisjoint(written):
            return at
    return len(launches)


def call_step(call: Call) -> CallStep:
    """A library call as the runtime knows it."""
    return CallStep(
        op=call.op,
        args=tuple(map_leaves(_leaf, value) for value in call.args),
        kwargs={key: map_leaves(_leaf, value) for key, value in call.kwargs.items()},
        outputs=call.outputs,
        out=call.out,
        reason=call.reason,
        origin=call.origin.where or call.origin.module,
        into=None if call.into is None else _view(call.into),
        updates=call.updates,
    )


def _leaf(leaf: TensorRef | Plain) -> View | Plain:
    return _view(leaf) if isinstance(leaf, TensorRef) else leaf


def _view(ref: TensorRef) -> View:
    return View(ref.buffer, ref.dtype, ref.shape, ref.strides, ref.offset)


def spec_of(buffer: Buffer, offsets: Mapping[str, int], device: str = "") -> BufferSpec:
    """A buffer as the runtime knows it; ``offsets`` are those in the arena, ``device`` where the
    step runs."""
    places = {BufferKind.INPUT: Storage.INPUT, BufferKind.CONSTANT: Storage.CONSTANT}
    place = places.get(buffer.kind, Storage.ARENA if buffer.name in offsets else Storage.CALL)
    return BufferSpec(
        buffer.name,
        buffer.dtype,
        buffer.shape,
        buffer.strides,
        place,
        offsets.get(buffer.name, 0),
        buffer.unsized,
        buffer.device if device and buffer.device != device else "",
    )


def touched(step: Launch | CallStep) -> set[str]:
    """The buffers a host step reads or writes."""
    if isinstance(step, Launch):
        return {name for names in step.buffers for name in names}
    made = {name for name in step.outputs if name is not None}
    return made | {view.buffer for view in step.views}


def _releases(
    steps: Sequence[Launch | CallStep], specs: Mapping[str, BufferSpec], kept: frozenset[str]
) -> tuple[tuple[str, ...], ...]:
    """After each step, the call-allocated buffers that nothing later touches."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        for name in touched(step):
            if specs[name].place is Storage.CALL and name not in kept:
                last[name] = i
    releases: list[list[str]] = [[] for _ in steps]
    for name, i in sorted(last.items()):
        releases[i].append(name)
    return tuple(tuple(names) for names in releases)
