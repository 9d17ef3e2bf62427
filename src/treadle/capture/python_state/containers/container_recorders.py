"""Substitutes for a user's lists, dicts, sets and deques during capture.

Each has the contents of the user's container, performs operations, and records them in an
``OperationLog``, so that every call can repeat them. It also records what was read: a list that is
only appended to may have any length, and a dict of which one key is read may have any other keys.

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
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self, SupportsIndex, TypeGuard, TypeVar, cast, final

from treadle.capture.explain_errors import here
from treadle.capture.python_state.container_parts import member
from treadle.capture.python_state.containers.list_slices import (
    Cut,
    ListSlice,
    SliceAtCall,
    is_list_slice,
)
from treadle.capture.python_state.parts import MISSING
from treadle.capture.stored.names import NOT_STORED

T = TypeVar("T")
Contents = list[object] | dict[object, object] | set[object] | deque[object]


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """A method call of the ``at``th container with its arguments."""

    at: int
    name: str
    args: tuple[Any, ...]


TOUCH = "touch"
"""The name of an operation after which the next container is what the dict has under a key."""


@dataclass(slots=True, eq=False)
class ContainerRecorder:
    """The record of one container. ``real``: the user's own; ``current``: gets it at a call;
    ``parent``: for a container that a dict made or holds, the dict and the key."""

    log: "OperationLog"
    at: int
    label: str
    parent: tuple["ContainerRecorder", object] | None = None
    real: Contents = field(default_factory=list[object], metadata=NOT_STORED)
    # keys of a dict, members of a set
    reads: set[object] = field(default_factory=set[object], metadata=NOT_STORED)
    reads_all: bool = False
    read_at: str = field(default="", metadata=NOT_STORED)  # the user's line that reads all first
    reads_length: bool = False
    tail: int = 0  # how many entries at the end of a sequence the run has put there
    # keys that the run has set
    written: set[object] = field(default_factory=set[object], metadata=NOT_STORED)
    is_own: bool = False  # whether all that is in it was put there by the run
    is_made: bool = False  # whether the parent made it during the run
    current: Callable[[], object] | None = None
    # how many entries more than at first, whatever was there; ``None``: that depends on it
    grown: int | None = field(default=0, metadata=NOT_STORED)
    is_moved: bool = field(default=False, metadata=NOT_STORED)  # more than entries put at the end

    def note(self, name: str, *args: object, by: int | None = None) -> None:
        """Note an operation that changes it. ``by``: by how many entries it grows, if that does not
        depend on its contents."""
        self.log.operations.append(Operation(self.at, name, args))
        if by != 0:
            self.grown = None if self.grown is None or by is None else self.grown + by

    def length(self, now: int) -> object:
        """The number of its entries, ``now`` in this run: a stand-in for the number at a call, if
        each call can compute it."""
        is_known = self.is_own or self.reads_all
        instead = None if is_known or self.is_made else self.log.length_at_call(self)
        if instead is None:
            self.read(length=True)
        return now if instead is None else instead

    def read(self, *, length: bool = False) -> None:
        """Note a read of all its contents, or of their number."""
        if self.is_own:
            return
        if self.is_made and self.parent is not None:  # it matters that it was not there
            parent, key = self.parent
            parent.reads |= set() if parent.is_own else {key}
        elif length:
            self.reads_length = True
        elif not self.reads_all:
            self.reads_all, self.read_at = True, here()

    def read_key(self, key: object, name: object) -> None:
        """Note a read of the entry under a key, which has the name ``name`` in a snapshot."""
        if not self.is_own and key not in self.written:
            self.reads.add(name)

    def cleared(self) -> None:
        """Note that it was emptied."""
        self.is_own = True

    @property
    def keeps_entries(self) -> bool:
        """Whether its entries from before the run may be numbers of a call: the run has at most
        appended others, and does not depend on all of them anyway."""
        return not (self.is_own or self.is_made or self.reads_all or self.is_moved)

    @property
    def maxlen(self) -> int | None:
        """The ``maxlen`` of a deque; ``None`` for no limit."""
        return self.real.maxlen if isinstance(self.real, deque) else None

    def get(self) -> Any:
        """The user's own, at a call."""
        return self.real if self.current is None else self.current()


