"""The reads of a step as a graph of objects: a node is an object with its parts, an entry is the
value under a name of a part.
"""

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from treadle.capture.explain_errors import here, refused_nested
from treadle.capture.python_state.computed_parts import Computed
from treadle.capture.python_state.container_parts import Members, Sequenced
from treadle.capture.python_state.introspect import parts_of
from treadle.capture.python_state.parts import MISSING, OF_DECLARATION, Attributes, Part, Reading
from treadle.capture.python_state.plain_values import PlainFact, is_plain
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.fake import PLAIN_CLASSES, users_class
from treadle.util.errors import with_article

TensorFact = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], object, bool]
"""Dtype, shape, strides, device (of a DTensor with its layout), whether it wants a gradient."""


def tensor_fact(value: Tensor) -> TensorFact:
    """The properties of a tensor that decide a graph: everything except its values."""
    try:
        shape = tuple(value.shape)
    except RuntimeError:
        if not value.is_nested:  # only such a tensor has no list of sizes
            raise
        raise refused_nested("receives a nested tensor", here()) from None
    place = value.device if type(value) in PLAIN_CLASSES else place_of_tensor(value)
    return value.dtype, shape, value.stride(), place, value.requires_grad


def place_of_tensor(value: Tensor) -> object:
    """Its device; of a DTensor also its mesh and placements, and the class of one whose class is
    not PyTorch's own."""
    layout = layout_of(value)
    if layout is not None:
        return value.device, layout.spec
    kind = users_class(value)
    return value.device if kind in PLAIN_CLASSES else (value.device, kind)


