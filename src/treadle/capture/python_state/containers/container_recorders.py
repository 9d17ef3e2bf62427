"""Containers in the place of a user's lists, dicts, sets and deques while a step is captured.

Each holds what the user's own holds, does what it is told, and notes it in an ``OperationLog``, so
that it can be done again at every call. It also notes what was read of it: a list that is only
appended to may have any length, and a dict of which one key is read any others.

::

    history.append(loss)   ->  Operation(history, "append", (loss,))
    cache["out"] = y       ->  Operation(cache, "__setitem__", ("out", y))
    cache["in"]            ->  the entry "in" counts

Lists, dicts and deques are subclasses, since functions of PyTorch's ask for lists; what C code does
past the methods is found by a comparison at the end (``OperationLog.is_complete``). A set is an
object of its own, since C code looks past the methods of its subclasses.
"""

import copy
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableSet
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, TypeGuard, cast, final

from treadle.capture.python_state.parts import MISSING, member

Contents = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """A method of the ``at``th container with what it was given."""

    at: int
    name: str
    args: tuple[Any, ...]


TOUCH = "touch"
"""Of an operation: from now on the next container is what the dict has under a key."""


@dataclass(slots=True, eq=False)
class ContainerRecorder:
    """What is known of one container. ``real``: the user's own; ``found``: where it is at a call;
    ``parent``: of a container that a dict made or has, the dict and the key."""

    log: "OperationLog"
    at: int
    real: Contents
    label: str
    parent: tuple["ContainerRecorder", object] | None = None
    reads: set[object] = field(default_factory=set[object])  # keys of a dict, members of a set
    reads_all: bool = False
    reads_length: bool = False
    tail: int = 0  # how many entries at the end of a sequence the run has put there
    written: set[object] = field(default_factory=set[object])  # keys that the run has set
    is_own: bool = False  # whether all that is in it was put there by the run
    is_made: bool = False  # whether the parent made it during the run
    found: Callable[[], object] | None = None

    def note(self, name: str, *args: object) -> None:
        """An operation that changes it."""
        self.log.operations.append(Operation(self.at, name, args))

    def read(self, *, length: bool = False) -> None:
        """All that is in it, or how much that is."""
        if self.is_own:
            return
        if self.is_made and self.parent is not None:  # it matters that it was not there
            parent, key = self.parent
            parent.reads |= set() if parent.is_own else {key}
        elif length:
            self.reads_length = True
        else:
            self.reads_all = True

    def read_key(self, key: object, name: object) -> None:
        """What it has under a key, which a snapshot has under ``name``."""
        if not self.is_own and key not in self.written:
            self.reads.add(name)

    def cleared(self) -> None:
        """All that was in it is gone."""
        self.is_own = True

    def get(self) -> Any:
        """The user's own, at a call."""
        return self.real if self.found is None else self.found()


