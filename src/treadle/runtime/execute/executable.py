"""Runs an artifact: tensors in, launches and library calls in order, tensors out.

Everything that does not change between calls is done once: the arena, the views into it, the
pointer arrays, the operators. A call checks the inputs, updates the places of those that moved,
and walks a flat list of actions.
"""

import ctypes
import functools
import itertools
import math
import operator
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import treadle.runtime.kernels.packed  # noqa: F401  # pyright: ignore[reportUnusedImport]
from treadle.compat.operators.operator_facts import Effect, facts_by_name
from treadle.compat.tensors import is_zerotensor
from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.bindings import (
    Bindings,
    Live,
    laid_out,
    same_strides,
    sizes_array,
    spec_bytes,
    storage_of,
    view_of,
    whole,
)
from treadle.runtime.execute.checks import check_layout, mismatch, wrong_count
from treadle.runtime.execute.functional import NAMESPACE, named
from treadle.runtime.execute.halves import widened
from treadle.runtime.execute.incoming import Incoming, imported
from treadle.runtime.execute.loops import Loop
from treadle.runtime.kernels.build import Build, build
from treadle.runtime.kernels.loader import DeviceFunction, Functions, Loader
from treadle.runtime.kernels.rng import FUNCTION, OPERATOR, drawer
from treadle.runtime.ranks.collectives import IN_FLIGHT
from treadle.runtime.replay.cuda_graph import CudaRecorder
from treadle.runtime.replay.recordings import Recorder, Replay, ReplayPolicy
from treadle.runtime.replay.unchanged_inputs import SteadyInputs, UntouchedTensors
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Launch, Storage, View
from treadle.targets.registry import target_for
from treadle.util.errors import GroupFailure, RuntimeFailure, require
from treadle.util.expected import NotExpected, require_expected

# defines operators, recurrent ones as well
from treadle.util.nested import leaves
from treadle.util.rounds import Function

__all__ = ["Build", "DeviceFunction", "Executable", "Loader", "build", "resolve"]


def _nothing(*_: object) -> None:
    """For a caller to whom it does not matter when a call begins, or who launches nothing first."""


_PYTHON = {"_operator": operator, "math": math, "torch": torch}
"""Modules whose functions compute sizes."""


