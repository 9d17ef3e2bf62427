"""Loops of a step, whose functions are separate programs: the memory that they use while they run,
and their part of an artifact."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from treadle.algebra.extents import largest
from treadle.algebra.strides import is_contiguous
from treadle.graph.regions.loop_bodies import LoopBody, bodies_of
from treadle.loop.kernel import KernelPlan
from treadle.loop.program import BufferKind, Call, Program, Step, TensorRef
from treadle.runtime.store.artifact import Artifact, CallStep, Launch
from treadle.runtime.store.cache import content_key
from treadle.runtime.store.serialize import artifact_to_bytes
from treadle.util.allocator import Allocator
from treadle.util.nested import leaves


def bodies_in(step: Step) -> tuple[LoopBody, ...]:
    """The functions that a step of a program runs as programs of their own."""
    return bodies_of(step.op, step.args) if isinstance(step, Call) and not step.reason else ()


def with_rounds(
    program: Program, plans: Mapping[LoopBody, KernelPlan], allocator: Allocator
) -> Program:
    """The program with what each loop holds as the workspace of its call."""
    steps = [
        replace(step, workspace=_workspace(step, plans, allocator))
        if isinstance(step, Call) and bodies_in(step)
        else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps))


def _bytes_of(plan: KernelPlan, kind: BufferKind, allocator: Allocator) -> int:
    return sum(
        allocator.taken(largest(buffer.nbytes))
        for buffer in plan.buffers.values()
        if buffer.kind is kind and not plan.is_elsewhere(buffer)
    )


def _workspace(call: Call, plans: Mapping[LoopBody, KernelPlan], allocator: Allocator) -> int:
    """What a loop holds beside its operands and results: what its functions, which take turns in
    one arena, hold beside what they are given, and their constants as long as it runs. The results
    stand for what a round is given. One that goes back finds the rounds first, with the values that
    each began with and those after the last; how many there are is not known: one is counted."""
    own = [plans[body] for body in bodies_in(call)]
    constants = [_bytes_of(plan, BufferKind.CONSTANT, allocator) for plan in own]
    inputs = [_bytes_of(plan, BufferKind.INPUT, allocator) + allocator.reserve for plan in own]
    triples = zip(own, inputs, constants, strict=True)
    beside = [plan.peak_bytes - a - b for plan, a, b in triples]
    if len(own) > 2:
        carried = [leaf for leaf in leaves(call.args[1]) if isinstance(leaf, TensorRef)]
        beside[0] += sum(_taken(ref, allocator) for ref in carried)
    copies = sum(
        _taken(ref, allocator) for ref in call.refs if not is_contiguous(ref.shape, ref.strides)
    )
    return max(beside) + sum(constants) + copies


def _taken(ref: TensorRef, allocator: Allocator) -> int:
    return allocator.taken(largest(prod(ref.shape) * ref.dtype.itemsize))


def with_bodies(artifact: Artifact, artifacts: Mapping[LoopBody, Artifact]) -> Artifact:
    """The artifact with those of its loops, each under its name."""
    if not artifacts:
        return artifact
    names = {body: name_of(body_artifact) for body, body_artifact in artifacts.items()}
    steps = tuple(_named(step, names) for step in artifact.steps)
    bodies = {names[body]: body_artifact for body, body_artifact in artifacts.items()}
    return replace(artifact, steps=steps, bodies=bodies)


def name_of(artifact: Artifact) -> str:
    """The digest of what it holds."""
    return content_key(artifact_to_bytes(artifact))


def _named(step: Launch | CallStep, names: Mapping[LoopBody, str]) -> Launch | CallStep:
    if isinstance(step, Launch) or step.reason:
        return step
    bodies = bodies_of(step.op, step.args)
    return replace(step, bodies=tuple(names[body] for body in bodies)) if bodies else step
