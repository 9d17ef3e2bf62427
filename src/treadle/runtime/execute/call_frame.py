"""One call of an artifact: its inputs are bound, its steps run, its results are taken.

::

    begin     look at the inputs, bind those that moved; what comes before the artifact's own steps
    run       the actions, all at once or some of the steps
    results   views of the buffers that hold them, copied where those stay
    end       let go of all that is not there at the next call

Replays use the parts separately.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.bindings import Bindings, Live, shows_all, storage_of, view_of
from treadle.runtime.execute.bound_inputs import BoundInputs
from treadle.runtime.execute.incoming import Incoming
from treadle.runtime.execute.loops import Repeatable
from treadle.runtime.execute.prepare import Preparation
from treadle.runtime.execute.step_memory import StepMemory
from treadle.runtime.kernels.loader import Functions
from treadle.runtime.replay.unchanged_inputs import SteadyInputs, Vouched
from treadle.runtime.store.artifact import Artifact, BufferSpec, Storage, View
from treadle.util.memory import memory_start

FirstLaunches = Callable[[Sequence[Tensor]], None]
"""Launches, on the inputs of a call, the work that precedes the artifact's own steps."""
_NONE_BROUGHT: Mapping[int, Tensor] = {}


def nothing(*_: object) -> None:
    """For a caller that need not know when a call begins, or that launches nothing first."""


@final
@dataclass(frozen=True, slots=True)
class KeptCall:
    """What a call has made so far: a copy of its part of the arena, and ``copies`` of what it
    allocated."""

    block: Tensor | None
    alive: dict[str, Tensor]
    copies: list[Tensor]


