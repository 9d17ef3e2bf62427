"""What a captured run reads and changes outside of the step's function: everything is put back, and
the changes are made again at every call.

Nothing is listed by kind. What can be got from the step's function, models, optimizers and
arguments, and from the globals that entered code names, is copied shallowly before that code runs;
afterwards every difference is a change. What cannot be got from there was made by the run. Of
objects whose class was made by Python code it is watched which attributes are read.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import get_ident  # of the module itself, reading is noted
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import ParamSpec, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.integrations.registry import all_of, table_of
from treadle.capture.python_state.attribute_watch import WATCHED, AttributeWatch
from treadle.capture.python_state.changes import Change, Kept, are_equal, is_cache, is_log, refused
from treadle.capture.python_state.code.code_references import references_in
from treadle.capture.python_state.code.frames import (
    CodeOwner,
    ExecutionRecord,
    FrameRecorder,
    code_owner,
)
from treadle.capture.python_state.code.reflection import Reflection
from treadle.capture.python_state.containers.container_changes import ChangedContainer
from treadle.capture.python_state.containers.container_recorders import RECORDED, Contents
from treadle.capture.python_state.containers.made_objects import (
    MadeObject,
    objects_inside,
    values_inside,
)
from treadle.capture.python_state.introspect import is_heap, parts_of
from treadle.capture.python_state.ownership import (
    BUILTINS,
    LOADED,
    SHARED_KINDS,
    is_machinery,
    owner_of,
    stays,
)
from treadle.capture.python_state.parts import (
    MISSING,
    OF_DECLARATION,
    Attributes,
    ClassAttributes,
    Part,
    Reading,
    Sequenced,
)
from treadle.capture.python_state.plain_values import is_plain, is_real
from treadle.capture.python_state.read_names import ReadNames, is_sealed
from treadle.capture.python_state.reads import Reads
from treadle.capture.python_state.system import asks
from treadle.capture.python_state.threads import Threads
from treadle.capture.symbolic.host_draws import HostDraws
from treadle.capture.symbolic.numbers import as_key, is_stand_in
from treadle.capture.tensors.rng_guard import PythonRngGuard
from treadle.compat.fake import is_traced
from treadle.compat.hooks import tensor_hooks
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.switches import getters_named
from treadle.compat.tracing import dispatch_of_trace
from treadle.util.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")


_PROCESS_STATE = table_of(lambda each: each.process_state)
_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has: PyTorch's own."""
_OPEN_TO_ALL = (CellType, FunctionType, SimpleNamespace, *all_of(lambda each: each.namespaces))
"""Of objects of Python's and of libraries' those that hold what others put there."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class DeferredValue:
    """A leaf that Python computes at every call."""

    compute: Callable[[], object]


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
        """``arguments``: leaves of the step's own; objects among them are looked after as well.
        ``seen`` hears of each object that the step can reach, before it can be changed."""
        self._hears = seen
        self._kept: dict[tuple[int, int], Kept] = {}
        self._seen: dict[int, object] = {}
        self._apart: dict[int, frozenset[int]] = {}  # ids of objects, with what is inside of them
        self._waiting: dict[object, list[tuple[Part, object]]] = {}
        self._known_names: set[object] = set()
        self._variables: dict[int, dict[str, object]] = {}
        self._threads = Threads()
        executed = ExecutionRecord()
        self._watch = AttributeWatch(self._kept, self._meet, self._hears_name, self._is_importing)
        self._reflection = Reflection(executed, self._watch, self, self._is_importing)
        self._frames = FrameRecorder(executed, self._on_frame, self._threads, self._reflection)
        self._rng = PythonRngGuard()
        self.draws = draws
        draws.begins, draws.drawn = self._rng.begins, self._rng.drawn
        self._past = False  # whether attributes are read past what is watched
        self._past_names: set[str] = set()  # likewise, under these names
        self._function, self._models, self._optimizers = function, models, optimizers
        try:
            for kind in SHARED_KINDS:
                self._watch.watch_class(kind)
            self._meet_all(arguments)
        except BaseException:
            self._watch.stop()
            raise

    def _meet_all(self, arguments: Iterable[object]) -> None:
        """What a step starts from."""
        for prefix, model in self._models.items():
            self._meet(model, prefix)
            for name, module in model.named_modules():
                self._meet(module, f"{prefix}.{name}".strip("."))
        for prefix, optimizer in self._optimizers.items():
            self._meet(optimizer, prefix or "optimizer")
        self._meet(self._function, "")
        for each in arguments:
            self._meet(each, type(each).__name__)
        for model in self._models.values():
            for name, parameter in model.named_parameters():
                for hook in tensor_hooks(parameter):
                    self._meet(hook, name)

    # -- before code runs

    def _on_frame(self, frame: FrameType) -> None:
        code, space = frame.f_code, frame.f_globals
        found = references_in(code)
        self.learn_names()
        known = self._variables.setdefault(id(space), {})
        used = (found.reads | found.assigns) - frozenset(code.co_freevars)
        new = used - known.keys()
        self.meet_variables(space, new)
        if (
            any(known[name] is type for name in new)
            and code_owner(code.co_filename) is CodeOwner.USER
        ):
            self._frames.executed.asks_types = True  # by another name
        for name in found.modules & LOADED.keys():
            self._meet(LOADED[name], name)

    def meet_variables(self, space: dict[str, object], names: Iterable[str]) -> None:
        """Some globals are read."""
        known = self._variables.setdefault(id(space), {})
        for name in names:
            if name not in known:
                known[name] = space.get(name, MISSING)
                self._meet(BUILTINS.get(name) if known[name] is MISSING else known[name], name)

    def _is_importing(self, frame: FrameType) -> bool:
        return self._frames.is_importing(frame)

    def _hears_name(self, name: str) -> None:
        if name not in self._frames.executed.names:
            self._frames.executed.names.add(name)
            self.learn_names()

    def meet_attributes(self, owner: object) -> None:
        """All attributes of an object are read."""
        for kept in self._parts_kept(id(owner)):
            for name, value in kept.before.items():
                self._meet(value, kept.part.where(name))

    def learn_names(self) -> None:
        """Values that wait for a name which code mentions now."""
        executed = self._frames.executed
        new = set(self._waiting) if executed.any_name else executed.names - self._known_names
        self._known_names |= new
        for name in new & self._waiting.keys():
            for part, value in self._waiting.pop(name, ()):
                self._meet(value, part.where(name))
        for name in executed.past_names - self._past_names:
            self._past_names.add(name)
            for kept in [kept for key in self._watch.read for kept in self._parts_kept(key)]:
                if name in kept.before:
                    self._meet(kept.before[name], kept.part.where(name))
        if executed.past and not self._past:
            self._past = True
            for kept in [kept for key in self._watch.read for kept in self._parts_kept(key)]:
                for name, value in kept.before.items():
                    self._meet(value, kept.part.where(name))

    def _parts_kept(self, key: int) -> list[Kept]:
        """Of an object, by its id, whose attributes are met when they are read."""
        return [self._kept[key, at] for at in range(2) if (key, at) in self._kept]

    def _meet(self, value: object, label: str) -> None:
        """Keep what ``value`` holds, and what can be got from it, before anything changes it."""
        left = [(value, label)]
        while left:
            each, name = left.pop()
            if is_plain(each) or id(each) in self._seen or is_machinery(each):
                continue
            self._seen[id(each)] = each
            left += self._open(each, name)

    def _open(self, value: object, label: str) -> list[tuple[object, str]]:
        found: list[tuple[object, str]] = []
        if isinstance(value, type | ModuleType) and owner_of(value) < (
            CodeOwner.INSTALLED if isinstance(value, type) else CodeOwner.STDLIB
        ):
            return found  # what a step sets there is not looked after
        if is_sealed(value):
            return found
        self._rng.meet(value, label)
        self._reflection.meets(value)
        if isinstance(value, torch.Generator):
            self._hears(value)
        watched = not isinstance(value, Tensor) and self._watch.watch(value)
        whole = id(value) in self._frames.executed.whole
        for at, part in enumerate(parts_of(value, label).parts):
            before = part.now()
            self._kept[id(value), at] = Kept(value, at, part, before)
            named = isinstance(part, Attributes) or isinstance(value, type)
            if named and watched and not self._past and not isinstance(value, type):
                read = self._watch.of_object(value) | self._past_names
                found += [(before[name], part.where(name)) for name in read & before.keys()]
                continue  # met when it is read
            for name, each in before.items():
                if part.entries and not is_plain(name):
                    found.append((name, part.where(name)))
                if is_plain(each) or id(each) in self._seen:
                    continue
                if not named or whole or self._is_named(name):
                    found.append((each, part.where(name)))
                else:
                    self._waiting.setdefault(name, []).append((part, each))
        if not isinstance(value, Tensor) and is_heap(type(value)):
            found.append((type(value), type(value).__qualname__))  # of a class its metaclass
        if isinstance(value, type):
            found += [(base, base.__qualname__) for base in value.__mro__[1:-1]]
        return found

    def _is_named(self, name: object) -> bool:
        if self._frames.executed.any_name or name in self._known_names:
            return True
        special = isinstance(name, str) and name.startswith("__") and name.endswith("__")
        return special and name not in OF_DECLARATION

    @contextlib.contextmanager
    def watching(self, traced: Sequence[Tensor]) -> Iterator[None]:
        """Note what is read; afterwards everything is as it was before. ``traced``: tensors of the
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
            self._restore()

    def _pausing(self, dispatch: Callable[..., object]) -> Callable[..., object]:
        """No frame of a user's is entered within an operation, but for those of their own."""
        paused = self._frames.paused(dispatch)

        def call(mode: object, op: object, *rest: object, **named: object) -> object:
            self._threads.follow()
            whole = isinstance(op, OpOverload) and facts_of(op).is_unknown
            before, self._watch.inside = self._watch.inside, 0 if whole else get_ident()
            try:
                return (dispatch if whole else paused)(mode, op, *rest, **named)
            finally:
                self._watch.inside = before

        return call

    def unseen(self, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, which runs our code alone, without a look at its frames."""
        return self._frames.paused(function)

    def listen(self) -> None:
        """In a thread of the autograd engine's: hear it as well."""
        self._frames.listen()

    # -- what it changed

    def changes(self) -> list[Change]:
        """Places whose values the run changed.

        ``CaptureError`` TR-117 to TR-119 for what cannot be made again at every call, TR-123 for
        what the operating system was asked.
        """
        self._rest()
        self._rng.refuse(decides=self.draws.refuses())
        if self._frames.executed.resumed:
            raise CaptureError(
                f"the step takes the next value of {self._frames.executed.resumed}, a generator "
                "from before it",
                code="TR-117",
                remedy="take it outside of the step, and pass it as an argument",
            )
        if self._frames.asked is not None:
            raise asks(*self._frames.asked)
        found = [_of_real_name(c) for c in (*self._changed_variables(), *self._changed_parts())]
        changed = [each for each in found if not are_equal(each.before, each.now)]
        return changed + self._set_unread(changed)

    def _set_unread(self, changed: Sequence[Change]) -> list[Change]:
        """What the run set before it read it, to what happened to be there: a later call may find
        something else there, and leaves this."""
        known = {(id(each.owner), each.name) for each in changed}
        found: list[Change] = []
        for kept in self._kept.values():
            if kept.part.entries or not kept.part.settable or isinstance(kept.owner, type):
                continue
            for name in self._watch.written(kept.owner):
                now = kept.part.get(name)
                same = now is not MISSING and (id(kept.owner), name) not in known
                if same and not stays(kept.owner):
                    found.append(Change(kept.owner, kept.at, kept.part, name, now, now))
        return found

    def unread_modes(self) -> frozenset[int]:
        """By their numbers among all modules of the models, those in train or eval mode alike."""
        modules = [each for model in self._models.values() for each in model.modules()]
        executed = self._frames.executed
        if executed.past or "training" in executed.past_names:
            return frozenset()
        return frozenset(
            at
            for at, each in enumerate(modules)
            if "training" in vars(each) and self._watch.is_unread(each, "training")
        )

    def _rest(self) -> None:
        """The step's own code is done."""
        self._watch.runs = False
        self._frames.rest()

    def changed_containers(self) -> list[ChangedContainer]:
        """Containers in which the run put, or from which it took, and which others can stand in
        for: all the places where they are can be set."""
        self._rest()
        found: list[ChangedContainer] = []
        for kept in self._kept.values():
            if type(kept.owner) not in RECORDED or not kept.part.entries:
                continue
            now = kept.part.now()
            if kept.part.is_same(now, kept.before) or is_log(now, kept.before):
                continue
            if isinstance(kept.owner, dict) and _are_alike(kept.before, now):
                continue
            places = [*self._places_of(kept.owner)]
            if places and all(map(self._may_stand_in, places)):
                value = cast("Contents", kept.owner)
                found.append(ChangedContainer(value, kept.part.label, tuple(places)))
        return found

    def _may_stand_in(self, place: tuple[object, Part, object]) -> bool:
        """Whether something else may stand there during a run: nothing of what PyTorch's and
        Python's own modules and objects keep for themselves."""
        owner, part, name = place
        if not part.settable or isinstance(owner, Optimizer):
            return False
        if isinstance(owner, nn.Module):
            return name not in _OF_MODULES
        if id(owner) in self._variables:
            return self._frames.executed.spaces[id(owner)][2] >= CodeOwner.INSTALLED
        if type(owner) in (*RECORDED, *_OPEN_TO_ALL):
            return True
        own = owner if isinstance(owner, type | ModuleType) else type(owner)
        return owner_of(own) >= CodeOwner.INSTALLED

    def _places_of(self, value: object) -> Iterator[tuple[object, Part, object]]:
        """Where an object is: the owner, its part, and the name in it."""
        for at, known in self._variables.items():
            space, _, _ = self._frames.executed.spaces[at]
            names = [name for name, each in known.items() if each is value]
            yield from ((space, Attributes("", space), name) for name in names)
        for kept in self._kept.values():
            if isinstance(kept.owner, ModuleType) and id(vars(kept.owner)) in self._variables:
                known = self._variables[id(vars(kept.owner))]
            else:
                known = {}
            for name, each in kept.before.items():
                if each is value and name not in known:
                    yield kept.owner, kept.part, name

    def _changed_variables(self) -> list[Change]:
        found: list[Change] = []
        for at, known in self._variables.items():
            space, _, _ = self._frames.executed.spaces[at]
            part = Attributes("", space)
            for name, before in known.items():
                now = space.get(name, MISSING)
                if now is not before:
                    found.append(Change(space, 0, part, name, before, now))
        return found

    def _changed_parts(self) -> list[Change]:
        found: list[Change] = []
        for kept in self._kept.values():
            if isinstance(kept.owner, functools._lru_cache_wrapper) or stays(kept.owner):
                continue  # no more than a cache; what a step sets there is not looked after
            now = kept.part.now()
            if kept.part.is_same(now, kept.before) or is_log(now, kept.before):
                continue
            names = [n for n in {**kept.before, **now} if n not in (*WATCHED, "__dict__")]
            changed = [n for n in names if now.get(n, MISSING) is not kept.before.get(n, MISSING)]
            if isinstance(kept.owner, type):
                changed = [n for n in changed if not is_cache(n)]
            if not changed and not kept.part.entries:
                continue
            found += self._of_part(kept, now, changed)
        return found

    def _of_part(self, kept: Kept, now: Reading, changed: list[object]) -> list[Change]:
        label, kind = kept.part.label, type(kept.owner).__name__
        if not kept.part.settable or isinstance(kept.part, Sequenced) or not changed:
            raise refused(label, kind)
        if any(n not in kept.before and _has_tensor(n) for n in changed):
            raise refused(f"a key of {label} that is a tensor", kind)  # it would be a traced one
        if self._is_fixed(kept):
            raise refused(kept.part.where(changed[0]), "part of a module")
        return [
            Change(
                kept.owner, kept.at, kept.part, n, kept.before.get(n, MISSING), now.get(n, MISSING)
            )
            for n in changed
        ]

    def _is_fixed(self, kept: Kept) -> bool:
        """A module's parameters or modules."""
        return any(
            kept.owner is each
            for model in self._models.values()
            for module in model.modules()
            for each in (module._parameters, module._modules)
        )

    def met(self) -> Iterable[object]:
        """Every object that the step can reach, as far as it ran."""
        return self._seen.values()

    def knows(self, value: object) -> bool:
        """Whether an object was there before the run, as far as the step can reach it."""
        return id(value) in self._seen

    def was_read(self, change: Change) -> bool:
        """Whether the run may have read what was there before."""
        if change.part.entries:
            return True
        read = self._watch.read.get(id(change.owner))
        if read is not None and isinstance(change.part, Attributes):
            return change.name in read
        return True

    def hides_traced(self, value: object) -> bool:
        """Whether an object that is no container holds a tensor or number of the run."""
        if is_traced(value) or is_stand_in(value):
            return False
        return bool(values_inside(value, self._seen))

    def taken_apart(self, value: object, label: str) -> MadeObject:
        """An object that hides some, as a container of these. TR-117 where it cannot be copied, and
        where it is left in two places, which would get one copy each."""
        inside = objects_inside(value, self._seen)
        twice = any(id(value) in held or top in inside for top, held in self._apart.items())
        if twice:
            raise refused(f"{label} and a second place, in both", type(value).__name__)
        self._apart[id(value)] = inside
        try:
            found = MadeObject.of(value, dict(self._seen))
        except Exception as error:
            raise refused(label, type(value).__name__) from error
        if found is None:
            raise refused(label, type(value).__name__)
        return found

    def again(self, value: object, label: str) -> object:
        """What the run made, for every call anew; what was there before is that object."""
        known_before = value is MISSING or id(value) in self._seen or isinstance(value, type)
        if known_before or is_plain(value):
            return value
        known = dict(self._seen)
        try:
            copy.deepcopy(value, dict(known))
        except Exception as error:
            raise refused(label, type(value).__name__) from error
        return DeferredValue(lambda: copy.deepcopy(value, dict(known)))

    def _restore(self) -> None:
        self._rng.restore()
        for at, known in self._variables.items():
            space, _, _ = self._frames.executed.spaces[at]
            for name, before in known.items():
                if space.get(name, MISSING) is not before:
                    Attributes("", space).put(name, before)
        for kept in self._kept.values():
            if stays(kept.owner):
                continue
            if isinstance(kept.owner, functools._lru_cache_wrapper):
                if kept.part.now() != kept.before:
                    kept.owner.cache_clear()  # it holds what the run has made
                continue
            if isinstance(kept.part, ClassAttributes):
                for name, value in kept.part.now().items():
                    before = kept.before.get(name, MISSING)
                    if value is not before and not is_cache(name) and name not in WATCHED:
                        kept.part.put(name, before)
                continue
            now = kept.part.now()
            if not kept.part.is_same(now, kept.before) and not is_log(now, kept.before):
                kept.part.restore(kept.before)

    # -- what it read

    @property
    def asks_types(self) -> bool:
        """Whether ``type`` may have been asked of a number that stands in for another."""
        return self._frames.executed.asks_types

    @property
    def calls_type(self) -> Iterable[tuple[CodeType, ...]]:
        """Code that may have asked a traced tensor for its type, with that of the frames around."""
        return self._frames.executed.calls_type.values()

    def is_named_in_code(self, name: str) -> bool:
        """Whether code of the user's or of what they installed names ``name``."""
        return self._frames.executed.any_name or name in self._frames.executed.theirs

    def names(
        self,
        ours: Callable[[object], bool],
        entries: Mapping[int, frozenset[object] | None],
    ) -> ReadNames:
        """Which attributes of which objects count. ``entries``: by the ids of containers that the
        step changes, those that it read."""
        executed = self._frames.executed
        mentioned = None if executed.any_name else frozenset(executed.names)
        read = {key: names | executed.past_names for key, names in self._watch.read.items()}
        return ReadNames(
            read={} if executed.past else read,
            whole=frozenset(self._watch.everything | executed.whole.keys()),
            whole_kinds=self._watch.whole_kinds | {type(each) for each in executed.whole.values()},
            mentioned=mentioned,
            of_library=frozenset(executed.names),
            ours=lambda value: ours(value) or is_machinery(value),
            owner=owner_of,
            entries=entries,
        )

    def add_roots(self, reads: Reads) -> None:
        """All that a later call can start from."""
        for prefix, model in self._models.items():
            reads.add(prefix, model)
        for prefix, optimizer in self._optimizers.items():
            reads.add(prefix or "optimizer", optimizer)
        reads.add("", self._function)
        for model in self._models.values():
            for name, parameter in model.named_parameters():
                for hook in tensor_hooks(parameter):
                    reads.add(name, hook)
        for space, names, owner in self._frames.executed.spaces.values():
            if id(space) in self._frames.executed.whole_spaces:
                names = names | space.keys() - {"__builtins__"}
            there = frozenset(name for name in names if name in space)
            reads.add_names("", space, names, deep=owner >= CodeOwner.INSTALLED)
            reads.add_names("", BUILTINS, names - there, deep=True)
        for name, state in _PROCESS_STATE.items():
            if name in self._frames.executed.names:
                reads.add_computed(state.label, state.read)
        for name, getter in getters_named(self._frames.executed.theirs):
            reads.add_computed(f"torch.{name}()", getter)
        reads.add("", Tensor)
        if "initial_seed" in self._frames.executed.names:
            for value in self._seen.values():
                if isinstance(value, torch.Generator):
                    reads.add_computed("a generator's initial seed", value.initial_seed)
        for label, shared in self._watch.shared.items():
            reads.add(label, shared)
        for name in self._frames.executed.modules & LOADED.keys():
            if owner_of(LOADED[name]) >= CodeOwner.INSTALLED:
                reads.add(name, LOADED[name])


def _of_real_name(change: Change) -> Change:
    """At a call a key that stands in would be none."""
    name = as_key(change.name)
    return change if name is change.name else replace(change, name=name)


def _are_alike(before: Reading, now: Reading) -> bool:
    """Whether a dict has the same keys, and under each a value of the same kind."""
    if list(before) != list(now):
        return False
    pairs = [(before[key], now[key]) for key in now if before[key] is not now[key]]
    return all(
        (isinstance(old, Tensor) and isinstance(new, Tensor))
        or (_is_numeric(old) and _is_numeric(new))
        for old, new in pairs
    )


def _is_numeric(value: object) -> bool:
    return is_stand_in(value) or is_real(value)


def _has_tensor(key: object) -> bool:
    """Whether a key is a tensor, or made of some."""
    if isinstance(key, tuple | frozenset):
        return any(map(_has_tensor, key))
    return isinstance(key, Tensor)
