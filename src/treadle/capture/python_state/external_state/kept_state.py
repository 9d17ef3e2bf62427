"""The contents of the objects that a step can reach before it runs, and the differences
afterwards."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import cast, final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.integrations.registry import all_of
from treadle.capture.python_state.attribute_watch import WATCHED
from treadle.capture.python_state.changes import Change, Kept, holds, is_cache, is_log, refused
from treadle.capture.python_state.code.frames import CodeOwner, ExecutionRecord
from treadle.capture.python_state.container_parts import Sequenced
from treadle.capture.python_state.containers.container_changes import ChangedContainer
from treadle.capture.python_state.containers.container_recorders import RECORDED, Contents
from treadle.capture.python_state.ownership import owner_of, stays
from treadle.capture.python_state.parts import MISSING, Attributes, ClassAttributes, Part, Reading
from treadle.capture.python_state.plain_values import is_real
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.compat.tensors import are_alike

_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has: PyTorch's own."""
_MOST_NUMBERS = 16
"""The most numbers that a step may set in a list so that each is a number of the call."""
_NAME_KEYS = (
    "take a name or a number as the key; if this is the state of an optimizer of yours, pass that "
    "one in optimizer=, in the place of those that it calls"
)
_OPEN_TO_ALL = (
    CellType,
    FunctionType,
    SimpleNamespace,
    *all_of(lambda integration: integration.namespaces),
)
"""Objects of Python's and of libraries that hold what others put there."""