class Executable:
    """A built artifact. Calls from several threads take turns.

    ``like``: an executable of the same sources for other sizes, whose code, arena and generators it
    shares. ``generators``: those of the user's that the artifact's calls draw from, by number.
    ``first``: launches what comes before the artifact's own steps, on the inputs of a call.
    ``policy``: with one, a step that is bound by launching is recorded by ``recorder`` (on a GPU
    CUDA's) and replayed. ``space``: what it takes turns in with others, for its temporaries.
    """

    def __init__(
        self,
        artifact: Artifact,
        build: Build,
        *,
        like: "Executable | None" = None,
        generators: Sequence[torch.Generator] = (),
        first: Callable[[Sequence[Tensor]], None] = _nothing,
        policy: ReplayPolicy | None = None,
        recorder: Recorder | None = None,
        space: Arena | None = None,
    ) -> None:
        self.artifact = artifact
        self.device = torch.device(artifact.device)
        self.target = target_for(self.device)
        self._functions: Functions = (
            build.load(artifact.sources) if like is None else like._functions
        )
        self._bodies: Mapping[str, Executable] = {} if like is None else like._bodies
        if like is None and artifact.bodies:
            turns = Arena(grows_only=True)
            self._bodies = {
                name: Executable(body, build, space=turns) for name, body in artifact.bodies.items()
            }
        self._first = first
        self._space = (space or Arena()) if like is None else like._space
        self._space.join(self)
        self._lock = self._space.lock
        self.generators = generators if like is None else like.generators
        self._bindings = Bindings(artifact.buffers, self.generators)
        self._specs = tuple(artifact.buffers[name] for name in artifact.inputs)
        self._addresses = [-1] * len(self._specs)  # of the last call
        self._kept = [False] * len(self._specs)  # are views of the input bound?
        self._arena: Tensor | None = None
        self._constants: dict[str, Tensor] = {}
        self._live = Live(self._bindings, self.device)
        self._bound: Sequence[Tensor] = ()  # inputs, this call only
        self._actions: list[Callable[[], object]] = []
        self._owners: list[int] = []
        self._given_away = _given_away(artifact)
        places = artifact.buffers.items()
        self._in_block = [name for name, spec in places if spec.place is Storage.ARENA]
        self._keep: list[Any] = []  # C arrays whose addresses the actions hold
        self._empty: list[BufferSpec] = []  # without elements, so that no step fills them
        self._imports: dict[int, tuple[str, bool]] = {}
        self._brought: Mapping[int, Tensor] = {}
        self._incoming = Incoming(self.device)
        self._steady: SteadyInputs | None = None
        if policy is not None and policy.layouts is not None:
            self._steady = SteadyInputs(len(self._specs), policy.moving, policy.layouts)
        self._prepare()
        if recorder is None and policy is not None and not self.target.on_host:
            recorder = CudaRecorder(self.device, policy.clear)
        self.replay: Replay | None = None
        if policy is not None and recorder is not None and not self.generators:
            self.replay = Replay(artifact, weakref.proxy(self), recorder, policy)

    def run(
        self,
        inputs: Sequence[Tensor],
        seconds: list[float] | None = None,
        begins: Callable[[], None] = _nothing,
    ) -> list[Tensor | None]:
        """One call. The result tensors are the caller's: no later call changes them.

        ``seconds``: if given, one entry per step of the artifact, to which its time is added; each
        step is waited for. ``begins`` is called once the inputs are found to fit.
        ``RuntimeFailure`` TR-401 when an input is not what the step was compiled for; TR-403,
        naming the step's origin, when a step fails.
        """

        def starts() -> None:
            begins()
            self._allocate()  # after what that frees

        with self._lock, torch.no_grad(), self._plain():
            if seconds is None and self.replay is not None:
                results = self.replay.run(inputs, starts)
                if results is not None:
                    return results
            try:
                self._bind_inputs(inputs)
                starts()
                if self._functions.set_threads is not None:
                    self._functions.set_threads(torch.get_num_threads())
                for spec in self._empty:
                    self._live.allocate(spec)
                self._first(inputs)
                if seconds is None and self.replay is not None:
                    self.replay.watch(self._perform)
                else:
                    self._perform(seconds)
                return [self._result(view) for view in self.artifact.results]
            finally:
                self._clear()

    @contextmanager
    def repeated(self) -> Generator[Function]:
        """Calls one after another, of a loop that does nothing else meanwhile: what does not change
        between them is done once. The arena is there until the last one is over."""
        with self._lock, torch.no_grad(), self._plain():
            self._allocate()
            if self._functions.set_threads is not None:
                self._functions.set_threads(torch.get_num_threads())
            self._steady = SteadyInputs(len(self._specs), frozenset(), UntouchedTensors)
            rounds = itertools.count()
            try:
                yield lambda inputs: self._once(inputs, trusted=next(rounds) > 0)
            finally:
                self._steady = None
                self._give_back()

    def _once(self, inputs: Sequence[Tensor], *, trusted: bool) -> list[Tensor]:
        """One of these calls: what it is given after the first, programs of the loop made."""
        try:
            self._bind_inputs(inputs, trusted=trusted)
            for spec in self._empty:
                self._live.allocate(spec)
            self._perform()
            found = [self._result(view) for view in self.artifact.results]
            return [each for each in found if each is not None]
        finally:
            self._clear()

    def name_steps(self, names: Sequence[str]) -> None:
        """From now on profiles show each step of the artifact inside a range of this name; empty
        ones get none."""
        owners = zip(self._actions, self._owners, strict=True)
        self._actions = [
            _Named(action, names[owner]) if names[owner] else action for action, owner in owners
        ]

    def held(self) -> list[Tensor]:
        """What stays allocated between calls: the arena and the constants."""
        block = self._space.bytes
        return [*([] if block is None else [block]), *self._constants.values()]

    def views(self) -> list[Tensor]:
        """The tensors of its own through which it reads and writes what it is bound to."""
        return self._bindings.views()

    @property
    def promised_bytes(self) -> int:
        """The largest peak of all that take turns in its arena."""
        return self._space.promised_bytes

    def takes_turns_with(self, other: "Executable") -> bool:
        """Whether the temporaries of both lie in the same arena."""
        return self._space is other._space

    def leave_arena(self) -> None:
        """Forget the block, so that nothing here keeps its memory."""
        if self._arena is not None:
            self._arena = None
            for name in self._in_block:
                self._bindings.uses[name].drop()

    def release(self) -> None:
        """Give the arena back, which those it takes turns with lose as well; the next call
        allocates it again."""
        with self._lock:
            if self.replay is not None:
                self.replay.drop()
            self._give_back()

    def _give_back(self) -> None:
        self._space.give_back()
        self._constants = {}
        for uses in self._bindings.uses.values():
            uses.drop()
        self._addresses = [-1] * len(self._specs)
        self._kept = [False] * len(self._specs)
        if self._steady is not None:
            self._steady.drop()

    # For replays; see ``Recordable``.

    def launch(self, inputs: Sequence[Tensor], imported: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Everything on ``inputs``; gives the results that calls allocated."""
        self._brought = imported
        try:
            self._bind_inputs(inputs)
            for spec in self._empty:
                self._live.allocate(spec)
            self._first(inputs)
            self._perform()
            return dict(self._live.tensors)
        finally:
            self._brought = {}
            self._clear()

    def begin(self, inputs: Sequence[Tensor], imported: Mapping[int, Tensor]) -> None:
        """Bind the inputs of a call that runs in parts."""
        self._brought = imported
        self._bind_inputs(inputs)
        if self._functions.set_threads is not None:
            self._functions.set_threads(torch.get_num_threads())
        for spec in self._empty:
            self._live.allocate(spec)
        self._first(inputs)

    def perform(self, steps: Sequence[int]) -> None:
        """Some steps of that call."""
        for step in steps:
            first = bisect_left(self._owners, step)
            for position in range(first, bisect_right(self._owners, step)):
                try:
                    self._actions[position]()
                except NotExpected:
                    IN_FLIGHT.finish()
                    raise
                except Exception as error:
                    raise self._ended(position, error) from error

    def alive(self) -> dict[str, Tensor]:
        """The buffers that calls have allocated by now, and not given back."""
        return dict(self._live.tensors)

    def define(self, buffers: Mapping[str, Tensor]) -> None:
        """From now on these are buffers that calls allocate."""
        for name, tensor in buffers.items():
            self._live.define(self.artifact.buffers[name], tensor)

    def end(self) -> None:
        """After the last step, and after an error."""
        self._brought = {}
        self._clear()

    def bring(self, inputs: Sequence[Tensor], at: int) -> Tensor:
        """A copy on the device of the input on the host that is number ``at``."""
        name, may_wait = self._imports[at]
        return self._incoming.copy(inputs[at], self.artifact.buffers[name], may_wait=may_wait)

    def settle(self, *, failed: bool = False) -> list[Tensor]:
        """Fill the tables of addresses that recorded launches read, or forget them."""
        if failed:
            self._functions.tables.forget()
        return self._functions.tables.settle()

    def results(
        self,
        inputs: Sequence[Tensor],
        held: Mapping[str, Tensor],
        fresh: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor | None]:
        """The results of a replay, copied out of what calls allocated when it was recorded;
        ``fresh``: what this call allocated."""
        self._bound, self._live.tensors = inputs, {**held, **(fresh or {})}
        try:
            found = [self._result(view) for view in self.artifact.results]
            own = {_storage(each) for each in held.values()}
            return [
                each.clone() if each is not None and _storage(each) in own else each
                for each in found
            ]
        finally:
            self._bound, self._live.tensors = (), {}

    # Preparation, once.

    def _prepare(self) -> None:
        filled: set[str] = set()
        kept = {view.buffer for view in self.artifact.results if view is not None}
        releases = self.artifact.releases or ((),) * len(self.artifact.steps)
        for index, step in enumerate(self.artifact.steps):
            launch = isinstance(step, Launch)
            actions = self._launch(step, filled) if launch else self._call(step, filled)
            brought = imported(self.artifact, step)
            if brought is not None:
                at, name, may_wait = brought
                self._imports[at] = name, may_wait
                actions = [functools.partial(Executable._import, weakref.proxy(self), at)]
            dead = tuple(name for name in releases[index] if name not in kept)
            if dead:
                actions.append(functools.partial(self._live.release, dead))
            self._actions += actions
            self._owners += [index] * len(actions)
        specs = self.artifact.buffers.values()
        ours = [spec for spec in specs if spec.place is Storage.CALL and 0 in spec.shape]
        self._empty = [spec for spec in ours if spec.name not in filled]

    def _launch(self, step: Launch, filled: set[str]) -> list[Callable[[], Any]]:
        actions = self._fresh([name for row in step.buffers for name in row], filled)
        native = self._functions.native.get(step.function)
        if native is not None:
            arrays = self._bindings.pointers(step.buffers), sizes_array(step.sizes)
            self._keep += arrays
            addresses = [ctypes.addressof(array) for array in arrays]
            return [*actions, functools.partial(native, *addresses, len(step.buffers))]
        function = self._functions.device.get(step.function)
        if function is None:
            raise RuntimeFailure(f"no source defines {step.function}", code="TR-402")
        storages = self._bindings.storages(step.buffers)
        return [*actions, function(storages, step.sizes)]

    def _call(self, step: CallStep, filled: set[str]) -> list[Callable[[], Any]]:
        args: list[Any] = [None] * len(step.args)
        kwargs: dict[str, Any] = {}
        for position, value in enumerate(step.args):
            self._bindings.argument(value, args, position)
        for name, value in step.kwargs.items():
            self._bindings.argument(value, kwargs, name)
        name = step.outputs[0] if step.out and step.outputs else None
        if name is not None:
            actions = self._fresh([name], filled)
            target = step.into or whole(self.artifact.buffers[name])
            self._bindings.argument(target, kwargs, "out")
            return [*actions, _CallInto(self._operator(step.out), args, kwargs, target)]
        filled.update(output for output in step.outputs if output is not None)
        specs = tuple(self.artifact.buffers[o] if o is not None else None for o in step.outputs)
        if is_condition(step):
            return [functools.partial(_look, args)]
        op = Loop(step.bodies, self._bodies) if step.bodies else widened(step.op, resolve(step.op))
        return [_CallAllocating(op, args, kwargs, specs, self._live.define)]

    def _import(self, at: int) -> None:
        spec = self.artifact.buffers[self._imports[at][0]]
        place = self._brought.get(at)
        self._live.define(spec, self.bring(self._bound, at) if place is None else place)

    def _operator(self, name: str) -> Any:
        """PyTorch's operator, or our own on top of a function of the artifact."""
        return drawer(self._functions.native[FUNCTION]) if name == OPERATOR else resolve(name)

    def _fresh(self, names: Sequence[str], filled: set[str]) -> list[Callable[[], Any]]:
        """Actions that allocate the buffers of ``Storage.CALL`` that no step has filled yet."""
        specs = [self.artifact.buffers[name] for name in dict.fromkeys(names)]
        new = [s for s in specs if s.place is Storage.CALL and s.name not in filled]
        filled.update(spec.name for spec in new)
        return [functools.partial(self._live.allocate, spec) for spec in new]

    # One call.

    def _plain(self) -> Any:
        """Casts are steps of the artifact already, so a surrounding autocast must not add any."""
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        return torch.autocast(kind, enabled=False) if on else nullcontext()

    def _allocate(self) -> None:
        buffers = self.artifact.buffers
        block = self._space.get(self, self.device)
        if self._arena is not block:
            self._arena = block
            for name in self._in_block:
                self._bindings.uses[name].bind(self._in_arena(buffers[name]), buffers[name])
        if len(self._constants) < len(self.artifact.constants):
            for name, values in self.artifact.constants.items():
                spec = buffers[name]
                here = values if spec.device else values.to(self.device)
                fits = same_strides(here, spec)
                self._constants[name] = here if fits else laid_out(here, spec)
                self._bindings.uses[name].bind(self._constants[name], spec)

    def _in_arena(self, spec: BufferSpec) -> Tensor:
        assert self._arena is not None
        raw = self._arena[spec.offset : spec.offset + spec_bytes(spec)]
        return view_of(raw.view(spec.dtype), whole(spec))

    def _bind_inputs(self, inputs: Sequence[Tensor], *, trusted: bool = False) -> None:
        """``trusted``: all of them have the types that they should have."""
        if len(inputs) != len(self._specs):
            raise wrong_count(len(inputs), len(self._specs))
        self._bound = inputs
        addresses = self._addresses
        steady = self._steady
        for index in range(len(inputs)) if steady is None else steady.others(inputs):
            tensor, spec = inputs[index], self._specs[index]
            if not trusted:
                dense = tensor.layout is torch.strided
                if not dense or tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                    raise mismatch(tensor, spec)
            address = tensor.data_ptr()
            if address == addresses[index] and self._kept[index]:
                if tensor.stride() != spec.strides and not same_strides(tensor, spec):
                    raise mismatch(tensor, spec)
                continue
            if not trusted:
                check_layout(tensor, spec, self.device)
            # Views stay bound from the second call at one address on: parameters and state
            # stay in place, and a batch that moves is not kept alive between calls.
            self._kept[index] = address == addresses[index]
            addresses[index] = address
            self._bindings.uses[spec.name].bind(tensor, spec)
        if steady is not None:
            steady.learn(inputs, self._kept)

    def _perform(self, seconds: list[float] | None = None) -> None:
        position = 0
        try:
            if seconds is None:
                for position, action in enumerate(self._actions):  # noqa: B007
                    action()
            else:
                for position, action in enumerate(self._actions):
                    start = self._now()
                    action()
                    seconds[self._owners[position]] += self._now() - start
        except NotExpected:
            IN_FLIGHT.finish()
            raise
        except Exception as error:
            raise self._ended(position, error) from error

    def _ended(self, position: int, error: Exception) -> RuntimeFailure | NotExpected:
        """What is raised of an error: the call may be made again, or no rank goes on after it."""
        failure = self._failure(position, error)
        if isinstance(failure, NotExpected):
            IN_FLIGHT.finish()
        else:
            IN_FLIGHT.abandon()
        return failure

    def _failure(self, position: int, error: Exception) -> RuntimeFailure | NotExpected:
        number = self._owners[position]
        step = self.artifact.steps[number]
        if isinstance(error, GroupFailure):
            return error.at(step.origin)
        ours = isinstance(error, RuntimeFailure)
        checked = not ours and not isinstance(error, torch.OutOfMemoryError)
        is_torchs = isinstance(step, CallStep) and not step.bodies
        if number < self.artifact.untouched and is_torchs and checked:
            return NotExpected(str(error))  # nothing has happened yet: eager meets it as well
        name = step.function if isinstance(step, Launch) else step.op
        said, remedy = (error.message, error.remedy) if ours else (str(error), "")
        return RuntimeFailure(
            f"{name} failed: {said}", code="TR-403", where=step.origin, remedy=remedy
        )

    def _now(self) -> float:
        self.target.driver.synchronize(self.device)
        return time.perf_counter()

    def _clear(self) -> None:
        self._live.release(tuple(self._live.tensors))
        for spec, kept in zip(self._specs, self._kept, strict=True):
            if not kept:
                self._bindings.uses[spec.name].drop()
        self._bound = ()

    def _result(self, view: View | None) -> Tensor | None:
        if view is None:
            return None
        if view.buffer in self._given_away:
            return self._live.tensors[view.buffer]
        spec = self.artifact.buffers[view.buffer]
        match spec.place:
            case Storage.INPUT:
                base = self._bound[self.artifact.inputs.index(view.buffer)]
            case Storage.CONSTANT:
                base = self._constants[view.buffer]
            case Storage.CALL:
                base = self._live.tensors[view.buffer]
            case Storage.ARENA:
                base = self._in_arena(spec)
        if spec.place is Storage.CALL and view == whole(spec):
            return base
        shown = view_of(storage_of(base, spec), view)
        return shown.clone() if spec.place in (Storage.ARENA, Storage.CONSTANT) else shown


def _given_away(artifact: Artifact) -> frozenset[str]:
    """The buffers that are results as they are, and no views: autograd lets their owner write to
    them."""
    views: dict[str, list[View]] = {}
    for view in artifact.results:
        if view is not None:
            views.setdefault(view.buffer, []).append(view)
    found: set[str] = set()
    for name, shown in views.items():
        spec = artifact.buffers[name]
        all_of_it = all(view == whole(spec) for view in shown)
        if spec.unsized or (spec.place is Storage.CALL and all_of_it):
            found.add(name)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Named:
    """An action inside a range that profiles show."""

    action: Callable[[], object]
    name: str

    def __call__(self) -> None:
        with torch.profiler.record_function(self.name):
            self.action()


def _look(args: list[Any]) -> None:
    require_expected(*args)


class _CallInto:
    """A library call that writes the buffer it is given."""

    __slots__ = ("args", "checked", "kwargs", "op", "target")

    def __init__(
        self, op: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], target: View
    ) -> None:
        self.op, self.args, self.kwargs, self.target = op, args, kwargs, target
        self.checked = False

    def __call__(self) -> None:
        if self.checked:
            self.op(*self.args, **self.kwargs)
            return
        out, target = self.kwargs["out"], self.target
        address = out.data_ptr()
        self.op(*self.args, **self.kwargs)
        # An out-variant silently resizes a result of another shape: it would leave the buffer.
        same = out.shape == target.shape and out.stride() == target.strides
        if not same or out.data_ptr() != address:
            raise RuntimeFailure(
                f"it gave {tuple(out.shape)}, and {target.buffer} has {target.shape}",
                code="TR-403",
            )
        self.checked = True