@dataclass(slots=True)
class OperationLog:
    """What a run did to containers outside of it, in order."""

    operations: list[Operation] = field(default_factory=list[Operation])
    recorders: list[ContainerRecorder] = field(default_factory=list[ContainerRecorder])
    _stand_ins: list[object] = field(default_factory=list[object])
    _before: list[Any] = field(default_factory=list[Any])

    def stand_in(
        self, real: Contents, label: str, parent: tuple[ContainerRecorder, object] | None = None
    ) -> Any:
        """What stands for ``real`` from now on; ``settle`` says what is in it."""
        recorder = ContainerRecorder(self, len(self.recorders), real, label, parent)
        self.recorders.append(recorder)
        made = RECORDED[type(real)](recorder)
        self._stand_ins.append(made)
        self._before.append(None)
        return made

    def settle(self) -> None:
        """All stand where they belong: each gets what is in the user's own."""
        for each, recorder in zip(self._stand_ins, self.recorders, strict=True):
            _fill(each, recorder.real)
            self._before[recorder.at] = _plain_copy(recorder.real)

    def nested(self, parent: ContainerRecorder, key: object, made: Contents) -> Any:
        """Stands for a container that a dict made under a key."""
        found = self.stand_in(made, f"{parent.label}[{key!r}]", (parent, key))
        self.recorders[-1].is_made = True
        self._before[-1] = _plain_copy(made)
        return found

    def touch(self, parent: ContainerRecorder, key: object, value: object) -> object:
        """``value`` was got from a dict: that is where it is found from now on."""
        if is_recorded(value):
            parent.note(TOUCH, key, value)
        return value

    def now(self, at: int) -> Contents:
        """What is in one of the stand-ins."""
        each = self._stand_ins[at]
        return each.inner if type(each) is RecordedSet else _plain_copy(each)

    def is_got(self, recorder: ContainerRecorder) -> bool:
        """Whether it is got from a dict before anything is done to it."""
        for each in self.operations:
            if each.name == TOUCH and each.args[1].recorder is recorder:
                return True
            if each.at == recorder.at:
                return False
        return True

    def is_complete(self, recorder: ContainerRecorder) -> bool:
        """Whether what is in the stand-in now is what its operations make of what was in it."""
        if recorder.is_made and recorder.real:
            return False  # by another name
        again = copy.copy(self._before[recorder.at])
        for each in self.operations:
            if each.at == recorder.at and each.name == TOUCH:
                again[each.args[0]] = each.args[1]
            elif each.at == recorder.at:
                operator.methodcaller(each.name, *each.args)(again)
        return _identities(again) == _identities(self.now(recorder.at))


def _identities(value: Contents) -> list[Any]:
    if isinstance(value, dict):
        return [(id(key), id(each)) for key, each in value.items()]
    return sorted(map(id, value)) if isinstance(value, set) else list(map(id, value))


def _plain_copy(value: Any) -> Any:
    """A shallow copy without the ways of its class."""
    match value:
        case RecordedSet():
            return set(value.inner)
        case deque():
            return deque(deque.__iter__(value), value.maxlen)
        case list():
            return list(list.__iter__(value))
        case defaultdict():
            made = defaultdict(value.default_factory)
            made.update(zip(dict.keys(value), dict.values(value), strict=True))
            return made
        case OrderedDict():
            return OrderedDict(zip(OrderedDict.keys(value), OrderedDict.values(value), strict=True))
        case dict():
            return dict(zip(dict.keys(value), dict.values(value), strict=True))
        case _:
            return set(value)


def _fill(stand_in: Any, real: Any) -> None:
    match stand_in:
        case RecordedSet():
            stand_in.inner = set(real)
        case deque():
            deque.extend(stand_in, real)
        case list():
            list.extend(stand_in, real)
        case OrderedDict():
            for key, value in real.items():
                OrderedDict.__setitem__(stand_in, key, value)
        case _:
            dict.update(stand_in, real)