@dataclass(slots=True)
class OperationLog:
    """The operations of a run on containers outside it, in order."""

    operations: list[Operation] = field(default_factory=list[Operation])
    recorders: list[ContainerRecorder] = field(default_factory=list[ContainerRecorder])
    _stand_ins: list["RecordedContainer"] = field(
        default_factory=list["RecordedContainer"], metadata=NOT_STORED
    )
    _before: list[Contents] = field(default_factory=list[Contents], metadata=NOT_STORED)
    length_at_call: Callable[[ContainerRecorder], object] = field(
        default=lambda _: None, metadata=NOT_STORED
    )  # the number that stands in for a length; ``None`` where none can
    entry_at_call: Callable[[ContainerRecorder, int, object], object] = field(
        default=lambda *_: None, metadata=NOT_STORED
    )  # likewise for the number that is an entry
    numbers_at_call: Callable[[ContainerRecorder, Cut], Any] = field(
        default=lambda *_: None, metadata=NOT_STORED
    )  # likewise for all numbers that are there
    asked: Callable[[FrameType], None] = field(
        default=lambda _: None, metadata=NOT_STORED
    )  # a frame asks for a length, or goes through the entries, which may be for one number

    def stand_in(
        self, real: Contents, label: str, parent: tuple[ContainerRecorder, object] | None = None
    ) -> "RecordedContainer":
        """The stand-in for ``real`` from now on; ``settle`` fills it."""
        recorder = ContainerRecorder(self, len(self.recorders), label, parent, real)
        self.recorders.append(recorder)
        stand_in = RECORDED[type(real)](recorder)
        self._stand_ins.append(stand_in)
        self._before.append(_plain_copy(real))
        return stand_in

    def settle(self) -> None:
        """Called when all stand-ins are in their places: each gets the contents of the user's
        own."""
        for stand_in, recorder in zip(self._stand_ins, self.recorders, strict=True):
            _fill(stand_in, recorder.real)
            self._before[recorder.at] = _plain_copy(recorder.real)

    def nested(self, parent: ContainerRecorder, key: object, real: Contents) -> "RecordedContainer":
        """The stand-in for a container that a dict made under a key."""
        stand_in = self.stand_in(real, f"{parent.label}[{key!r}]", (parent, key))
        stand_in.recorder.is_made = True
        return stand_in

    def touch(self, parent: ContainerRecorder, key: object, value: object) -> object:
        """Note that ``value`` was read from a dict, which is where calls find it."""
        if is_recorded(value):
            parent.note(TOUCH, key, value, by=0)
        return value

    def now(self, at: int) -> Contents:
        """The contents of one of the stand-ins."""
        stand_in = self._stand_ins[at]
        return stand_in.inner if type(stand_in) is RecordedSet else _plain_copy(stand_in)

    def contents(self, at: int) -> list[object]:
        """The present contents of one of the stand-ins, if it exists yet."""
        if at >= len(self._stand_ins):
            return []
        now = self.now(at)
        return [*now, *now.values()] if isinstance(now, dict) else [*now]

    def is_got(self, recorder: ContainerRecorder) -> bool:
        """Whether it is read from a dict before any operation on it."""
        for operation in self.operations:
            if operation.name == TOUCH and operation.args[1].recorder is recorder:
                return True
            if operation.at == recorder.at:
                return False
        return True

    def is_complete(self, recorder: ContainerRecorder) -> bool:
        """Whether the recorded operations turn the original contents into the present ones."""
        if recorder.is_made and recorder.real:
            return False  # by another name
        again = copy.copy(self._before[recorder.at])
        for operation in self.operations:
            if operation.at == recorder.at and operation.name == TOUCH:
                assert isinstance(again, dict)
                again[operation.args[0]] = operation.args[1]
            elif operation.at == recorder.at:
                operator.methodcaller(operation.name, *operation.args)(again)
        return _identities(again) == _identities(self.now(recorder.at))