@final
class KeptState:
    """Parts of objects, and variables of modules, as they were before a run.

    ``parts``: by the id of an object and a position. ``objects``: all objects that the step can
    reach, by their ids. ``variables``: those that entered code mentions, by the id of a module's
    globals.
    """

    def __init__(self, executed: ExecutionRecord, models: Iterable[nn.Module]) -> None:
        self._executed, self._models = executed, tuple(models)
        self.parts: dict[tuple[int, int], Kept] = {}
        self.objects: dict[int, object] = {}
        self.variables: dict[int, dict[str, object]] = {}

    def attributes_of(self, key: int) -> list[Kept]:
        """The parts of an object, by its id, whose values are met when they are read."""
        return [self.parts[key, at] for at in range(2) if (key, at) in self.parts]

    def before(self, owner: object, at: int) -> Reading | None:
        """What a part of an object held before the run."""
        kept = self.parts.get((id(owner), at))
        return None if kept is None else kept.before

    def restore(self) -> None:
        """Restore everything."""
        for at, known in self.variables.items():
            space, _, _ = self._executed.spaces[at]
            for name, before in known.items():
                if space.get(name, MISSING) is not before:
                    Attributes("", space).put(name, before)
        for kept in self.parts.values():
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

    def changes(self) -> list[Change]:
        """The changes. TR-117 for changes that cannot be repeated at every call."""
        return [*self._changed_variables(), *self._changed_parts()]

    def _changed_variables(self) -> list[Change]:
        changes: list[Change] = []
        for at, known in self.variables.items():
            space, _, _ = self._executed.spaces[at]
            part = Attributes("", space)
            for name, before in known.items():
                now = space.get(name, MISSING)
                if now is not before:
                    changes.append(Change(space, 0, part, name, before, now))
        return changes

    def _changed_parts(self) -> list[Change]:
        changes: list[Change] = []
        for kept in self.parts.values():
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
            changes += self._of_part(kept, now, changed)
        return changes

    def _of_part(self, kept: Kept, now: Reading, changed: list[object]) -> list[Change]:
        label, kind = kept.part.label, type(kept.owner).__name__
        is_moved = isinstance(kept.part, Sequenced) and not _are_numbers_set(kept.before, now)
        if not kept.part.settable or is_moved or not changed:
            raise refused(label, kind).seen_by(lambda _: holds(kept.part))
        if any(n not in kept.before and _has_tensor(n) for n in changed):
            # it would be a traced one
            error = refused(f"a key of {label} that is a tensor", kind, remedy=_NAME_KEYS)
            raise error.seen_by(lambda _: holds(kept.part))
        fixed = [n for n in changed if not _is_frozen_still(kept.before.get(n), now.get(n))]
        if fixed and self._is_fixed(kept):
            error = refused(kept.part.where(fixed[0]), "part of a module")
            raise error.seen_by(lambda _: holds(kept.part))
        return [
            Change(
                kept.owner, kept.at, kept.part, n, kept.before.get(n, MISSING), now.get(n, MISSING)
            )
            for n in changed
        ]

    def _is_fixed(self, kept: Kept) -> bool:
        """A module's parameters or modules."""
        return any(
            kept.owner is table
            for model in self._models
            for module in model.modules()
            for table in (module._parameters, module._modules)
        )

    def set_unread(
        self, written: Callable[[object], Iterable[str]], changed: Sequence[Change]
    ) -> list[Change]:
        """The values that the run set before it read the earlier ones (``written``: the names, of
        an object). A later call may find other values there, and overwrites them."""
        known = {(id(change.owner), change.name) for change in changed}
        unread: list[Change] = []
        for kept in self.parts.values():
            if kept.part.entries or not kept.part.settable or isinstance(kept.owner, type):
                continue
            for name in written(kept.owner):
                now = kept.part.get(name)
                same = now is not MISSING and (id(kept.owner), name) not in known
                if same and not stays(kept.owner):
                    unread.append(Change(kept.owner, kept.at, kept.part, name, now, now))
        return unread

    def changed_containers(self) -> list[ChangedContainer]:
        """Containers in which the run put, or from which it took, and which others can stand in
        for: all the places where they are can be set."""
        containers: list[ChangedContainer] = []
        for kept in self.parts.values():
            if type(kept.owner) not in RECORDED or not kept.part.entries:
                continue
            now = kept.part.now()
            if kept.part.is_same(now, kept.before) or is_log(now, kept.before):
                continue
            if isinstance(kept.owner, dict) and _are_alike(kept.before, now):
                continue
            if isinstance(kept.owner, list) and _are_numbers_set(kept.before, now):
                continue
            places = [*self._places_of(kept.owner)]
            if places and all(map(self._may_stand_in, places)):
                value = cast("Contents", kept.owner)
                containers.append(ChangedContainer(value, kept.part.label, tuple(places)))
        return [*containers, *self._dicts_around(containers)]

    def _dicts_around(self, containers: Sequence[ChangedContainer]) -> list[ChangedContainer]:
        """The dicts that contain these, at any depth. The run may have changed one log in a dict of
        logs and read no other. Entries that it set may be numbers that change, which are found in
        the dict itself."""
        around = list(containers)
        known = {id(container.value) for container in containers}
        for container in around:  # those of what is found come behind it
            for owner, part, _ in container.places:
                if not (part.entries and isinstance(owner, dict) and type(owner) in RECORDED):
                    continue
                dict_ = cast("dict[object, object]", owner)
                if self._is_changed(dict_):
                    continue
                places = [*self._places_of(dict_)]
                if id(dict_) in known or not places or not all(map(self._may_stand_in, places)):
                    continue
                known.add(id(dict_))
                around.append(ChangedContainer(dict_, part.label, tuple(places)))
        return around[len(containers) :]

    def _is_changed(self, value: object) -> bool:
        """Whether the entries of a container differ from those before the run."""
        kept = [kept for kept in self.parts.values() if kept.owner is value and kept.part.entries]
        return any(not each.part.is_same(each.part.now(), each.before) for each in kept)

    def _may_stand_in(self, place: tuple[object, Part, object]) -> bool:
        """Whether a stand-in may be put there during a run: not into what PyTorch's and Python's
        own modules and objects keep for themselves."""
        owner, part, name = place
        if not part.settable or isinstance(owner, Optimizer):
            return False
        if isinstance(owner, nn.Module):
            return name not in _OF_MODULES
        if id(owner) in self.variables:
            return self._executed.spaces[id(owner)][2] >= CodeOwner.INSTALLED
        if type(owner) in (*RECORDED, *_OPEN_TO_ALL):
            return True
        own = owner if isinstance(owner, type | ModuleType) else type(owner)
        return owner_of(own) >= CodeOwner.INSTALLED

    def _places_of(self, value: object) -> Iterator[tuple[object, Part, object]]:
        """Where an object is: the owner, its part, and the name in it."""
        for at, known in self.variables.items():
            space, _, _ = self._executed.spaces[at]
            names = [name for name, other in known.items() if other is value]
            yield from ((space, Attributes("", space), name) for name in names)
        for kept in self.parts.values():
            if isinstance(kept.owner, ModuleType) and id(vars(kept.owner)) in self.variables:
                known = self.variables[id(vars(kept.owner))]
            else:
                known = {}
            for name, held in kept.before.items():
                if held is value and name not in known:
                    yield kept.owner, kept.part, name


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


def _are_numbers_set(before: Reading, now: Reading) -> bool:
    """Whether a list is as long as it was, with other numbers in a few places."""
    if len(before) != len(now):
        return False
    pairs = [(before[at], now[at]) for at in now if before[at] is not now[at]]
    return len(pairs) <= _MOST_NUMBERS and all(
        _is_numeric(old) and _is_numeric(new) for old, new in pairs
    )


def _is_frozen_still(before: object, now: object) -> bool:
    """Whether a parameter takes the place of a similar one and neither is trained. No optimizer is
    involved, so its values can be copied over those of the other."""
    return (
        isinstance(before, nn.Parameter)
        and isinstance(now, nn.Parameter)
        and not (before.requires_grad or now.requires_grad)
        and are_alike(before, now)
    )


def _is_numeric(value: object) -> bool:
    return is_stand_in(value) or is_real(value)


def _has_tensor(key: object) -> bool:
    """Whether a key is or contains a tensor."""
    if isinstance(key, tuple | frozenset):
        return any(map(_has_tensor, key))
    return isinstance(key, Tensor)