class _RecordedSequence:
    """What lists and deques have in common."""

    __slots__ = ()
    recorder: ContainerRecorder
    _kind: type

    def append(self, value: object) -> None:
        self.recorder.note("append", value)
        self._kind.append(self, value)
        self.recorder.tail += 1

    def extend(self, values: Iterable[object]) -> None:
        new = tuple(values)
        self.recorder.note("extend", new)
        self._kind.extend(self, new)
        self.recorder.tail += len(new)

    def __iadd__(self, values: Iterable[object]) -> Any:
        self.extend(values)
        return self

    def clear(self) -> None:
        self.recorder.note("clear")
        self._kind.clear(self)
        self.recorder.cleared()

    def insert(self, at: SupportsIndex, value: object) -> None:
        self._changed("insert", at, value)

    def reverse(self) -> None:
        self._changed("reverse")

    def __setitem__(self, at: object, value: Any) -> None:
        given = tuple(value) if isinstance(at, slice) else value
        self._changed("__setitem__", at, given)
        if at == slice(None):
            self.recorder.cleared()

    def __delitem__(self, at: object) -> None:
        self._changed("__delitem__", at)
        if at == slice(None):
            self.recorder.cleared()

    def remove(self, value: object) -> None:
        self.recorder.read()
        self._changed("remove", value)

    def __imul__(self, times: SupportsIndex) -> Any:
        self.recorder.read()
        self._changed("__imul__", times)
        return self

    def __getitem__(self, at: object) -> Any:
        self._read_at(at)
        return self._kind.__getitem__(self, at)

    def __len__(self) -> int:
        self.recorder.read(length=True)
        return self._kind.__len__(self)

    def _changed(self, name: str, *args: object) -> Any:
        self.recorder.note(name, *args)
        self.recorder.tail = 0
        return operator.methodcaller(f"{name}", self, *args)(self._kind)

    def _read_at(self, at: Any) -> None:
        """Entries that the run itself has put at the end are nothing from outside."""
        if isinstance(at, slice) or not -self.recorder.tail <= operator.index(at) < 0:
            self.recorder.read()

    def _popped(self, name: str, at: int, *args: object) -> Any:
        self._read_at(at)
        tail = self.recorder.tail - 1 if at == -1 else 0
        value = self._changed(name, *args)
        self.recorder.tail = max(0, tail)
        return value


@final
class RecordedList(_RecordedSequence, list[object]):
    """In the place of a list."""

    __slots__ = ("recorder",)
    _kind = list

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def pop(self, at: SupportsIndex = -1) -> Any:
        return self._popped("pop", operator.index(at), at)

    def sort(self, **named: Any) -> None:
        new = sorted(self, **named)
        self[:] = new


@final
class RecordedDeque(_RecordedSequence, deque[object]):
    """In the place of a deque."""

    __slots__ = ("recorder",)
    _kind = deque

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__(maxlen=cast("deque[Any]", recorder.real).maxlen)
        self.recorder = recorder

    def appendleft(self, value: object) -> None:
        self._changed("appendleft", value)

    def extendleft(self, values: Iterable[object]) -> None:
        self._changed("extendleft", tuple(values))

    def pop(self) -> Any:
        return self._popped("pop", -1)

    def popleft(self) -> Any:
        return self._popped("popleft", 0)

    def rotate(self, by: int = 1) -> None:
        self._changed("rotate", by)


class _RecordedMapping(dict[Any, Any]):
    """What all dicts have in common."""

    __slots__ = ()
    recorder: ContainerRecorder
    _kind: type

    def __setitem__(self, key: object, value: object) -> None:
        self._set(key, value)

    def _set(self, key: object, value: object) -> None:
        self.recorder.note("__setitem__", key, value)
        self._kind.__setitem__(self, key, value)
        self.recorder.written.add(key)

    def __delitem__(self, key: object) -> None:
        self.recorder.read_key(key, key)
        self.recorder.note("__delitem__", key)
        self._kind.__delitem__(self, key)
        self.recorder.written.add(key)

    def update(self, *args: object, **named: object) -> None:
        for key, value in dict(*args, **named).items():
            self._set(key, value)

    def __ior__(self, other: object) -> Any:
        self.update(other)
        return self

    def clear(self) -> None:
        self.recorder.note("clear")
        self._kind.clear(self)
        self.recorder.cleared()

    def pop(self, key: object, default: object = MISSING) -> Any:
        self.recorder.read_key(key, key)
        given = () if default is MISSING else (default,)
        self.recorder.note("pop", key, *given)
        value = self._kind.pop(self, key, *given)
        self.recorder.written.add(key)
        return value

    def popitem(self, last: bool = True) -> Any:
        self.recorder.read()
        given = () if last else (False,)
        self.recorder.note("popitem", *given)
        return self._kind.popitem(self, *given)

    def setdefault(self, key: object, default: Any = None) -> Any:
        """An empty container that is put there is the same as one that is there already."""
        log, there = self.recorder.log, dict.__contains__(self, key)
        value = dict.__getitem__(self, key) if there else default
        empty = type(default) in RECORDED and not default
        if not (empty and (is_recorded(value) or not there)):
            self.recorder.read_key(key, key)
        self.recorder.note("setdefault", key, type(default)() if empty else default)
        if empty and not there:
            value = log.nested(self.recorder, key, default)
        if not there:
            self._kind.__setitem__(self, key, value)
            self.recorder.written.add(key)
        return log.touch(self.recorder, key, value)

    def __getitem__(self, key: object) -> Any:
        self.recorder.read_key(key, key)
        return self.recorder.log.touch(self.recorder, key, self._kind.__getitem__(self, key))

    def get(self, key: object, default: object = None) -> Any:
        self.recorder.read_key(key, key)
        return self.recorder.log.touch(self.recorder, key, dict.get(self, key, default))

    def __contains__(self, key: object) -> bool:
        self.recorder.read_key(key, key)
        return dict.__contains__(self, key)