def _identities(value: Contents) -> list[int] | list[tuple[int, int]]:
    if isinstance(value, dict):
        return [(id(key), id(entry)) for key, entry in value.items()]
    return sorted(map(id, value)) if isinstance(value, set) else list(map(id, value))


def _plain_copy(value: "Contents | RecordedContainer") -> Contents:
    """A shallow copy that bypasses the methods of its class."""
    match value:
        case RecordedSet():
            return set(value.inner)
        case deque():
            return deque(deque.__iter__(value), value.maxlen)
        case list():
            return list(list.__iter__(value))
        case defaultdict():
            copied = defaultdict(value.default_factory)
            copied.update(zip(dict.keys(value), dict.values(value), strict=True))
            return copied
        case OrderedDict():
            return OrderedDict(zip(OrderedDict.keys(value), OrderedDict.values(value), strict=True))
        case dict():
            return dict(zip(dict.keys(value), dict.values(value), strict=True))
        case _:
            return set(value)


def _fill(stand_in: "RecordedContainer", real: Contents) -> None:
    if isinstance(stand_in, _RecordedMapping):
        assert isinstance(real, dict)
        for key, value in real.items():
            stand_in._kind.__setitem__(stand_in, key, value)
    elif isinstance(stand_in, RecordedSet):
        stand_in.inner = set(real)
    elif isinstance(stand_in, RecordedList):
        list.extend(stand_in, real)
    else:
        deque.extend(stand_in, real)


