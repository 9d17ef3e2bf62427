"""The checks of a step's indices, ready to run on the inputs of a call: data, without the graph.

For a step with many sizes, they contain ``Size`` values; ``at`` creates the checks for one call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor, fx

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size, at
from treadle.graph.analysis.index_bounds import (
    IndexBound,
    asked_before,
    can_be_launched,
    cone_of,
    implies,
    index_bounds_in,
    is_fixed,
    is_on_host,
)
from treadle.graph.core.arguments import Given
from treadle.graph.core.signature import StepGraph
from treadle.util.errors import BadIndex
from treadle.util.nested import map_leaves

aten = torch.ops.aten
_CHUNK = 1 << 14  # elements looked at together, so that the check needs next to no memory


@final
@dataclass(frozen=True, slots=True)
class ValueName:
    """Among arguments: the value of that name."""

    name: str


@final
@dataclass(frozen=True, slots=True)
class _IndexCall:
    """``name = operator(*args, **named)``, a value on the way to an index."""

    name: str
    operator: Callable[..., Any]
    args: tuple[object, ...]
    named: dict[str, object]

    def run(self, values: dict[str, Tensor]) -> None:
        def value(leaf: object) -> object:
            return values[leaf.name] if isinstance(leaf, ValueName) else leaf

        args, named = cast("Given", map_leaves(value, (self.args, self.named)))
        values[self.name] = self.operator(*args, **named)

    def at(self, sizes: Sizes) -> "_IndexCall":
        def number(leaf: object) -> object:
            return at(leaf, sizes) if isinstance(leaf, Size) else leaf

        args, named = cast("Given", map_leaves(number, (self.args, self.named)))
        return replace(self, args=args, named=named)


@final
@dataclass(frozen=True, slots=True)
class _BoundCheck:
    """``low <= value <= high``, or ``ignored``. ``inputs``: the user's names of those that it is
    computed from. ``waits``: whether the host waits for the answer."""

    value: str
    low: int
    high: int
    ignored: int | None
    operation: str
    origin: str
    inputs: tuple[str, ...]
    waits: bool

    def require(self, value: Tensor) -> None:
        if value.numel() == 0:
            return
        if not self.waits:
            self._assert_on_device(value)
        elif not self._is_inside(value):
            raise self._error(value)

    def at(self, sizes: Sizes) -> "_BoundCheck":
        return replace(self, low=at(self.low, sizes), high=at(self.high, sizes))

    def _is_inside(self, value: Tensor) -> bool:
        smallest, largest = torch.aminmax(value)
        if smallest.item() >= self.low and largest.item() <= self.high:
            return True
        if self.ignored is None:
            return False
        return all(bool(self._holds(part).all()) for part in _parts(value))

    def _holds(self, value: Tensor) -> Tensor:
        inside = (value >= self.low) & (value <= self.high)
        return inside if self.ignored is None else inside | (value == self.ignored)

    def _assert_on_device(self, value: Tensor) -> None:
        words = f"TR-407: {self.operation} accepts {self.low} to {self.high}"
        aten._assert_async.msg(self._holds(value).all(), words)

    def _error(self, value: Tensor) -> BadIndex:
        smallest, largest = (int(extreme) for extreme in torch.aminmax(value))
        spared = "" if self.ignored is None else f" (or {self.ignored})"
        names = ", ".join(self.inputs) or "the step"
        return BadIndex(
            f"an index in {names} is out of range: {self.operation} accepts {self.low} to "
            f"{self.high}{spared}, but received {smallest} to {largest}",
            code="TR-407",
            where=self.origin,
            remedy=(
                "fix the batch; nothing has changed, and the step can be called with the next one"
            ),
        )


def _parts(value: Tensor) -> Iterator[Tensor]:
    """The tensor in slices of a bounded number of elements."""
    if value.numel() <= _CHUNK:
        yield value
        return
    if value.shape[0] == 1:
        yield from _parts(value[0])
        return
    for half in value.tensor_split(2):
        yield from _parts(half)


@final
@dataclass(frozen=True, slots=True)
class _IndexChecks:
    """Some of the checks of a step, and what computes their values. ``inputs``: of the step those
    that it takes, by name with their numbers."""

    inputs: tuple[tuple[str, int], ...] = ()
    calls: tuple[_IndexCall, ...] = ()
    checks: tuple[_BoundCheck, ...] = ()

    def check(self, inputs: Sequence[Tensor]) -> None:
        """``BadIndex`` TR-407 if one that is waited for does not hold."""
        if not self.checks:
            return
        values = {name: inputs[number] for name, number in self.inputs}
        for call in self.calls:  # on integers, of which there are no gradients
            call.run(values)
        for check in self.checks:
            check.require(values[check.value])

    def at(self, sizes: Sizes) -> "_IndexChecks":
        """Those for these sizes, where two formulas may be one number."""
        checks = dict.fromkeys(check.at(sizes) for check in self.checks)
        return _IndexChecks(
            self.inputs, tuple(call.at(sizes) for call in self.calls), tuple(checks)
        )


def _needed(bounds: Sequence[tuple[IndexBound, bool]]) -> list[tuple[IndexBound, bool]]:
    """Those that no other one implies, which is asked in the same way."""
    return [
        (bound, waits)
        for bound, waits in bounds
        if not any(waits == other_waits and implies(other, bound) for other, other_waits in bounds)
    ]


def _part(step: StepGraph, bounds: Sequence[tuple[IndexBound, bool]]) -> _IndexChecks:
    """``bounds``: each with whether it is waited for."""
    if not bounds:
        return _IndexChecks()

    def as_data(leaf: object) -> object:
        return ValueName(leaf.name) if isinstance(leaf, fx.Node) else leaf

    needed = {node for bound, _ in bounds for node in cone_of(bound.value)}
    inputs = {node: number for number, node in enumerate(step.placeholders) if node in needed}
    calls: list[_IndexCall] = []
    for node in step.graph.nodes:
        if node in needed and node.op == "call_function":
            assert callable(node.target), node
            args, named = cast("Given", map_leaves(as_data, (node.args, node.kwargs)))
            calls.append(_IndexCall(node.name, node.target, args, named))
    checks = [
        _BoundCheck(
            bound.value.name,
            bound.low,
            bound.high,
            bound.ignored,
            bound.operation,
            bound.origin,
            tuple(
                step.signature.inputs[inputs[node]].name
                for node in cone_of(bound.value)
                if node in inputs
            ),
            waits,
        )
        for bound, waits in bounds
    ]
    return _IndexChecks(
        tuple((n.name, at) for n, at in inputs.items()), tuple(calls), tuple(checks)
    )


@final
@dataclass(slots=True)
class IndexCheck:
    """The checks of a step: ``fixed`` by its shapes alone, ``before`` it is launched, and
    ``launched`` with it."""

    fixed: _IndexChecks | None
    before: _IndexChecks
    launched: _IndexChecks

    @staticmethod
    def of(step: StepGraph) -> "IndexCheck":
        """Those of ``step``."""
        bounds = index_bounds_in(step.graph)
        waited = {bound for bound in bounds if is_on_host(bound.value)}
        waited |= set(asked_before(step.graph, bounds))
        kinds: dict[str, list[tuple[IndexBound, bool]]] = {
            "fixed": [],
            "before": [],
            "launched": [],
        }
        for bound in bounds:
            apart = bound in waited or not can_be_launched(bound.value)
            kind = "fixed" if is_fixed(bound) else "before" if apart else "launched"
            kinds[kind].append((bound, bound in waited))
        kinds = {kind: _needed(entries) for kind, entries in kinds.items()}
        return IndexCheck(*(_part(step, kinds[kind]) for kind in kinds))

    def at(self, sizes: Sizes) -> "IndexCheck":
        """For a call of these sizes."""
        fixed = None if self.fixed is None else self.fixed.at(sizes)
        return IndexCheck(fixed, self.before.at(sizes), self.launched.at(sizes))

    def require_fixed(self) -> None:
        """Check what only the shapes decide, once and for all."""
        fixed, self.fixed = self.fixed, None
        if fixed is not None:
            fixed.check(())

    def require(self, inputs: Sequence[Tensor]) -> None:
        """``BadIndex`` TR-407 if an input points outside what it indexes, and it can be known
        before the step is launched, or the step itself looks at it first."""
        self.require_fixed()
        self.before.check(inputs)

    def launch(self, inputs: Sequence[Tensor]) -> None:
        """The other checks, in front of the step's own launches. On a GPU nothing waits: a bad
        index stops the device before anything is written, as it does in eager."""
        self.launched.check(inputs)
