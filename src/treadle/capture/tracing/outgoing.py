"""Values that leave a step, split into leaves; each call finds, computes or creates each leaf."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard, final

from torch import Tensor

from treadle.capture.argument_containers import ArgumentAlias, Copies, ServedCall
from treadle.capture.python_state.containers.container_changes import Reference
from treadle.capture.python_state.containers.list_slices import is_list_slice
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.external_state.left_objects import DeferredValue
from treadle.capture.python_state.flatten import flatten, replaced
from treadle.capture.python_state.plain_values import is_plain
from treadle.capture.refuse import refuse_unfinished
from treadle.capture.symbolic.deferred import DeferredNumbers, is_known_later
from treadle.capture.symbolic.numbers import as_key, is_stand_in
from treadle.capture.symbolic.size_numbers import alone, as_number, is_size
from treadle.capture.tensors.result_slots import NamedOnce, slot_of
from treadle.capture.tensors.sparse_gradients import SparseGradients, is_sparse
from treadle.capture.tracing.user_tensors import UserTensors
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.compat.fake import is_traced
from treadle.compat.pytree import TreeSpec
from treadle.compat.unsized import is_symbol, is_unsized


@final
class OutgoingValues:
    """Of one run. ``copies``: the containers among the arguments."""

    def __init__(
        self,
        batch: Sequence[object],
        call: ServedCall,
        copies: Copies,
        external: ExternalState,
        numbers: DeferredNumbers,
        tensors: UserTensors,
        sparse: SparseGradients,
    ) -> None:
        """``batch``: the leaves of the arguments that are traced."""
        self._inputs = {id(value): at for at, value in enumerate(batch) if not is_plain(value)}
        self._call, self._copies, self._external = call, copies, external
        self._numbers, self._tensors, self._sparse = numbers, tensors, sparse
        self._named = NamedOnce()

    def taken_apart(self, value: object, label: str) -> tuple[list[object], TreeSpec]:
        """Leaves and structure of what is returned or left outside: containers, and objects that
        the run made around its tensors. Containers of the user's are leaves."""

        def instead(leaf: object, rest: object) -> object:
            if self.is_of_call(leaf) or not self._external.left.hides_traced(rest):
                return None
            return self._external.left.taken_apart(leaf, label)

        return flatten(replaced(self._copies.with_whole(value), _as_left), instead)

    def result(self, value: object) -> tuple[list[object], TreeSpec]:
        """The same for the step's result. TR-136 for results that would do their work later."""
        refuse_unfinished(flatten(self._copies.with_whole(value))[0])
        return self.taken_apart(value, "its result")

    def is_of_call(self, leaf: object) -> bool:
        """Whether it belongs to this call, and the next call has another one."""
        is_made = (
            is_traced(leaf) or isinstance(leaf, ArgumentAlias | Reference) or is_stand_in(leaf)
        )
        return is_made or is_symbol(leaf) or id(leaf) in self._inputs

    def at_call(self, leaf: object) -> object:
        """The leaf's value at a call: a tensor of the user's is that very object, and a view of one
        is a view of it."""
        if is_unsized(leaf):
            leaf = self._numbers.of_size(leaf)
        leaf = as_number(leaf)
        if is_known_later(leaf):
            self._numbers.fetch(leaf)
        if is_stand_in(leaf):
            return DeferredValue(leaf.compute)
        if isinstance(leaf, ArgumentAlias | Reference):
            return DeferredValue(leaf)
        if id(leaf) in self._inputs:
            return DeferredValue(functools.partial(self._call.leaf, self._inputs[id(leaf)]))
        return (self._tensors.find(leaf) if isinstance(leaf, Tensor) else None) or leaf

    def slots(
        self, leaves: Iterable[object], is_made: Callable[[object], TypeGuard[Tensor]] = is_traced
    ) -> tuple[list[object], list[Tensor]]:
        """The leaves with slots in the places of tensors that the step made, and what the graph
        gives for those. A tensor that left the step before is the one that was there."""
        named = self._named.of([self.at_call(leaf) for leaf in leaves])
        tensors = [part for leaf in named if is_made(leaf) for part in self.parts(leaf)]
        return [slot_of(leaf) if is_made(leaf) else leaf for leaf in named], tensors

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The graph's values for a tensor that leaves it, from which the slot of ``slot_of`` makes
        the tensor."""
        if is_sparse(tensor):
            rows = self._sparse.rows_of(tensor)
            return [rows.indices.detach(), rows.values.detach()]
        return [local_of(tensor.detach())]


def _as_left(node: object) -> object:
    """For a dict with keys that stand in, one with the keys themselves; for what stands in for a
    slice of a list, a list."""
    if is_list_slice(node):
        return replaced(list(node.opened()), _as_left)
    if type(node) is not dict or all(_real_key(key) is key for key in node):
        return None
    return {_real_key(key): replaced(value, _as_left) for key, value in node.items()}


def _real_key(key: object) -> object:
    return alone(key) if is_size(key) else as_key(key)