class _RecordedSequence:
    """The common part of lists and deques."""

    __slots__ = ()
    recorder: ContainerRecorder
    _kind: type

    def append(self, value: object) -> None:
        self.recorder.note("append", value, by=1)
        self._kind.append(self, value)
        self.recorder.tail += 1

    def extend(self, values: Iterable[object]) -> None:
        new = tuple(values)
        self.recorder.note("extend", new, by=len(new))
        self._kind.extend(self, new)
        self.recorder.tail += len(new)

    def __iadd__(self, values: Iterable[object]) -> Self:
        self.extend(values)
        return self

    def clear(self) -> None:
        self.recorder.note("clear")
        self._kind.clear(self)
        self.recorder.cleared()

    def insert(self, at: SupportsIndex, value: object) -> None:
        self._changed("insert", at, value, by=1)

    def reverse(self) -> None:
        self._changed("reverse", by=0)

    def __setitem__(self, at: object, value: Any) -> None:
        if isinstance(at, slice):
            self._changed("__setitem__", at, tuple(value))
        else:
            self._changed("__setitem__", at, value, by=0)
        if at == slice(None):
            self.recorder.cleared()

    def __delitem__(self, at: object) -> None:
        self._changed("__delitem__", at)
        if at == slice(None):
            self.recorder.cleared()

    def remove(self, value: object) -> None:
        self.recorder.read()
        self._changed("remove", value)

    def __imul__(self, times: SupportsIndex) -> Self:
        self.recorder.read()
        self._changed("__imul__", times)
        return self

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        instead = self._at_call(at) if type(at) is int else None
        if isinstance(at, slice):
            instead = self._slice(at)
        if instead is not None:
            return instead
        self._read_at(at)
        return self._entry(at)

    def __len__(self) -> int:
        self.recorder.log.asked(sys._getframe(1))  # pyright: ignore
        self.recorder.read(length=True)
        return self._kind.__len__(self)

    def __iter__(self) -> Iterator[object]:
        self.recorder.log.asked(sys._getframe(1))  # pyright: ignore
        self.recorder.read()
        return self._kind.__iter__(self)

    def __bool__(self) -> bool:
        return bool(self.recorder.length(self._kind.__len__(self)))

    def _numbers(self, at: slice = slice(None)) -> tuple[Any, list[Any]] | None:
        """Of a part what stands in for the numbers that were there before the run, and those that
        the run has put behind them; ``None`` where it has done more, or has other entries."""
        recorder, entries = self.recorder, list(self._kind.__iter__(self))
        cut = Cut(recorder.tail, recorder.maxlen, at.start, at.stop)
        instead = recorder.log.numbers_at_call(recorder, cut) if recorder.keeps_entries else None
        if instead is None:
            return None
        first = len(entries) - recorder.tail
        _, put = cut.places(len(recorder.real))
        return instead, [entries[first + place] for place in put]

    def _slice(self, at: slice) -> ListSlice | None:
        """What stands in for a part; ``None`` where its entries are not numbers of the call."""
        recorder = self.recorder
        bounds = type(at.start), type(at.stop)
        if at.step not in (None, 1) or not {*bounds} <= {int, type(None)}:
            return None
        found = self._numbers(at)
        if found is None or not found[0].are_numbers(found[1]):
            return None
        before, put = found

        def opened() -> list[Any]:
            numbers = before.each()
            if numbers is None:
                recorder.read()
                numbers = before.value
            return [*numbers, *put]

        return ListSlice(SliceAtCall(before, put, opened, recorder.log.asked))

    def _changed(self, name: str, *args: object, by: int | None = None) -> object:
        self.recorder.note(name, *args, by=by)
        self.recorder.tail, self.recorder.is_moved = 0, True
        return operator.methodcaller(f"{name}", self, *args)(self._kind)

    def _entry(self, at: SupportsIndex | slice) -> object:
        """What is there. A deque's own method asks how long it is, for a place from the end."""
        kind: Any = self._kind
        count = kind.__len__(self)
        from_end = type(at) is int and -count <= at < 0
        return kind.__getitem__(self, at + count if from_end else at)

    def _at_call(self, at: int) -> object:
        """The number that stands in for one which was there before the run; ``None`` for any other
        entry, and where the run has done more than put some at the end."""
        recorder, count = self.recorder, self._kind.__len__(self)
        was_there = -count <= at < -recorder.tail or 0 <= at < count - recorder.tail
        is_left = at >= 0 and self._kind is not list  # of a deque it may be gone
        if not recorder.keeps_entries or is_left or not was_there:
            return None
        place = at if at >= 0 else at + recorder.tail
        return recorder.log.entry_at_call(recorder, place, self._entry(at))

    def _read_at(self, at: SupportsIndex | slice) -> None:
        """Entries that the run itself has put at the end are nothing from outside."""
        if isinstance(at, slice) or not -self.recorder.tail <= operator.index(at) < 0:
            self.recorder.read()

    def _popped(self, name: str, at: int, *args: object) -> object:
        self._read_at(at)
        tail = self.recorder.tail - 1 if at == -1 else 0
        value = self._changed(name, *args, by=-1)
        self.recorder.tail = max(0, tail)
        return value


@final
class RecordedList(_RecordedSequence, list[object]):
    """Stands for a list."""

    __slots__ = ("recorder",)
    _kind = list

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def pop(self, at: SupportsIndex = -1) -> object:
        return self._popped("pop", operator.index(at), at)

    def sort(self, **named: Any) -> None:
        self[:] = sorted(self, **named)


@final
class RecordedDeque(_RecordedSequence, deque[object]):
    """Stands for a deque."""

    __slots__ = ("recorder",)
    _kind = deque

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__(maxlen=cast("deque[object]", recorder.real).maxlen)
        self.recorder = recorder

    def appendleft(self, value: object) -> None:
        self._changed("appendleft", value, by=1)

    def extendleft(self, values: Iterable[object]) -> None:
        new = tuple(values)
        self._changed("extendleft", new, by=len(new))

    def pop(self) -> object:
        return self._popped("pop", -1)

    def popleft(self) -> object:
        return self._popped("popleft", 0)

    def rotate(self, by: int = 1) -> None:
        self._changed("rotate", by, by=0)