@final
class RecordedDict(_RecordedMapping):
    """In the place of a dict."""

    __slots__ = ("recorder",)
    _kind = dict

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__()
        self.recorder = recorder


@final
class RecordedOrderedDict(_RecordedMapping, OrderedDict[Any, Any]):
    """In the place of an ordered dict."""

    _kind = OrderedDict

    def __init__(self, recorder: ContainerRecorder) -> None:
        self.recorder = recorder
        super().__init__()

    def move_to_end(self, key: object, last: bool = True) -> None:
        self.recorder.read_key(key, key)
        self.recorder.note("move_to_end", key, last)
        OrderedDict.move_to_end(self, key, last)


@final
class RecordedDefaultDict(_RecordedMapping, defaultdict[Any, Any]):
    """In the place of a dict that makes what is missing: where that is a container, it does not
    matter whether it was missing."""

    __slots__ = ("recorder",)
    _kind = defaultdict

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__(cast("defaultdict[Any, Any]", recorder.real).default_factory)
        self.recorder = recorder

    def __getitem__(self, key: object) -> Any:
        log, factory = self.recorder.log, self.default_factory
        if dict.__contains__(self, key):
            value = dict.__getitem__(self, key)
            if not (is_recorded(value) and factory is type(value.recorder.real)):
                self.recorder.read_key(key, key)
            return log.touch(self.recorder, key, value)
        if factory is None:
            self.recorder.read_key(key, key)
            raise KeyError(key)
        value = factory()
        if type(value) in RECORDED and factory is type(value) and not value:
            value = log.nested(self.recorder, key, value)
            dict.__setitem__(self, key, value)
            self.recorder.written.add(key)
            return log.touch(self.recorder, key, value)
        self.recorder.read_key(key, key)
        self._set(key, value)
        return value


@final
class RecordedSet(MutableSet[object]):
    """In the place of a set."""

    def __init__(self, recorder: ContainerRecorder) -> None:
        self.recorder = recorder
        self.inner: set[object] = set()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return set

    def add(self, value: object) -> None:
        self.recorder.note("add", value)
        self.inner.add(value)
        self.recorder.written.add(value)

    def discard(self, value: object) -> None:
        self.recorder.note("discard", value)
        self.inner.discard(value)
        self.recorder.written.add(value)

    def remove(self, value: object) -> None:
        self.recorder.read_key(value, member(value))
        self.recorder.note("remove", value)
        self.inner.remove(value)
        self.recorder.written.add(value)

    def pop(self) -> Any:
        self.recorder.read()
        value = next(iter(self.inner))
        self.discard(value)
        return value

    def clear(self) -> None:
        self.recorder.note("clear")
        self.inner.clear()
        self.recorder.cleared()

    def update(self, *others: Iterable[object]) -> None:
        for each in others:
            for value in each:
                self.add(value)

    def difference_update(self, *others: Iterable[object]) -> None:
        for each in others:
            for value in set(each):
                self.discard(value)

    def intersection_update(self, *others: Iterable[object]) -> None:
        self.recorder.read()
        for value in self.inner - self.inner.intersection(*others):
            self.discard(value)

    def symmetric_difference_update(self, other: Iterable[object]) -> None:
        for value in set(other):
            if value in self:
                self.discard(value)
            else:
                self.add(value)

    def __contains__(self, value: object) -> bool:
        self.recorder.read_key(value, member(value))
        return value in self.inner

    def __iter__(self) -> Any:
        self.recorder.read()
        return iter(set(self.inner))

    def __len__(self) -> int:
        self.recorder.read(length=True)
        return len(self.inner)

    @classmethod
    def _from_iterable(cls, it: Iterable[object]) -> Any:
        return set(it)