class _CallAllocating:
    """A library call whose results PyTorch allocates."""

    __slots__ = ("aliased", "args", "define", "kwargs", "op", "places", "specs")

    def __init__(
        self,
        op: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        specs: tuple[BufferSpec | None, ...],
        define: Callable[[BufferSpec, Tensor], None],
    ) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.specs, self.define = specs, define
        self.aliased: tuple[bool, ...] | None = None
        self.places: list[tuple[Any, Any]] | None = None  # where tensors are among the arguments

    def __call__(self) -> None:
        result = self.op(*self.args, **self.kwargs)
        if not self.specs:
            return
        results = result if isinstance(result, tuple | list) else (result,)
        if self.aliased is None:
            self.aliased = self._inspect(results)
        for spec, tensor, aliased in zip(self.specs, results, self.aliased, strict=False):
            if spec is None:
                continue
            if spec.unsized:
                self.define(spec, self._own(tensor))
                continue
            if aliased or not same_strides(tensor, spec):
                tensor = laid_out(tensor, spec)
            self.define(spec, tensor)

    def _own(self, value: object) -> Any:
        """A tensor that shares no storage with an argument, whose bytes may be given away."""
        if not isinstance(value, Tensor):
            return value
        if self.places is None:
            self.places = [*_tensor_places(self.args), *_tensor_places(self.kwargs)]
        memory = _storage(value)
        shared = memory and any(_storage(held[key]) == memory for held, key in self.places)
        return value.clone() if shared else value

    def _inspect(self, results: Sequence[object]) -> tuple[bool, ...]:
        """Which results must be copied: those that share the storage of an argument, or have none,
        or are floats of another precision than PyTorch says.

        An argument's bytes may be given to another buffer, or written, while the result lives.
        """
        taken = {_storage(t) for t in _tensors(self.args, self.kwargs)} - {0}
        for spec, tensor in zip(self.specs, results, strict=False):
            if spec is None or spec.unsized:
                continue
            if not isinstance(tensor, Tensor):
                raise RuntimeFailure(f"it gave no tensor for {spec.name}", code="TR-403")
            floats = tensor.is_floating_point() and spec.dtype.is_floating_point
            if tensor.shape != spec.shape or not (tensor.dtype is spec.dtype or floats):
                raise RuntimeFailure(
                    f"it gave {tensor.dtype} {tuple(tensor.shape)}, and {spec.name} is "
                    f"{spec.dtype} {spec.shape}",
                    code="TR-403",
                )
        if len(results) < len(self.specs):
            raise RuntimeFailure(f"it gave {len(results)} results", code="TR-403")
        specs = (*self.specs, *[None] * (len(results) - len(self.specs)))
        return tuple(
            isinstance(t, Tensor)
            and (_needs_copy(t, taken) or (spec is not None and t.dtype is not spec.dtype))
            for t, spec in zip(results, specs, strict=True)
        )