class _RecordedMapping(dict[object, object]):
    """The common part of all dicts."""

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

    def __ior__(self, other: object) -> Self:
        self.update(other)
        return self

    def clear(self) -> None:
        self.recorder.note("clear")
        self._kind.clear(self)
        self.recorder.cleared()

    def pop(self, key: object, default: object = MISSING) -> object:
        self.recorder.read_key(key, key)
        defaults = () if default is MISSING else (default,)
        self.recorder.note("pop", key, *defaults)
        value = self._kind.pop(self, key, *defaults)
        self.recorder.written.add(key)
        return value

    def popitem(self, last: bool = True) -> tuple[object, object]:
        self.recorder.read()
        args = () if last else (False,)
        self.recorder.note("popitem", *args)
        return self._kind.popitem(self, *args)

    def setdefault(self, key: object, default: Any = None) -> object:
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

    def __getitem__(self, key: object) -> object:
        self.recorder.read_key(key, key)
        return self.recorder.log.touch(self.recorder, key, self._kind.__getitem__(self, key))

    def get(self, key: object, default: object = None) -> object:
        self.recorder.read_key(key, key)
        return self.recorder.log.touch(self.recorder, key, dict.get(self, key, default))

    def __contains__(self, key: object) -> bool:
        self.recorder.read_key(key, key)
        return dict.__contains__(self, key)


@final
class RecordedDict(_RecordedMapping):
    """Stands for a dict."""

    __slots__ = ("recorder",)
    _kind = dict

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__()
        self.recorder = recorder


@final
class RecordedOrderedDict(_RecordedMapping, OrderedDict[object, object]):
    """Stands for an ordered dict."""

    _kind = OrderedDict

    def __init__(self, recorder: ContainerRecorder) -> None:
        self.recorder = recorder
        super().__init__()

    def move_to_end(self, key: object, last: bool = True) -> None:
        self.recorder.read_key(key, key)
        self.recorder.note("move_to_end", key, last)
        OrderedDict.move_to_end(self, key, last)


@final
class RecordedDefaultDict(_RecordedMapping, defaultdict[object, object]):
    """In the place of a dict that makes what is missing: where that is a container, it does not
    matter whether it was missing."""

    __slots__ = ("recorder",)
    _kind = defaultdict

    def __init__(self, recorder: ContainerRecorder) -> None:
        super().__init__(cast("defaultdict[object, object]", recorder.real).default_factory)
        self.recorder = recorder

    def __getitem__(self, key: object) -> object:
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
            stand_in = log.nested(self.recorder, key, cast("Contents", value))
            self.recorder.grown = None
            dict.__setitem__(self, key, stand_in)
            self.recorder.written.add(key)
            return log.touch(self.recorder, key, stand_in)
        self.recorder.read_key(key, key)
        self._set(key, value)
        return value


@final
class RecordedSet(MutableSet[object]):
    """Stands for a set."""

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

    def pop(self) -> object:
        self.recorder.read()
        value = next(iter(self.inner))
        self.discard(value)
        return value

    def clear(self) -> None:
        self.recorder.note("clear")
        self.inner.clear()
        self.recorder.cleared()

    def update(self, *others: Iterable[object]) -> None:
        for members in others:
            for value in members:
                self.add(value)

    def difference_update(self, *others: Iterable[object]) -> None:
        for members in others:
            for value in set(members):
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

    def __iter__(self) -> Iterator[object]:
        self.recorder.read()
        return iter(set(self.inner))

    def __len__(self) -> int:
        self.recorder.read(length=True)
        return len(self.inner)

    @classmethod
    def _from_iterable(cls, it: Iterable[T]) -> set[T]:
        return set(it)