def _reading(method: Callable[..., object]) -> Callable[..., Any]:
    def read(self: Any, *args: object, **named: object) -> object:
        self.recorder.read()
        return method(self, *args, **named)

    return read


def _reading_copy(name: str) -> Callable[..., Any]:
    """A method that gives a container of its own: one without recorder."""

    def read(self: Any, *args: object) -> object:
        self.recorder.read()
        return operator.methodcaller(name, *args)(_plain_copy(self))

    return read


def _reading_length(method: Callable[..., int]) -> Callable[[Any], int]:
    def length(self: Any) -> int:
        self.recorder.read(length=True)
        return method(self)

    return length


def _copied_deeply(self: Any, memo: dict[int, object]) -> object:
    self.recorder.read()
    return copy.deepcopy(_plain_copy(self), memo)


def _added(self: Any, other: object) -> object:
    self.recorder.read()
    return other + _plain_copy(self)


_READ = (
    "__contains__", "__eq__", "__ge__", "__gt__", "__iter__", "__le__", "__lt__", "__ne__",
    "__repr__", "__reversed__", "count", "index", "items", "keys", "values",
)  # fmt: skip
_COPIES = (
    "__add__", "__copy__", "__mul__", "__or__", "__reduce_ex__", "__rmul__", "__ror__", "copy",
)  # fmt: skip
_COPIES_OF_SETS = (
    "__copy__", "__reduce_ex__", "copy", "difference", "intersection", "issubset", "issuperset",
    "symmetric_difference", "union",
)  # fmt: skip


def _complete(made: Any, kind: Any) -> None:
    """Every other method reads all that is in it."""
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    own = vars(made) | vars(made.__mro__[1])
    for name in _READ if kind is not set else ():
        if name in methods and name not in own:
            setattr(made, name, _reading(methods[name]))
    for name in _COPIES_OF_SETS if kind is set else _COPIES:
        if name in methods:
            setattr(made, name, _reading_copy(name))
    if kind in (list, deque):
        made.__radd__ = _added
    if "__len__" not in own:
        made.__len__ = _reading_length(methods["__len__"])
    made.__deepcopy__ = _copied_deeply
    made.__hash__ = None


RECORDED: Mapping[type, Any] = {
    list: RecordedList,
    deque: RecordedDeque,
    dict: RecordedDict,
    OrderedDict: RecordedOrderedDict,
    defaultdict: RecordedDefaultDict,
    set: RecordedSet,
}
"""By the class of a container the one that stands in for it."""
for _kind, _made in RECORDED.items():
    _complete(_made, _kind)

_KINDS = frozenset(RECORDED.values())


def is_recorded(value: object) -> TypeGuard[Any]:
    """Whether it stands in for a container of the user's."""
    return type(value) in _KINDS


def as_plain(value: Any) -> Any:
    """What is in a stand-in, all of which is read, as a container of its own."""
    value.recorder.read()
    return _plain_copy(value)