def _needs_copy(tensor: Tensor, taken: set[int]) -> bool:
    """Whether its bytes are those of others, or nobody's: zeros that have no memory."""
    return is_zerotensor(tensor) or _storage(tensor) in taken


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensor_places(held: list[Any] | dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The places of tensors in lists that are filled in at every call: ``held[key]``."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(value, Tensor):
            yield held, key
        elif isinstance(value, list):
            yield from _tensor_places(cast("list[Any]", value))


def _tensors(*given: object) -> list[Tensor]:
    return [each for each in leaves(given) if isinstance(each, Tensor)]


def is_condition(step: Launch | CallStep) -> bool:
    """Whether the step looks at what the artifact takes for granted."""
    return isinstance(step, CallStep) and Effect.CONDITION in facts_by_name(step.op).effects


@functools.cache
def resolve(name: str) -> Any:
    """``"aten.mm.out"`` -> the operator."""
    if name.startswith(f"{NAMESPACE}."):
        return named(name.split(".")[1])
    found: object = torch.ops
    if name.startswith("python."):
        _, module, name = name.split(".")
        require(module in _PYTHON, RuntimeFailure(f"{name} is no operator", code="TR-402"))
        found = _PYTHON[module]
    try:
        for part in name.split("."):
            found = getattr(found, part)  # the way to an operator whose name is data
    except AttributeError as error:
        raise RuntimeFailure(
            f"this PyTorch ({torch.__version__}) has no operator {name}",
            code="TR-402",
            remedy="compile the step again with this version of PyTorch",
        ) from error
    return found
