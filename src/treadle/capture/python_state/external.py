"""What a captured run reads and changes outside the step's function: everything is restored, and
the changes are repeated at every call.

There is no list of kinds. Everything reachable from the step's function, models, optimizers and
arguments, and from the globals that entered code names, is copied shallowly before that code runs;
afterwards every difference is a change. Objects that are not reachable from there were created by
the run. For objects of Python classes, the attributes that are read are recorded.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import get_ident  # of the module itself, reading is noted
from types import CodeType
from typing import ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.integrations.registry import table_of
from treadle.capture.python_state.changes import Change, are_equal
from treadle.capture.python_state.code.frames import (
    CodeOwner,
    ExecutionRecord,
    FrameRecorder,
)
from treadle.capture.python_state.containers.container_changes import ChangedContainer
from treadle.capture.python_state.external_state.kept_state import KeptState
from treadle.capture.python_state.external_state.left_objects import LeftObjects
from treadle.capture.python_state.external_state.reachable import ReachableObjects
from treadle.capture.python_state.ownership import SHARED_KINDS, is_machinery, owner_of
from treadle.capture.python_state.parts import Attributes, Reading
from treadle.capture.python_state.reads.object_graph import ObjectReads
from treadle.capture.python_state.reads.read_names import ReadNames
from treadle.capture.python_state.reads.roots import Globals, ReadRoots
from treadle.capture.python_state.system import asks
from treadle.capture.python_state.threads import Threads
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.numbers import as_key
from treadle.capture.tensors.rng_guard import PythonRngGuard
from treadle.compat.hooks import tensor_hooks
from treadle.compat.operators.operator_facts import facts_of, is_profiler_mark
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import dispatch_of_trace
from treadle.util.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")
_PROCESS_STATE = table_of(lambda integration: integration.process_state)


def process_questions(names: Container[str] | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """The questions that code which mentions ``names`` may have asked the process, by label;
    ``None``: all questions."""
    states = _PROCESS_STATE.items()
    return ((x.label, x.read) for name, x in states if names is None or name in names)


@final
class ExternalState:
    """Everything that a step's function reaches, from before it runs."""

    def __init__(
        self,
        function: Callable[..., object],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        arguments: Iterable[object] = (),
        seen: Callable[[object], None] = lambda _: None,
        *,
        draws: HostDraws,
    ) -> None:
        """``arguments``: leaves of the step's arguments; objects among them are tracked as well.
        ``seen`` is called with each object that the step can reach, before it can be changed."""
        self._function, self._models, self._optimizers = function, models, optimizers
        self._threads, self._rng, self._executed = Threads(), PythonRngGuard(), ExecutionRecord()
        self.draws = draws
        draws.begins, draws.drawn = self._rng.begins, self._rng.drawn
        self._kept = KeptState(self._executed, models.values())
        self._reach = ReachableObjects(
            self._executed,
            self._kept,
            self._rng,
            seen,
            lambda frame: self._frames.is_importing(frame),
        )
        self._watch, self._reflection = self._reach.watch, self._reach.reflection
        self._frames = FrameRecorder(
            self._executed, self._reach.enters, self._threads, self._reflection
        )
        self._watch.pause, self._watch.resume = self._frames.pause, self._frames.resume
        self.left = LeftObjects(self._kept.objects)
        try:
            for kind in SHARED_KINDS:
                self._watch.watch_class(kind)
            self._meet_all(arguments)
        except BaseException:
            self._watch.stop()
            raise

    def _meet_all(self, arguments: Iterable[object]) -> None:
        """Meet everything that a step starts from."""
        for prefix, model in self._models.items():
            self._reach.meet(model, prefix)
            for name, module in model.named_modules():
                self._reach.meet(module, f"{prefix}.{name}".strip("."))
        for prefix, optimizer in self._optimizers.items():
            self._reach.meet(optimizer, prefix or "optimizer")
        self._reach.meet(self._function, "")
        for argument in arguments:
            self._reach.meet(argument, type(argument).__name__)
        for model in self._models.values():
            for name, parameter in model.named_parameters():
                for hook in tensor_hooks(parameter):
                    self._reach.meet(hook, name)

    @contextlib.contextmanager
    def watching(self, traced: Sequence[Tensor]) -> Iterator[None]:
        """Inside, note what is read; afterwards everything is restored. ``traced``: tensors of the
        trace."""
        owner, method = dispatch_of_trace()
        dispatch = vars(owner)[method]
        setattr(owner, method, self._pausing(dispatch))
        try:
            with self._reflection.hearing(), self._frames, self._threads.watching(traced):
                self._watch.runs = True
                yield
        finally:
            self._watch.runs = False
            setattr(owner, method, dispatch)
            self._watch.stop()
            self._rng.restore()
            self._kept.restore()

    def _pausing(self, dispatch: Callable[..., object]) -> Callable[..., object]:
        """Stop recording frames within operations other than the user's own."""
        paused = self.unseen(dispatch)

        def call(mode: object, op: object, *rest: object, **named: object) -> object:
            self._threads.follow()
            whole = isinstance(op, OpOverload) and _may_run_their_code(op)
            before, self._watch.inside = self._watch.inside, 0 if whole else get_ident()
            try:
                return (dispatch if whole else paused)(mode, op, *rest, **named)
            finally:
                self._watch.inside = before

        return call

    def unseen(self, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, which runs only our code, without recording its frames."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not self._frames.pause():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                self._frames.resume()

        return call

    def pause(self) -> bool:
        """Stop recording until ``resume``, while only our code runs. ``resume`` must be called if
        this returns true."""
        self._threads.follow()
        return self._frames.pause()

    def resume(self) -> None:
        """Record again, because the user's code may run."""
        self._frames.resume()

    def listen(self) -> None:
        """Record this thread as well, one of the autograd engine's."""
        self._frames.listen()

    # -- what it changed

    def changes(self) -> list[Change]:
        """Places whose values the run changed.

        ``CaptureError`` TR-117 to TR-119 for what cannot be made again at every call, TR-123 for
        what the operating system was asked.
        """
        self._rest()
        self._rng.refuse(decides=self.draws.refuses(), where=self.draws.refused_line())
        if self._executed.resumed:
            raise CaptureError(
                f"the step takes the next value of {self._executed.resumed}, a generator that "
                "was created before the step",
                code="TR-117",
                where=self._executed.resumed_at,
                remedy="take the value outside the step, and pass it as an argument",
            )
        if self._frames.asked is not None:
            raise asks(*self._frames.asked)
        changes = map(_of_real_name, self._kept.changes())
        changed = [change for change in changes if not are_equal(change.before, change.now)]
        return changed + self._kept.set_unread(self._watch.written, changed)

    def changed_containers(self) -> list[ChangedContainer]:
        """Containers whose number of entries the run changed and that can have stand-ins, because
        all their places can be set."""
        self._rest()
        return self._kept.changed_containers()

    def unread_modes(self) -> frozenset[int]:
        """The modules, by their numbers among all modules of the models, for which train and eval
        mode are the same."""
        modules = [module for model in self._models.values() for module in model.modules()]
        executed = self._executed
        if executed.past or "training" in executed.past_names:
            return frozenset()
        return frozenset(
            at
            for at, module in enumerate(modules)
            if "training" in vars(module) and self._watch.is_unread(module, "training")
        )

    def _rest(self) -> None:
        """The step's own code has run."""
        self._watch.runs = False
        self._frames.rest()

    def met(self) -> Iterable[object]:
        """Every object that the step can reach, as far as it has run."""
        return self._kept.objects.values()

    def knows(self, value: object) -> bool:
        """Whether an object existed before the run, as far as the step can reach it."""
        return id(value) in self._kept.objects

    def was_read(self, change: Change) -> bool:
        """Whether the run may have read the earlier value."""
        if change.part.entries:
            return True
        read = self._watch.read.get(id(change.owner))
        if read is not None and isinstance(change.part, Attributes):
            return change.name in read
        return True

    # -- what it read

    @property
    def asks_types(self) -> bool:
        """Whether ``type`` may have been asked of a number that stands in for another."""
        return self._executed.asks_types

    @property
    def calls_type(self) -> Iterable[tuple[CodeType, ...]]:
        """Code that may have asked a traced tensor for its type, with that of the frames around."""
        return self._executed.calls_type.values()

    def is_named_in_code(self, name: str) -> bool:
        """Whether code of the user's or of what they installed names ``name``."""
        return self._executed.any_name or name in self._executed.theirs

    def names(
        self,
        ours: Callable[[object], bool],
        entries: Mapping[int, frozenset[object] | None],
        free: Iterable[tuple[int, object]],
        unordered: Iterable[int],
    ) -> ReadNames:
        """The attributes of objects that count. ``entries``: the entries that the step read of
        containers that it changes, by their ids. ``free``: values on which nothing depended, or
        that are inputs at run time, by the id of a container and a name. ``unordered``: ids of
        dicts whose order does not count."""
        executed = self._executed
        mentioned = None if executed.any_name else frozenset(executed.names)
        names = {} if executed.past else self._watch.read
        whole = self._watch.everything | executed.whole.keys()
        free_names: dict[int, set[object]] = {}
        for key, name in free:
            free_names.setdefault(key, set()).add(name)
        any_order = frozenset(unordered)

        def of(value: object) -> ObjectReads:
            key = id(value)
            read = names.get(key)
            return ObjectReads(
                None if read is None else frozenset(read | executed.past_names),
                key in whole,
                entries.get(key),
                key not in any_order,
                frozenset(free_names.get(key, ())),
            )

        return ReadNames(
            of=of,
            whole_kinds=self._watch.whole_kinds
            | {type(owner) for owner in executed.whole.values()},
            mentioned=mentioned,
            of_library=frozenset(executed.names),
            ours=lambda value: ours(value) or is_machinery(value),
            owner=owner_of,
        )

    def roots(self) -> ReadRoots:
        """All that a later call can start from."""
        executed = self._executed
        spaces = tuple(
            Globals(
                space, frozenset(names), key in executed.whole_spaces, owner >= CodeOwner.INSTALLED
            )
            for key, (space, names, owner) in executed.spaces.items()
        )
        seeds = self._kept.objects.values() if "initial_seed" in executed.names else ()
        return ReadRoots(
            globals=spaces,
            process=dict(process_questions(executed.names)),
            theirs=frozenset(executed.theirs),
            seeds=tuple(seed for seed in seeds if isinstance(seed, torch.Generator)),
            shared=dict(self._watch.shared),
            modules=frozenset(executed.modules),
        )

    def draws_otherwise(self) -> bool:
        """Whether Python's or NumPy's generators were used otherwise than by known draws."""
        return self._rng.is_used_otherwise()

    def executed_codes(self) -> list[CodeType]:
        """Code of users and of what they installed that the run executed."""
        return list(self._executed.their_codes.values())

    def before(self, owner: object, at: int) -> Reading | None:
        """The contents of a part of an object before the run."""
        return self._kept.before(owner, at)


def _may_run_their_code(op: OpOverload) -> bool:
    """Whether the user's code, or that of what they installed, may run within the operation."""
    return facts_of(op).is_unknown and not is_profiler_mark(op)


def _of_real_name(change: Change) -> Change:
    """The key itself, since a stand-in for it would be no key at a call."""
    name = as_key(change.name)
    return change if name is change.name else replace(change, name=name)