@final
class CallFrame:
    """The tensors of the call that runs now, and what runs on them. Nothing in it refers back to
    it, so the arena goes with the last reference to a step."""

    def __init__(
        self,
        artifact: Artifact,
        functions: Functions,
        arena: Arena,
        *,
        programs: Mapping[str, Repeatable],
        generators: Sequence[torch.Generator],
        first: FirstLaunches = nothing,
        steady: SteadyInputs | None = None,
        moving: frozenset[int] = frozenset(),
    ) -> None:
        self._artifact = artifact
        self._functions = functions
        self._first = first
        self._bindings = Bindings(artifact.buffers, generators)
        self._live = Live(self._bindings, torch.device(artifact.device))
        self.memory = StepMemory(artifact, self._bindings, arena)
        self.inputs = BoundInputs(artifact, self._bindings, steady, moving)
        self._incoming = Incoming(artifact, self.inputs, self._live)
        preparation = Preparation(
            artifact, functions, programs, self._bindings, self._live, self._incoming
        )
        self.actions = preparation.actions()
        self._unfilled = preparation.unfilled()
        self._shown = _shown(artifact)

    def begin(
        self,
        inputs: Sequence[Tensor],
        brought: Mapping[int, Tensor] = _NONE_BROUGHT,
        *,
        starts: Callable[[], None] = nothing,
        vouched: Vouched = (),
    ) -> None:
        """Begin a call, up to its first step. ``starts`` is called once the inputs are found to
        fit; ``brought``: copies of the inputs on the host. TR-401 when an input is not what the
        step was compiled for."""
        self._incoming.brought = brought
        self.inputs.bind(inputs, vouched=vouched)
        starts()
        self.use_threads()
        self._allocate_unfilled()
        self._first(inputs)

    def begin_round(self, inputs: Sequence[Tensor], *, trusted: bool) -> None:
        """Begin one of several calls in a loop, between which only the inputs change."""
        self.inputs.bind(inputs, trusted=trusted)
        self._allocate_unfilled()

    def use_threads(self) -> None:
        """Use as many threads as PyTorch does."""
        if self._functions.set_threads is not None:
            self._functions.set_threads(torch.get_num_threads())

    def _allocate_unfilled(self) -> None:
        for spec in self._unfilled:
            self._live.allocate(spec)

    def results(self, first: int = 0, end: int | None = None) -> list[Tensor | None]:
        """The results, after the last step; or those before ``end``, after the last step that makes
        one of them. They belong to the caller: no later call changes them. Each is a separate
        object, also where two share memory (``loss.detach()``, twice)."""
        results: list[Tensor | None] = [None] * len(self._artifact.results)
        given: set[int] = set()
        tensors = self._live.tensors
        for shown in self._shown:
            at = shown.at
            if at >= first and (end is None or at < end):
                result = tensors[shown.name] if shown.as_it_is else self._view(shown)
                results[at] = result.detach() if id(result) in given else result
                given.add(id(result))
        return results[first:end]

    def bring_gradients(self, gradients: list[Tensor]) -> None:
        """Bind the gradients of the results, which the caller has by now. The list is emptied as
        they are read."""
        self._incoming.gradients = gradients

    def end(self) -> None:
        """End the call, after its results or after an error."""
        self._incoming.brought = _NONE_BROUGHT
        self._incoming.gradients = []
        self._live.release(tuple(self._live.tensors))
        self.inputs.clear()

    def let_go(self, names: Collection[str]) -> None:
        """Release inputs, and buffers that the call has allocated, that no later step touches."""
        self.inputs.let_go(names)
        self._live.release(tuple(name for name in self._live.tensors if name in names))

    def copied(self) -> "KeptCall":
        """A copy of everything that later steps may write to."""
        alive = self.alive()
        copies = [tensor.clone() for tensor in alive.values()]
        return KeptCall(self.memory.copied(), alive, copies)

    def restore(self, kept: "KeptCall") -> None:
        """Restore the state in which ``kept`` was copied."""
        self._live.release(tuple(self._live.tensors))
        self.memory.restore(kept.block)
        for tensor, copy in zip(kept.alive.values(), kept.copies, strict=True):
            tensor.data.copy_(copy)  # no write that autograd hears of
        self.define(kept.alive)

    def give_back(self) -> None:
        """Free all memory that stays between calls, including that of executables that share the
        arena; the next call allocates it again."""
        self.memory.give_back()
        self._forget()

    def leave(self) -> None:
        """Free the memory between calls that no executable sharing the arena needs."""
        self.memory.leave()
        self._forget()

    def _forget(self) -> None:
        self._bindings.drop()
        self.inputs.forget()

    def views(self) -> list[Tensor]:
        """The views through which it reads and writes the tensors that it is bound to."""
        return self._bindings.views()

    # For replays.

    def alive(self) -> dict[str, Tensor]:
        """The buffers that library calls have allocated so far and that are not released yet."""
        return dict(self._live.tensors)

    def define(self, buffers: Mapping[str, Tensor]) -> None:
        """Bind buffers that library calls allocate to these tensors."""
        for name, tensor in buffers.items():
            self._live.define(self._artifact.buffers[name], tensor)

    def bring(self, inputs: Sequence[Tensor], at: int) -> Tensor:
        """A copy on the device of input number ``at``, which is on the host."""
        return self._incoming.copy(inputs, at)

    def settle(self, *, failed: bool = False) -> list[Tensor]:
        """Fill the tables of addresses that recorded launches read, or forget them."""
        if failed:
            self._functions.tables.forget()
        return self._functions.tables.settle()

    def replayed_results(
        self,
        inputs: Sequence[Tensor],
        held: Mapping[str, Tensor],
        fresh: Mapping[str, Tensor] | None = None,
        *,
        first: int = 0,
        end: int | None = None,
    ) -> list[Tensor | None]:
        """Those from ``first`` on and before ``end``, copied out of what calls allocated when they
        were recorded; ``fresh``: what this call allocated."""
        self.inputs.tensors, self._live.tensors = inputs, {**held, **(fresh or {})}
        try:
            results = self.results(first, end)
        finally:
            self.inputs.tensors, self._live.tensors = (), {}
        for shown in self._shown:
            at = shown.at
            if at >= first and (end is None or at < end) and shown.name in held:
                result = results[at - first]
                results[at - first] = None if result is None else result.clone()
        return results

    def copied_out(
        self, results: Sequence[Tensor | None], held: Mapping[str, Tensor]
    ) -> list[Tensor | None]:
        """``results``, with copies in place of those in the memory of ``held``."""
        own = {memory_start(held_tensor) for held_tensor in held.values()}
        return [
            result.clone() if result is not None and memory_start(result) in own else result
            for result in results
        ]

    def _view(self, shown: "_Shown") -> Tensor:
        """A result that is not exactly one buffer of a library call."""
        spec = shown.spec
        match spec.place:
            case Storage.INPUT:
                base = self.inputs.tensors[shown.number]
            case Storage.CONSTANT:
                base = self.memory.constants[spec.name]
            case Storage.CALL:
                base = self._live.tensors[spec.name]
            case Storage.ARENA:
                base = self.memory.in_arena(spec)
        view = view_of(storage_of(base, spec), shown.view)
        return view.clone() if spec.place in (Storage.ARENA, Storage.CONSTANT) else view


@final
@dataclass(frozen=True, slots=True)
class _Shown:
    """The result ``at`` a place, a ``view`` of the buffer ``name``. ``as_it_is``: it is the very
    tensor that a call allocated and not a view, so autograd lets its owner write to it. ``number``:
    the number of the input that it shows, if it shows one."""

    at: int
    name: str
    view: View
    spec: BufferSpec
    as_it_is: bool
    number: int


def _shown(artifact: Artifact) -> list[_Shown]:
    """The results that are not ``None``."""
    numbers = {name: number for number, name in enumerate(artifact.inputs)}
    found: list[_Shown] = []
    for at, view in enumerate(artifact.results):
        if view is not None:
            name = view.buffer
            spec = artifact.buffers[name]
            whole = spec.place is Storage.CALL and shows_all(view, spec)
            number = numbers.get(name, -1)
            found.append(_Shown(at, name, view, spec, spec.unsized or whole, number))
    return found
