"""A compiled step beside eager, from the same state and random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.python_state.containers.container_changes import ContainerChanges
from treadle.capture.python_state.flatten import flatten, unflatten
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.snapshot import Snapshot
from treadle.compiler.compiled import Compiled
from treadle.session.bind import named_state
from treadle.session.user_step import UserStep


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value in which a compiled step differs from eager; ``name`` is the user's.
    ``region``: the number of the first region whose results differ when it runs alone; ``node`` and
    ``where``: the first such operation in it, and its line. -1 and empty if each region is correct
    alone. ``str`` describes all of it."""

    batch: int
    name: str
    absolute: float
    relative: float
    region: int = -1
    node: str = ""
    where: str = ""

    def __str__(self) -> str:
        gap = f"by {self.absolute:.3g} ({self.relative:.3g} of its largest value)"
        origin = (
            "each region alone agrees with eager; the step may amplify differences in rounding, as "
            "Adam does where the exact gradient is zero"
        )
        if self.region >= 0:
            origin = f"starts at {self.node} in region {self.region}, {self.where}"
        return f"{self.name} differs from eager {gap}\n  {origin}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Values agree within ``atol + rtol * |eager|``."""

    rtol: float
    atol: float


def first_difference(
    step: UserStep,
    compiled: Compiled,
    call: Callable[..., object],
    batch: tuple[object, ...],
    number: int,
    tolerance: Tolerance,
) -> Difference | None:
    """Run the ``number``th ``batch`` by ``call``, the compiled step, and eagerly, and put all back:
    the first result, parameter, buffer or state that differs."""
    captured = compiled.captured
    held = [_tensors(change.place.get()) for change in captured.result.left]
    others = [*_leaves(batch), *(tensor for row in held for tensor in row)]
    places = [change.place for change in captured.result.left if isinstance(change.place, Location)]
    changed = [
        e.place.kept() for e in captured.result.left if isinstance(e.place, ContainerChanges)
    ]
    start = Snapshot(step.models, step.optimizers, others, places, captured.generators)
    try:
        arguments = unflatten(*flatten(batch))  # containers that the step may change
        ours = _tensors((call(*arguments), arguments))
        after = named_state(captured, batch)
        start.restore()
        for restore in changed:
            restore()
        arguments = unflatten(*flatten(batch))
        theirs = _tensors((step.eagerly(*arguments), arguments))
        eager = named_state(captured, batch)
    finally:
        start.restore()
        for restore in changed:
            restore()
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    pairs += [(name, value, eager[name]) for name, value in after.items() if name in eager]
    return _first(number, pairs, tolerance)


def _tensors(value: object) -> list[Tensor]:
    """Copies of the tensors in a result."""
    return [tensor.detach().clone() for tensor in _leaves(value)]


def _leaves(value: object) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def is_close(ours: Tensor, theirs: Tensor, within: Tolerance) -> bool:
    """Whether two values agree; NaN agrees with NaN."""
    return torch.allclose(ours, theirs, rtol=within.rtol, atol=within.atol, equal_nan=True)


def _first(
    number: int, pairs: Sequence[tuple[str, Tensor, Tensor]], within: Tolerance
) -> Difference | None:
    for name, ours, theirs in pairs:
        if is_close(ours, theirs, within):
            continue
        gap = (ours.double() - theirs.double()).abs().max().item()
        scale = theirs.double().abs().max().item()
        return Difference(number, name, gap, gap / scale if scale else float("inf"))
    return None