def first_of_each(tensors: Iterable[object]) -> tuple[int, ...]:
    """For each tensor the position of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(map(first.setdefault, map(id, tensors), itertools.count()))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """Where Python keeps a value between calls: ``node``'s part ``at`` under ``name``.
    ``rooted``: the object is looked for from a root each time, so that another one may stand in its
    place."""

    node: "Node"
    at: int
    name: object
    label: str
    rooted: bool = False

    @property
    def keeper(self) -> object:
        """The object that has it; of variables a ``Space``."""
        return self.node.from_root() if self.rooted else self.node.current()

    @property
    def holder(self) -> object:
        """Likewise; of variables the dict they are in."""
        owner = self.keeper
        return owner.__dict__ if type(owner) is Space else owner

    @property
    def owner(self) -> int:
        """The id of that."""
        return id(self.holder)

    def get(self) -> Any:
        """The value there now, or ``MISSING``, also if the object has another type."""
        part = self._part() if self.node.watched else None
        return MISSING if part is None else part.get(self.name)

    def _part(self) -> Part | None:
        if not self.rooted:
            return self.node.part(self.at)
        parts = parts_of(self.node.from_root(), self.node.label).parts
        return parts[self.at] if self.at < len(parts) else None

    def put(self, value: object) -> None:
        """Put ``value`` there; ``MISSING`` removes it. A tuple is replaced by another one."""
        part, around = self._part(), self.around
        assert part is not None, self.label
        if around is None:
            part.put(self.name, value)
        else:
            entries = {**part.now(), self.name: value}
            around.put(tuple.__new__(self.node.kind, entries.values()))

    @property
    def around(self) -> "Location | None":
        """For an entry of a tuple, the place of the tuple."""
        place = self.node.place if is_rebuilt(self.node.kind) else None
        return None if place is None else replace(place, rooted=self.rooted)

    @property
    def outermost(self) -> "Location":
        """The place that is written in order to put a value here."""
        around = self.around
        return self if around is None else around.outermost

    @property
    def is_settable(self) -> bool:
        """Whether a value can be put here. (Of containers among the arguments the step has
        copies.)"""
        outermost = self.outermost
        part = outermost.node.watched[outermost.at].part
        return part.settable and outermost.node.parts is None


def is_rebuilt(kind: type) -> bool:
    """Whether it is that of tuples that are no more than their entries: with another entry they are
    others."""
    return kind is tuple or (issubclass(kind, tuple) and "_fields" in vars(kind))


@final
@dataclass(frozen=True, slots=True)
class Watched:
    """One part of an object, and what was in it. ``names``: those that count; ``None``: all."""

    part: Part
    names: "Names | None"
    held: dict[object, "Entry"]
    raw: tuple[object, ...] | None = None  # the very objects, where none of them comes and goes

    def now(self) -> Reading:
        """The present values under the names that count."""
        return of_names(self.part.now(), self.names)

    def keys_beside(self, now: Reading, ordered: bool) -> Iterable[object]:
        """Of ``now``, which has as many entries, the keys that stand where those held stood."""
        if not self.part.entries or isinstance(self.part, Sequenced | Members):
            return self.held
        if ordered:
            return now
        same = {key: key for key in now}
        return [same.get(key, MISSING) for key in self.held]

    def is_same(self, now: Reading) -> bool:
        """The very same objects under the same names: the fast answer."""
        if isinstance(self.part, Computed):
            held = self.held[""]
            return isinstance(held, Contents) and held.is_same(now[""])
        if self.raw is None or len(now) != len(self.raw):
            return False
        if not all(map(operator.is_, now.values(), self.raw)):
            return False
        return isinstance(self.part, Sequenced) or all(map(operator.is_, now, self.held))

    def is_now_same(self) -> bool:
        """Likewise, of what is there."""
        if type(self.part) is Computed:  # without a reading that is made for it
            held = self.held[""]
            return isinstance(held, Contents) and held.is_same(self.part.read())
        return self.is_same(self.now())

    def is_untouched(self) -> bool:
        """Likewise, in the time of what counts, and not of all that is there."""
        names = self.names
        if (
            type(self.part) is not Attributes
            or self.raw is None
            or not isinstance(names, frozenset)
        ):
            return self.is_now_same()
        values = self.part.values
        if not all(values.get(k, MISSING) is v for k, v in zip(self.held, self.raw, strict=True)):
            return False
        return values.keys().isdisjoint(names - self.held.keys())


@final
@dataclass(frozen=True, slots=True)
class ClassNames:
    """Of a class: what code mentions, and what Python calls by itself."""

    mentioned: frozenset[str] | None

    def __contains__(self, name: object) -> bool:
        if self.mentioned is None or name in self.mentioned:
            return name not in _OF_PYTHON
        return str(name).startswith("__") and str(name).endswith("__") and name not in _OF_PYTHON


@final
@dataclass(frozen=True, slots=True)
class Without:
    """Names but for some. ``names`` is ``None``: all but those."""

    names: "Names | None"
    others: frozenset[object]

    def __contains__(self, name: object) -> bool:
        return name not in self.others and (self.names is None or name in self.names)


_OF_PYTHON = OF_DECLARATION | {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"}
Names = frozenset[object] | ClassNames | Without


def of_names(reading: Reading, names: Names | None) -> Reading:
    """Of a reading what stands under one of ``names``; all of it for ``None``."""
    if names is None:
        return reading
    return {name: value for name, value in reading.items() if name in names}


@final
@dataclass(frozen=True, slots=True)
class ObjectReads:
    """What a run read of one object. ``names``: its attributes that were read; ``None`` where
    reading them was not watched. ``whole``: all of them were. ``entries``: of a container that the
    step changes, those that were read. ``ordered``: whether the order of its entries counts.
    ``free``: the names whose values decided nothing, or are inputs at run time."""

    names: frozenset[str] | None = None
    whole: bool = False
    entries: frozenset[object] | None = None
    ordered: bool = True
    free: frozenset[object] = frozenset()


@final
@dataclass(slots=True, eq=False)
class Node:
    """An object with parts. ``loose``: found through its place at every call, and not held: it may
    hold tensors that are to be freed."""

    kind: type
    label: str
    value: object
    place: Location | None = None
    loose: bool = False
    only: object = None  # the one object that may be there
    read: ObjectReads = ObjectReads()  # what counts of it
    asked: bool = True  # whether the step's code holds it, and not only the library's
    watched: list[Watched] = field(default_factory=list[Watched])
    getter: Callable[[], object] | None = None  # of an argument: where it is at this call
    parts: frozenset[object] | None = None  # of one taken apart: attributes that do not count
    note: str = ""  # of a container that the step changes: why its entries count

    @property
    def is_found_anew(self) -> bool:
        """Whether the object is not held, but looked up at every call."""
        return self.loose or self.getter is not None

    def current(self) -> object:
        """The object now."""
        if self.getter is not None:
            return self.getter()
        if self.loose and self.place is not None:
            return self.place.get()
        return self.value

    def from_root(self) -> Any:
        """The object that stands in its place now, from the root on; ``MISSING`` where there is
        one of another kind."""
        if self.getter is not None:
            value = self.getter()
        else:
            value = self.value if self.place is None else replace(self.place, rooted=True).get()
        return value if type(value) is self.kind else MISSING

    def part(self, at: int) -> Part | None:
        """One of its parts now; ``None`` where there is an object of another kind."""
        if not self.is_found_anew:
            return self.watched[at].part
        parts = parts_of(self.current(), self.label).parts
        return parts[at] if at < len(parts) else None


@final
@dataclass(frozen=True, slots=True)
class ReadValue:
    """A plain value, compared by value."""

    fact: PlainFact


@final
@dataclass(frozen=True, slots=True)
class Same:
    """Any other object without relevant contents, compared by identity."""

    held: object


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """A tensor, by its type; its numbers are read at every call."""

    fact: TensorFact
    place: Location


@final
@dataclass(frozen=True, slots=True)
class OfKind:
    """Any value of this type, because the run depended on nothing else; with ``object``, any value
    at all."""

    kind: type


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """Contents that are compared as a whole."""

    held: object

    def is_same(self, value: object) -> bool:
        """Whether a reading gave the same."""
        return type(self.held) is type(value) and bool(self.held == value)


Entry = Contents | ReadValue | Same | Fact | OfKind | Node


class Space:
    """A module's globals, as an object with attributes."""

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__ = values


def argument_place(label: str) -> Location:
    """Stands for a leaf of the arguments, which has a place only during a call."""
    return Location(Node(dict, label, {}), 0, label, label)


def words_of(entry: Entry) -> str:
    """The earlier value, in words."""
    match entry:
        case ReadValue((_, value)) if isinstance(value, str) and not isinstance(entry.fact[0], str):
            return value if entry.fact[0] in (float, complex, slice) else repr(value)
        case ReadValue((_, value)):
            return repr(value)
        case Fact(fact):
            return f"a tensor {list(fact[1])} of {fact[0]}"
        case Node():
            return with_article(entry.kind.__name__)
        case Contents(held):
            return repr(held) if is_plain(held) else "its contents"
        case Same(held):
            return words_of_value(held)
        case OfKind(kind):
            return with_article(kind.__name__)
        case _:
            return "another value"


def words_of_value(value: object) -> str:
    """The present value, in words."""
    if value is MISSING:
        return "nothing"
    if is_plain(value):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, list | tuple | dict | set):
        return f"{with_article(type(value).__name__)} of {len(value)}"
    return with_article(type(value).__name__)
