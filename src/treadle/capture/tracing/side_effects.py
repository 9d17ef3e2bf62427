"""Side effects of a step, as values that every call stores in places."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from treadle.capture.argument_containers import ArgumentLocation
from treadle.capture.integrations.grad_scaler import LossScaling, SkippedUpdate
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.changes import (
    Change,
    LateError,
    Look,
    RunPlaces,
    look_at,
    refused,
)
from treadle.capture.python_state.containers.container_changes import ContainerChanges
from treadle.capture.python_state.containers.outputs import OutputCall, OutputLog, Stream
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.external_state.left_objects import DeferredValue
from treadle.capture.python_state.flatten import flatten, unflatten
from treadle.capture.python_state.parts import MISSING
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.symbolic.changing_numbers import ChangingNumbers, counted, direct_place
from treadle.capture.tensors.own_tensors import KeptView
from treadle.capture.tensors.tensor_effects import MadeGradient, TensorLocation, made_gradient
from treadle.capture.tracing.container_stand_ins import refused_container
from treadle.capture.tracing.outgoing import OutgoingValues
from treadle.capture.tracing.user_tensors import UserTensors
from treadle.compat.fake import is_traced
from treadle.compat.pytree import TreeSpec
from treadle.compat.tensors import are_alike

EffectLocation = (
    Location
    | TensorLocation
    | MadeGradient
    | ArgumentLocation
    | ContainerChanges
    | SkippedUpdate
    | StateLocation
    | OutputCall
)
"""Places where a step may store something: each has a value that can be read and set."""


@final
@dataclass(frozen=True, slots=True)
class SideEffect:
    """A value that the step stores in a place outside it. ``leaves``: with slots for tensors."""

    place: EffectLocation
    leaves: tuple[object, ...]
    tree: TreeSpec

    def put(self, values: list[object]) -> None:
        """Put the value there, unless it is there already."""
        value: Any = values[0] if len(values) == 1 and self.tree.is_leaf() else None
        if value is None or not is_plain(value):
            value = unflatten(values, self.tree)
        elif self.place.get() is value:
            return
        self.place.put(value)


@final
class SideEffects:
    """The side effects of one run, in the order in which a call applies them."""

    def __init__(self, outgoing: OutgoingValues, external: ExternalState) -> None:
        self.left: list[SideEffect] = []
        self._changes: list[Change | None] = []  # beside them, of places that others may move
        self._outgoing, self._external = outgoing, external

    def _add(
        self,
        place: EffectLocation,
        leaves: Iterable[object],
        tree: TreeSpec,
        change: Change | None = None,
    ) -> None:
        self.left.append(SideEffect(place, tuple(leaves), tree))
        self._changes.append(change)

    def note_changes(
        self,
        to_arguments: Iterable[tuple[Change, ArgumentLocation]],
        numbers: ChangingNumbers,
        tensors: UserTensors,
        traced: Iterable[Tensor],
    ) -> None:
        """``self.mean = 0.9 * self.mean + ...`` of a buffer is a write to the earlier buffer; a
        value stored elsewhere is a result that is put there. ``traced``: the tensors in the places
        of parameters and buffers."""
        written = {id(tensor) for tensor in traced}
        changes = self._external.changes()
        again = [
            change
            for change in changes
            if self._external.was_read(change) and numbers.depends_on(change.before, change.now)
        ]
        if again:
            raise counted(again)
        arguments = [*to_arguments]
        for change in changes:
            if not _rebinds(change, written, tensors):
                with _about(look_at(change)):
                    self._note_change(change, direct_place(change), change)
        for change, place in arguments:
            if not _rebinds(change, written, tensors):
                with _about(place.look):
                    self._note_change(change, place, None)

    def _note_change(self, change: Change, place: EffectLocation, movable: Change | None) -> None:
        new = change.now
        leaves, tree = self._outgoing.taken_apart(new, change.label)
        is_ours = any(map(self._outgoing.is_of_call, leaves))
        if not is_ours and not isinstance(new, list | dict | tuple):
            leaves, tree = [self._external.left.again(new, change.label)], flatten(None)[1]
        self._add(place, leaves, tree, movable)

    def note_operations(self, changes: ContainerChanges) -> None:
        """Note the operations on containers outside, as one side effect."""
        log = changes.log
        for recorder in log.recorders:
            if not log.is_complete(recorder):
                raise refused_container(recorder)
        if not changes.label:
            return
        roots = [DeferredValue(root) for root in changes.roots()]
        arguments = tuple(0 for _ in roots), changes.args()
        leaves, tree = self._outgoing.taken_apart(arguments, changes.label)
        changes.forget_args()
        again = [
            leaf
            if self._outgoing.is_of_call(leaf)
            else self._external.left.again(leaf, changes.label)
            for leaf in leaves[len(roots) :]
        ]
        self._add(changes, (*roots, *again), tree)

    def note_outputs(self, outputs: OutputLog) -> None:
        """Note what the step printed and logged."""
        for output, leaves, tree in outputs.calls:
            later = (DeferredValue(leaf) if isinstance(leaf, Stream) else leaf for leaf in leaves)
            self._add(output, later, tree)

    def note_skipped(self, scaling: LossScaling) -> None:
        """Note whether optimizers that a scaler steps skipped their step."""
        for optimizer, is_found in scaling.stepped.values():
            self._add(SkippedUpdate(optimizer), *flatten(is_found))

    def note_states(
        self,
        changes: Iterable[tuple[StateLocation, object]],
        inside: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """What the step left among the user's own entries of the state of optimizers; those tensors
        of it that it made. ``inside``: what is traced for one of the user's."""
        kept: list[Tensor] = []
        for place, value in changes:
            values, tree = flatten(value)
            leaves = [inside(leaf) if isinstance(leaf, Tensor) else leaf for leaf in values]
            self._add(place, leaves, tree)
            kept += filter(is_traced, leaves)
        return kept

    def note_tensors(self, changes: Iterable[tuple[TensorLocation, object]]) -> None:
        """Note the changes of tensor objects. TR-117 for objects that the step made."""
        for place, value in changes:
            leaves, tree = flatten(value)
            is_known = all(self._outgoing.is_of_call(leaf) or is_plain(leaf) for leaf in leaves)
            if not is_known and value is not MISSING:
                error = refused(place.label, type(value).__name__)
                raise error.seen_by(functools.partial(_on_tensor, place.find()))
            self._add(place, leaves, tree)

    def note_made_gradients(self, leaves: Sequence[object]) -> None:
        """What the step returns (``leaves``) and leaves has the gradients of a call, as far as it
        was made in the step."""
        left = [leaf for change in self.left for leaf in change.leaves]
        for leaf in {id(value): value for value in (*leaves, *left) if is_traced(value)}.values():
            own = self._outgoing.at_call(leaf)
            if isinstance(own, DeferredValue) and not isinstance(own.compute, KeptView):
                continue
            grad = made_gradient(leaf)
            if grad is not None:
                self._add(MadeGradient(), (leaf, grad), flatten((0, 0))[1])

    def take_slots(self) -> list[Tensor]:
        """The tensors that are stored outside, which get slots; the user's own tensors are stored
        as they are."""
        taken: list[Tensor] = []
        for at, change in enumerate(self.left):
            slots, tensors = self._outgoing.slots(change.leaves)
            self.left[at] = replace(change, leaves=tuple(slots))
            taken += tensors
        return taken

    def placed(self, graph: ReadsGraph, places: Mapping[int, Location | StateLocation]) -> None:
        """What is left goes where its owner is found at a call; an object from outside that is left
        in another place is the one that stands in its own. ``places``: of tensors, by their ids."""

        def at_call(leaf: object) -> object:
            if is_plain(leaf) or isinstance(leaf, DeferredValue):
                return leaf
            if id(leaf) in places:
                return DeferredValue(places[id(leaf)].get)
            node = graph.node_of(leaf)
            return DeferredValue(node.current) if node is not None and node.is_found_anew else leaf

        for at, (left, change) in enumerate(zip(self.left, self._changes, strict=True)):
            moved = None
            if change is not None:
                moved = graph.place_of(change.owner, change.at, change.name, change.label)
            leaves = tuple(map(at_call, left.leaves))
            self.left[at] = SideEffect(left.place if moved is None else moved, leaves, left.tree)


def _on_tensor(tensor: object, run: RunPlaces) -> list[object]:
    """The attributes of the tensor that is traced for one of the user's."""
    traced = run.tensor_for(tensor)
    return [] if traced is None else [*vars(traced), *vars(traced).values(), traced.requires_grad]


@contextmanager
def _about(look: Look) -> Iterator[None]:
    """Errors that are raised inside are about the place that ``look`` reads."""
    try:
        yield
    except LateError as error:
        raise error.seen_by(look) from error.__cause__


def _rebinds(change: Change, written: set[int], tensors: UserTensors) -> bool:
    """Whether another tensor is left in the place of a buffer, in whose memory it then is."""
    old, new = change.before, change.now
    if id(old) not in written or not are_alike(old, new):
        return False
    tensors.rebind(old, new.detach().clone())
    return True