RecordedContainer = (
    RecordedList
    | RecordedDeque
    | RecordedDict
    | RecordedOrderedDict
    | RecordedDefaultDict
    | RecordedSet
)


def _reading(method: Callable[..., object]) -> Callable[..., object]:
    def read(self: RecordedContainer, *args: object, **named: object) -> object:
        self.recorder.read()
        return method(self, *args, **named)

    return read


def _reading_copy(name: str) -> Callable[..., object]:
    """A method that gives a container of its own: one without recorder."""

    def read(self: RecordedContainer, *args: object) -> object:
        self.recorder.read()
        return operator.methodcaller(name, *args)(_plain_copy(self))

    return read


def _reading_length(method: Callable[..., int]) -> Callable[[RecordedContainer], int]:
    def length(self: RecordedContainer) -> int:
        self.recorder.read(length=True)
        return method(self)

    return length


def _copied_deeply(self: RecordedContainer, memo: dict[int, object]) -> object:
    self.recorder.read()
    return copy.deepcopy(_plain_copy(self), memo)


def _added(self: RecordedList | RecordedDeque, other: Any) -> object:
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


def _complete(recorded: type[RecordedContainer], kind: type) -> None:
    """Every other method reads all that is in it."""
    methods = {
        name: method for base in reversed(kind.__mro__) for name, method in vars(base).items()
    }
    own = {**vars(recorded), **vars(recorded.__mro__[1])}
    for name in _READ if kind is not set else ():
        if name in methods and name not in own:
            setattr(recorded, name, _reading(methods[name]))
    for name in _COPIES_OF_SETS if kind is set else _COPIES:
        if name in methods:
            setattr(recorded, name, _reading_copy(name))
    if kind in (list, deque):
        type.__setattr__(recorded, "__radd__", _added)
    if "__len__" not in own:
        type.__setattr__(recorded, "__len__", _reading_length(methods["__len__"]))
    type.__setattr__(recorded, "__deepcopy__", _copied_deeply)
    type.__setattr__(recorded, "__hash__", None)


RECORDED: Mapping[type, type[RecordedContainer]] = {
    list: RecordedList,
    deque: RecordedDeque,
    dict: RecordedDict,
    OrderedDict: RecordedOrderedDict,
    defaultdict: RecordedDefaultDict,
    set: RecordedSet,
}
"""By the class of a container the one that stands in for it."""
for _kind, _recorded in RECORDED.items():
    _complete(_recorded, _kind)

_KINDS = frozenset(RECORDED.values())


def is_recorded(value: object) -> TypeGuard[RecordedContainer]:
    """Whether it stands in for a container of the user's."""
    return type(value) in _KINDS


def is_for_container(value: object) -> TypeGuard[RecordedContainer | ListSlice]:
    """Whether it stands in for a container of the user's, or for a slice of one."""
    return is_recorded(value) or is_list_slice(value)


def length_of_recorded(value: RecordedContainer | ListSlice) -> object:
    """``len`` of a stand-in: a number that stands in for that of a call, where each can tell it."""
    if isinstance(value, ListSlice):
        return value.length
    kept = value.inner if type(value) is RecordedSet else _plain_copy(value)
    return value.recorder.length(len(kept))


def recorded_numbers(value: object) -> tuple[Any, list[Any]] | None:
    """Of the list, slice or deque that ``value`` stands in for: what stands in for the numbers that
    were there before the run, and those behind them; ``None`` where it is none, and where each call
    could not tell."""
    if is_list_slice(value):
        return value.numbers
    return value._numbers() if isinstance(value, _RecordedSequence) else None


def as_plain(value: RecordedContainer | ListSlice) -> Contents:
    """The contents of a stand-in as a plain container; all of them count as read."""
    if isinstance(value, ListSlice):
        return value.opened()
    value.recorder.read()
    return _plain_copy(value)
