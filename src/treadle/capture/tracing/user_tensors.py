"""The effects of a step on the user's tensors, and where a call finds those that it returns."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.optimizers.optimizer_state import refused_state
from treadle.capture.python_state.external_state.left_objects import DeferredValue
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.sources import Pending, State
from treadle.capture.tensors.own_tensors import OwnTensors, buffer_of, itself
from treadle.capture.tensors.tensor_effects import (
    Aspect,
    GivenTensor,
    TensorLocation,
    refused_storage,
)
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.fake import is_traced
from treadle.compat.tensors import are_alike, storage_key


@final
class UserTensors:
    """The user's tensors of one run: parameters, buffers, arguments, and tensors that the step met
    outside."""

    def __init__(
        self, request: TraceRequest, bindings: InputBindings, recorder: TraceRecorder
    ) -> None:
        self.pending: Pending = {}  # state that there was not yet when a call began
        self._request, self._bindings, self._recorder = request, bindings, recorder
        self._given: list[GivenTensor] = []  # arguments and buffers
        self._rebound: list[tuple[Tensor, Tensor]] = []  # what they were, and what is assigned
        self._owned = OwnTensors()

    def begin(self) -> None:
        """Begin: note the state of the tensors before the step."""
        call, leaves = self._request.call, self._request.leaves
        for at, (leaf, traced) in enumerate(zip(leaves, self._bindings.batch, strict=True)):
            is_parameter = id(leaf) in self._bindings.parameters
            if not isinstance(leaf, Tensor) or not isinstance(traced, Tensor) or is_parameter:
                continue
            find = functools.partial(call.leaf, at)
            label = f"argument {at}"
            self._given.append(GivenTensor.of(label, find, leaf, traced, is_argument=True))
        for owner, key, traced in self._bindings.buffers:
            find, buffer = functools.partial(buffer_of, owner, key), owner._buffers[key]
            assert buffer is not None, key
            label = f"the buffer {key}"
            self._given.append(GivenTensor.of(label, find, buffer, traced, is_argument=False))

    def entries(self) -> list[GivenTensor]:
        """The tensors that are not parameters, including those that the step met outside."""
        return [*self._given, *self._recorder.held.entries()]

    def memory(self) -> frozenset[int | None]:
        """The keys of the memory of tensors that were there before, or are when it is done."""
        held = (tensor.memory for tensor in self._recorder.held.entries())
        return self._bindings.memory.union(held)

    def argument_view(self, tensor: Tensor) -> Callable[[], Any] | None:
        """Where the argument that ``tensor`` is, or of which it is a view, is found at a call."""
        owned = OwnTensors()
        for given in self._given:
            if given.is_argument:
                owned.add(given.find, given.traced, given.traced)
        found = owned.of(tensor)
        return None if found is None else found.compute

    def rebind(self, before: Tensor, now: Tensor) -> None:
        """Note that another value is written to the memory of an earlier tensor."""
        self._rebound.append((before, now))

    def changes(self) -> Iterator[tuple[TensorLocation, object]]:
        """The changes of the step to tensor objects. Of parameters and buffers, whose memory stays,
        values that ``.data =`` gave them are written to it when all results are known."""
        uses, assigned, tensors = self._recorder.tensors, self._recorder.assignments, self.entries()
        known = self._bindings.memory | {tensor.memory for tensor in tensors}
        owned = list({id(tensor): tensor for tensor in self._bindings.by_id().values()}.values())
        targets = {id(target): target for target in (*owned, *(each.traced for each in tensors))}
        assigned.refuse_shared(targets.values(), known, uses)
        for value in owned:
            before = assigned.before(value)
            if before is None:
                continue
            if not are_alike(before, value):
                raise refused_storage(value, uses.line_of(value))
            self.rebind(before, value)
        stay = set(map(id, owned))
        for tensor in tensors:
            for place, value in tensor.changes(assigned, uses):
                if place.aspect is not Aspect.DATA or id(tensor.traced) not in stay:
                    yield place, value

    def written(self, results: list[Tensor]) -> list[Tensor]:
        """The results, and after them the values that ``.data =`` gave to parameters and buffers
        are in their memory. What was in it until then is a result's own."""
        memory = {storage_key(before) for before, _ in self._rebound}
        with torch.no_grad():
            results = [
                result.clone() if storage_key(result) in memory else result for result in results
            ]
            for before, now in self._rebound:
                before.copy_(now)
        return results

    def replace_states(
        self, kept: Sequence[Tensor], replaced: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """At the end, write state that an update rule keeps to its own memory. ``kept``: entries of
        the user's own that the step made. TR-125 for tensors of which one is in the memory of
        another, or of one that is there before: what is written to the one at a later call, the
        other would not have."""
        parameters = self._bindings.parameters.values()
        grads = [leaf.grad for leaf in parameters if leaf.grad is not None]
        own = {id(tensor) for tensor in (*parameters, *grads)}
        own |= {id(tensor.traced) for tensor in self.entries()}
        owners = dict.fromkeys((*map(storage_key, grads), *self._bindings.memory), 0)
        for tensor in kept:
            if id(tensor) in own:
                continue
            if owners.setdefault(storage_key(tensor), id(tensor)) != id(tensor):
                raise refused_state("keeps a view of another tensor in optimizer.state")
        for before, now in replaced:
            if owners.setdefault(storage_key(now), id(before)) != id(before):
                raise refused_state("keeps another tensor's memory as optimizer.state")
            self.rebind(before, now)

    def settle(self) -> None:
        """Called once the step is over: from now on ``find`` knows where a call finds the
        tensors."""
        before = self._recorder.assignments.before
        written = {storage_key(old) for old, _ in self._rebound}
        for parameter in self._request.parameters:
            traced = self._bindings.of(parameter)
            is_written = before(traced) is not None or storage_key(traced) in written
            find = functools.partial(itself, parameter)
            self._owned.add(find, traced, None if is_written else traced)
        for tensor in self.entries():
            was = before(tensor.traced)
            if tensor.memory not in written:
                self._owned.add(tensor.find, tensor.traced, tensor.traced if was is None else was)
            elif was is not None:
                self._owned.add(tensor.find, tensor.traced, None)
        for _, source in self._request.sources:
            if isinstance(source, State) and source.shards is None and source.blocks is None:
                traced = self._bindings.states[source.place]
                self._owned.add(functools.partial(source.read, [], self.pending), traced, traced)

    def find(self, leaf: Tensor) -> DeferredValue | None:
        """Where a tensor of the user's, or a view of one, is found at a call; ``None`` for what is
        of the step."""
        held = self._recorder.held.find(leaf)
        if held is not None:
            return DeferredValue(held.find)
        return self._owned.of(leaf) if is_traced(leaf) else None

    def read(self, walk: ReadsWalk, is_named_in_code: Callable[[str], bool]) -> None:
        """The properties of the tensors that the run read, besides their values.
        ``is_named_in_code``: whether it may have read an attribute of that name."""
        for tensor in self.entries():
            tensor.read(walk, self._recorder.tensors, is_named_in_code)
