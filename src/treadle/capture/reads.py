"""What a captured run read of the Python around it, and whether a later call finds the same.

A snapshot of all that can be got from the step's function, models, optimizers, arguments, and the
globals that the code of the run names; of attributes those that were read. A call checks that the
same objects stand in the same places; where other objects stand there, whether they are of the
same kind and hold the same all the way down.
"""

import logging
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.arrays import span_of
from treadle.capture.frames import Whose, whose
from treadle.capture.introspect import Made, is_heap, parts_of
from treadle.capture.parts import (
    MISSING,
    OF_DECLARATION,
    Computed,
    Got,
    Members,
    OfFunction,
    Part,
    Sequenced,
)
from treadle.capture.plain_values import is_plain, is_same_value, plain_fact
from treadle.capture.sweep import Sweep
from treadle.capture.watching import Watches

TensorFact = tuple[Any, ...]


def tensor_fact(value: Tensor) -> TensorFact:
    """What of a tensor decides a graph: all but its numbers."""
    shape = tuple(value.shape)
    return value.dtype, shape, value.stride(), value.device, value.requires_grad


def first_of_each(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """For each tensor the position of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(each), at) for at, each in enumerate(tensors))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """Where Python keeps a value between calls: ``node``'s part ``at`` under ``name``."""

    node: "Node"
    at: int
    name: Any
    label: str

    @property
    def owner(self) -> int:
        """The id of the object that has it; of variables that of the dict they are in."""
        found = self.node.current()
        return id(found.__dict__ if type(found) is _Space else found)

    def get(self) -> Any:
        """What is there now, or ``MISSING``: also where there is an object of another kind."""
        part = self.node.part(self.at) if self.node.watched else None
        return MISSING if part is None else part.get(self.name)

    def put(self, value: Any) -> None:
        """From now on ``value`` is there; ``MISSING`` for nothing."""
        part = self.node.part(self.at)
        assert part is not None, self.label
        part.put(self.name, value)


@final
@dataclass(frozen=True, slots=True)
class Watched:
    """One part of an object, and what was in it. ``names``: those that count; ``None``: all."""

    part: Part
    names: "Names | None"
    held: dict[Any, "Entry"]
    raw: tuple[Any, ...] | None = None  # the very objects, where none of them comes and goes

    def now(self) -> dict[Any, Any]:
        """What is there of what counts."""
        return _those(self.part.now(), self.names)

    def keys_beside(self, now: dict[Any, Any], ordered: bool) -> Iterable[Any]:
        """Of ``now``, which has as many entries, the keys that stand where those held stood."""
        if not self.part.entries or isinstance(self.part, Sequenced | Members):
            return self.held
        if ordered:
            return now
        same = {key: key for key in now}
        return [same.get(key, MISSING) for key in self.held]

    def is_same(self, now: dict[Any, Any]) -> bool:
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
        return self.is_same(self.now())


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
    others: frozenset[Any]

    def __contains__(self, name: object) -> bool:
        return name not in self.others and (self.names is None or name in self.names)


_OF_PYTHON = OF_DECLARATION | {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"}
Names = frozenset[Any] | ClassNames | Without


def is_sealed(value: Any) -> bool:
    """A function that nobody here wrote, with nothing of its own that could change."""
    if not isinstance(value, FunctionType) or value.__closure__:
        return False
    if whose(value.__code__.co_filename) is Whose.USER:
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return all(map(is_plain, defaults))


def _those(found: dict[Any, Any], names: Names | None) -> dict[Any, Any]:
    if names is None:
        return found
    return {name: value for name, value in found.items() if name in names}


@final
@dataclass(slots=True, eq=False)
class Node:
    """An object with parts. ``loose``: found through its place at every call, and not held: it may
    hold tensors that are to be freed."""

    kind: type
    label: str
    value: Any
    place: Location | None = None
    loose: bool = False
    only: Any = None  # the one object that may be there
    ordered: bool = True  # whether the order of its entries counts
    asked: bool = True  # whether the step's code holds it, and not only the library's
    watched: list[Watched] = field(default_factory=list[Watched])
    getter: Callable[[], Any] | None = None  # of an argument: where it is at this call
    parts: frozenset[Any] | None = None  # of one taken apart: attributes that do not count

    @property
    def is_found_anew(self) -> bool:
        """Whether no object is held, but looked for at every call."""
        return self.loose or self.getter is not None

    def current(self) -> Any:
        """The object now."""
        if self.getter is not None:
            return self.getter()
        if self.loose and self.place is not None:
            return self.place.get()
        return self.value

    def part(self, at: int) -> Part | None:
        """One of its parts now; ``None`` where there is an object of another kind."""
        if not self.is_found_anew:
            return self.watched[at].part
        parts = parts_of(self.current(), self.label).parts
        return parts[at] if at < len(parts) else None


@final
@dataclass(frozen=True, slots=True)
class ReadValue:
    """A plain value, by what it is."""

    fact: Any


@final
@dataclass(frozen=True, slots=True)
class Same:
    """Any other object that holds nothing of interest: that very one."""

    held: Any


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """A tensor, by its type; its numbers are read at every call."""

    fact: TensorFact
    place: Location


@final
@dataclass(frozen=True, slots=True)
class Any_:
    """Whatever is there: nothing of the run depended on it but that it is of this kind."""

    kind: type


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """What can be compared as a whole, and not looked into."""

    held: Any

    def is_same(self, value: Any) -> bool:
        """Whether a reading gave the same."""
        return type(self.held) is type(value) and bool(self.held == value)


Entry = Contents | ReadValue | Same | Fact | Any_ | Node
_IDENTITIES = (CodeType, BuiltinFunctionType, Tensor, torch.Generator)
_MEMORIES: Mapping[str, tuple[str, ...]] = {
    "re": ("_cache", "_cache2"),
    "linecache": ("cache",),
    "threading": ("_active", "_limbo", "_dangling"),
    "sys": ("path_importer_cache",),
    "torch.utils.hooks": ("next_id",),
}
"""Of modules of the library, variables and attributes in which they keep what they have computed
or counted."""
_CONTAINERS = (OrderedDict, ContextVar, threading.local)
_LOADED = sys.modules
_CALLED = (type, FunctionType, ModuleType, logging.Logger)
_HELD = (
    nn.Parameter, nn.Module, Optimizer, FunctionType, type, ModuleType, CellType, MethodType, Enum,
    MappingProxyType,
)  # fmt: skip
"""What is held although tensors can be reached from it: it does not come and go with a call."""


@dataclass(frozen=True, slots=True)
class ReadNames:
    """Which attributes of which objects were read. ``read``: by the id of an object whose reading
    was watched, the names; of others those that any code of the run mentions (``None``: all).
    ``of_library``: those mentioned, for modules that come with Python and only their like used."""

    read: Mapping[int, set[str]]
    mentioned: frozenset[str] | None
    of_library: frozenset[str]
    ours: Callable[[Any], bool]  # is it an object that the compiler itself looks after?
    owner: Callable[[Any], Whose]  # of a class or a module


@final
class Reads:
    """The snapshot, with its check."""

    def __init__(
        self,
        names: ReadNames,
        *,
        bound: Iterable[Tensor] = (),
        free: Mapping[tuple[int, Any], None] | None = None,
        unordered: Iterable[int] = (),
    ) -> None:
        """``bound``: parameters, which count by identity. ``free``: by the id of a container and
        an entry, values that nothing depended on, or that are inputs at run time. ``unordered``:
        ids of dicts whose order is nobody's choice."""
        self._unordered = frozenset(unordered)
        self._names = names
        self._bound = {id(each): each for each in bound}
        self._free = dict(free or {})
        self._nodes: dict[int, Node] = {}
        self._queue: list[Node] = []
        self._order: list[Node] = []
        self._facts: list[Fact] = []
        self._same: tuple[int, ...] = ()
        self.opaque: list[str] = []
        self._sweep = Sweep()
        self._parts: list[tuple[Node, int]] = []
        self._swept: list[tuple[Node, int]] = []
        self._given: list[Node] = []  # those that a call brings
        self._places: dict[int, list[tuple[Node, int]]] = {}  # by a node's id, where it is

    # -- making

    def add(self, label: str, value: Any) -> Node | None:
        """A root, with all that hangs on it."""
        if is_plain(value) or self._names.ours(value) or isinstance(value, Tensor):
            return None
        node = self._node(label, value, None)
        self._drain()
        return node

    def add_argument(self, label: str, value: Any, getter: Callable[[], Any]) -> None:
        """An object among the arguments: at every call another one."""
        if isinstance(value, _ONLY_ITSELF) or id(value) in self._nodes:
            # The model, a part of a global, another argument: it has to be that at every call.
            node = Node(_Space, label, getter)
            self._nodes[id(getter)] = node
            self._order.append(node)
            self._watch(node, 0, Got(label, getter), None, deep=True)
            self._drain()
            return
        node = self._node(label, value, None)
        node.getter = getter
        self._drain()
        if isinstance(value, (*_IDENTITIES, Enum)) or not node.watched:
            node.only = value  # there is nothing to compare

    def add_container(
        self, label: str, value: Any, getter: Callable[[], Any], parts: frozenset[Any]
    ) -> None:
        """An argument that was taken apart: what it has beside its entries, and the attributes
        that are ``parts``. The step gets a copy, so that it may be any object."""
        node = Node(type(value), label, value, getter=getter, parts=parts)
        self._nodes[id(getter)] = node
        self._queue.append(node)
        self._order.append(node)
        self._drain()

    def add_computed(self, label: str, read: Callable[[], Any]) -> None:
        """What a call of the process' own says, which can be compared."""
        node = Node(object, label, object())
        self._nodes[id(node.value)] = node
        self._order.append(node)
        self._watch(node, 0, Computed(label, read), None, deep=False)

    def add_names(
        self, label: str, values: dict[str, Any], names: Iterable[str], deep: bool
    ) -> None:
        """Some variables of a module's globals."""
        module = _Space(values)
        node = Node(_Space, label, module)
        self._nodes[id(module)] = node
        self._order.append(node)
        part = parts_of(module, label).parts[0]
        self._watch(node, 0, part, frozenset(names), deep=deep)
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            node = self._queue.pop(0)
            self._expand(node)

    def _node(self, label: str, value: Any, place: Location | None) -> Node:
        found = self._nodes.get(id(value))
        if found is None:
            ordered = id(value) not in self._unordered
            found = Node(type(value), label, value, place, ordered=ordered)
            self._nodes[id(value)] = found
            self._queue.append(found)
            self._order.append(found)
        return found

    def _expand(self, node: Node) -> None:
        value = node.value
        made = self._made(value, node.label)
        if made.opaque and node.asked:
            self.opaque.append(f"{node.label}: {node.kind.__qualname__}")
        for at, part in enumerate(made.parts):
            names = self._names_of(value, part)
            if node.parts is not None:  # what was read of it was read of a copy
                mentioned = Without(self._names.mentioned, node.parts)
                names = frozenset() if part.entries else mentioned
            self._watch(node, at, part, names, deep=self._is_deep(value))
        kind = type(value)
        if isinstance(value, type) and is_heap(kind):
            self._node(kind.__qualname__, kind, None)  # a metaclass
        if isinstance(value, type):
            for each in value.__mro__[1:-1]:
                if is_heap(each):
                    self._node(each.__qualname__, each, None)
        if not isinstance(value, type):
            for each in kind.__mro__[:-1]:
                if each.__flags__ & 1 << 9:
                    self._node(each.__qualname__, each, None)

    def _made(self, value: Any, label: str) -> Made:
        return Made() if is_sealed(value) else parts_of(value, label)

    def _names_of(self, value: Any, part: Part) -> Names | None:
        if isinstance(value, type) and not isinstance(part, Computed):
            return ClassNames(self._names.mentioned)
        if part.entries or not part.settable:
            return None
        if isinstance(part, OfFunction):
            return None
        if isinstance(value, CellType):
            return None
        known = self._names.read.get(id(value))
        if known is not None and isinstance(value, Optimizer):
            return frozenset(known - {"state"})  # its values are inputs
        if known is not None:
            return frozenset(known)
        if isinstance(value, ModuleType) and self._names.owner(value) is Whose.STDLIB:
            return self._names.of_library
        return self._names.mentioned

    def _is_deep(self, value: Any) -> bool:
        """Whether what it holds is followed: not of classes and modules of torch's and the
        library's."""
        if isinstance(value, type | ModuleType):
            known = id(value) in self._names.read  # what was read of it is followed
            return known or self._names.owner(value) >= Whose.INSTALLED
        return True

    def _watch(self, node: Node, at: int, part: Part, names: Names | None, *, deep: bool) -> None:
        held: dict[Any, Entry] = {}
        for name, value in _those(part.now(), names).items():
            if isinstance(part, Computed):
                held[name] = Contents(value)
                continue
            if part.entries and not is_plain(name) and not isinstance(part, Members):
                self._node(part.where(name), name, None)  # keys may change inside
            place = Location(node, at, name, part.where(name))
            if _is_memory(place) or (place.owner, name) in self._free:
                held[name] = Any_(type(value))
            else:
                held[name] = self._entry(place, value, deep=deep)
        node.watched.append(Watched(part, names, held))

    def _entry(self, place: Location, value: Any, *, deep: bool) -> Entry:
        if is_plain(value):
            return ReadValue(plain_fact(value))
        if isinstance(value, Tensor) and id(value) not in self._bound:
            fact = Fact(tensor_fact(value), place)
            self._facts.append(fact)
            return fact
        if id(value) in self._bound and not isinstance(place.node.value, Tensor):
            return self._node(place.label, value, place)  # its attributes; its type is in the key
        if isinstance(value, _IDENTITIES) or is_sealed(value) or self._names.ours(value):
            return Same(value)
        if isinstance(value, type) and not is_heap(value):
            return Same(value)
        named = isinstance(value, type) and isinstance(place.node.value, ModuleType | _Space)
        if not deep and not named and not self._is_state(place, value):
            return Same(value)  # functions of the library's are what they are
        found = self._node(place.label, value, place)
        kind = type(place.node.value)
        holder = place.node.value if isinstance(place.node.value, ModuleType) else kind
        theirs = not isinstance(holder, type) or is_heap(holder)
        if not place.node.asked or (theirs and self._names.owner(holder) < Whose.USER):
            found.asked = False
        return found

    def _is_state(self, place: Location, value: Any) -> bool:
        """Whether a variable of the library's holds what others may have put there: their objects
        and functions, the environment, hooks of all modules, the library's own modules. Dicts and
        lists of torch's do not count: those that users set are switches or ordered, the others are
        memories."""
        if type(value) in _CONTAINERS or self._is_theirs(value):
            return True
        module = place.node.value if isinstance(place.node.value, ModuleType) else None
        if isinstance(place.node.value, _Space):
            module = _LOADED.get(vars(place.node.value).get("__name__", ""))
        if module is None or self._names.owner(module) is not Whose.STDLIB:
            return False
        if isinstance(value, ModuleType):
            return self._names.owner(value) is Whose.STDLIB
        return not isinstance(value, _CALLED)

    def _is_theirs(self, value: Any) -> bool:
        """Whether users or what they installed made it, or its class."""
        if isinstance(value, FunctionType):
            return whose(value.__code__.co_filename) >= Whose.INSTALLED
        kind = cast("type[Any]", value if isinstance(value, type) else type(value))
        return is_heap(kind) and self._names.owner(kind) >= Whose.INSTALLED

    def settle(self) -> None:
        """After the last root: which objects are held, and what each call looks at."""
        for node in self._order:
            node.loose = node.place is not None and self._comes_and_goes(node, set())
        for node in self._order:
            for at, watched in enumerate(node.watched):
                node.watched[at] = replace(watched, raw=self._raw(node, watched))
        self._same = self._aliases()
        self._arrange()

    def _raw(self, node: Node, watched: Watched) -> tuple[Any, ...] | None:
        there = watched.held.values()
        if node.loose or node.getter is not None or any(
            isinstance(each, Fact | Any_) or (isinstance(each, Node) and each.is_found_anew)
            for each in there
        ):  # fmt: skip
            return None
        return tuple(watched.now().values())

    def _comes_and_goes(self, node: Node, seen: set[int]) -> bool:
        if id(node) in seen or isinstance(node.value, _HELD):
            return False
        seen.add(id(node))
        return any(
            isinstance(each, Fact) or (isinstance(each, Node) and self._comes_and_goes(each, seen))
            for watched in node.watched
            for each in watched.held.values()
        )

    def _arrange(self) -> None:
        """The flat lists of the fast check."""
        self._sweep, self._swept, self._parts = Sweep(), [], []
        self._given = [node for node in self._order if node.getter is not None]
        for node in self._order:
            if node.getter is not None or node.loose:
                continue
            if type(node.value) is not _Space:  # one of those here
                self._sweep.add_type(node.value)
            for at, watched in enumerate(node.watched):
                if any(isinstance(e, Node) and e.is_found_anew for e in watched.held.values()):
                    self._swept.append((node, at))
                elif self._sweep.add(watched.part, node.value, len(self._parts)):
                    self._parts.append((node, at))
                elif watched.part.settable or not isinstance(node.value, tuple | frozenset):
                    self._swept.append((node, at))
        self._sweep.settle()
        for node in self._order:
            if node.loose:
                node.value = None
                for at, watched in enumerate(node.watched):
                    node.watched[at] = replace(watched, part=Part(watched.part.label))
            elif node.getter is not None:
                node.value = None

    # -- checking

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        match = _Matched(self._nodes)
        if any(True for _ in self._differences(match)):
            return False
        self._sweep.accept()
        for node, at in match.renewed:
            self._renew(node, at, node.watched[at].part)
        if moved := match.held():
            self._rebind(moved)
        return True

    def join(self, watches: Watches) -> bool:
        """All of it, while the very same objects are there; whether that can be said."""
        if self._given:
            return False
        swept = [node.watched[at] for node, at in self._swept]
        if any(each.raw is None and not isinstance(each.part, Computed) for each in swept):
            return False
        self._sweep.join(watches)
        watches.asked += [each.is_now_same for each in swept]
        watches.asked += [self._are_facts_same] if self._facts else []
        return True

    def _are_facts_same(self) -> bool:
        return not any(True for _ in self._other_facts())

    def _other_facts(self) -> Iterator[tuple[str, Location | None]]:
        """Tensors that are no longer of the same type, or not the same ones as others."""
        for fact in self._facts:
            now = fact.place.get()
            if not isinstance(now, Tensor) or tensor_fact(now) != fact.fact:
                yield f"{fact.place.label}: {words_of(fact)} became {_words(now)}", None
            elif id(now) in self._bound:
                yield f"{fact.place.label}: a tensor became a parameter", None
        if self._aliases() != self._same:
            yield _OTHER_ALIASES, None

    def changed(self) -> list[tuple[str, Location | None]]:
        """What is different now, in words, and where another number of the same kind stands;
        empty if nothing is."""
        return list(self._differences(_Matched(self._nodes)))

    def _differences(self, match: "_Matched") -> Iterator[tuple[str, Location | None]]:
        written: list[tuple[Node, int]] = []
        if not self._sweep.is_same():
            for value, kind in self._sweep.other_types():
                yield f"a {kind.__name__} became a {type(value).__name__}", None
            for value in self._sweep.other_spaces():
                yield f"a {type(value).__name__} got another __dict__", None
            written = [self._parts[at] for at in self._sweep.differing()]
        for node, part in (*written, *self._swept):
            watched = node.watched[part]
            now = watched.now()
            if watched.is_same(now):
                continue
            if match.part(node, part, watched, now):
                if not isinstance(watched.part, Computed):  # it is another object at each reading
                    match.renewed.append((node, part))
            else:
                yield match.said()
        for node in self._given:
            if not match.object(node, node.current()):
                yield match.said()
        yield from self._other_facts()
        if not all(match.holds_throughout(node, at) for node, at in self._places_of(match.held())):
            yield match.said()

    def _places_of(self, moved: Iterable[tuple[Node, Any]]) -> list[tuple[Node, int]]:
        """The parts in which nodes are, as values or as keys."""
        those = {id(node) for node, _ in moved}
        if those and not self._places:
            for node in self._order:
                for at, watched in enumerate(node.watched):
                    there = [each for each in watched.held.values() if isinstance(each, Node)]
                    there += [self._nodes[id(k)] for k in watched.held if id(k) in self._nodes]
                    for each in there:
                        self._places.setdefault(id(each), []).append((node, at))
        return [place for each in those for place in self._places.get(each, ())]

    def _aliases(self) -> tuple[int, ...]:
        return first_of_each(fact.place.get() for fact in self._facts)

    def _rebind(self, moved: Iterable[tuple[Node, Any]]) -> None:
        """Equal objects stand where others stood: from now on these."""
        for node, value in moved:
            self._nodes.pop(id(node.value), None)
            self._nodes[id(value)] = node
            node.value = value
            parts = parts_of(value, node.label).parts
            for at, part in enumerate(parts[: len(node.watched)]):
                self._renew(node, at, part)
        self._arrange()

    def _renew(self, node: Node, at: int, part: Part) -> None:
        """Equal objects are in a part: from now on these, keys included."""
        fresh = replace(node.watched[at], part=part)
        keys = fresh.keys_beside(fresh.now(), node.ordered)
        fresh = replace(fresh, held=dict(zip(keys, fresh.held.values(), strict=True)))
        node.watched[at] = replace(fresh, raw=self._raw(node, fresh))

    # -- what was found

    def places(self) -> dict[int, Location]:
        """By its id, where a tensor was found."""
        found: dict[int, Location] = {}
        for fact in self._facts:
            found.setdefault(id(fact.place.get()), fact.place)
        return found

    def has_memory_in(self, start: int, end: int) -> bool:
        """Whether an array or another buffer of the snapshot has memory between two addresses."""
        spans = (span_of(node.current()) for node in self._order)
        return any(span is not None and span[0] < end and start < span[1] for span in spans)

    def place_of(self, owner: Any, at: int, name: Any, label: str) -> Location | None:
        """A place of an object that is part of the snapshot."""
        node = self._nodes.get(id(owner))
        if node is None or at >= max(1, len(node.watched)):
            return None
        return Location(node, at, name, label)

    def __len__(self) -> int:
        return sum(len(each.held) for node in self._order for each in node.watched)


def _is_memory(place: Location) -> bool:
    """Whether a variable or an attribute decides nothing: of the library's the known ones. One that
    is not known costs a variant, and says so."""
    owner = place.node.value
    if not isinstance(owner, type | ModuleType | _Space):
        return False
    module = vars(owner).get("__module__" if isinstance(owner, type) else "__name__")
    return type(module) is str and place.name in _MEMORIES.get(module, ())


def argument_place(label: str) -> Location:
    """Stands for a leaf of the arguments, which has a place only during a call."""
    return Location(Node(dict, label, {}), 0, label, label)


class _Space:
    """A module's globals, as an object with attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


@dataclass(slots=True)
class _Matched:
    """One comparison of what is there with what was: which object stands for which."""

    nodes: Mapping[int, Node]
    moved: dict[int, tuple[Node, Any]] = field(default_factory=dict[int, tuple[Node, Any]])
    words: str = ""
    number: Location | None = None
    renewed: list[tuple[Node, int]] = field(default_factory=list[tuple[Node, int]])
    _taken: dict[int, Node] = field(default_factory=dict[int, Node])

    def said(self) -> tuple[str, Location | None]:
        """The words of the last refusal, once."""
        words, number = self.words, self.number
        self.words, self.number = "", None
        return words or "an object outside of the step is another one", number

    def held(self) -> list[tuple[Node, Any]]:
        """What stands for another, but for what is found anew at every call."""
        return [each for each in self.moved.values() if not each[0].is_found_anew]

    def holds_throughout(self, node: Node, at: int) -> bool:
        """Whether in one part stands what stands for another everywhere: an object that was in two
        places is so still. (Tuples are what is in them.)"""
        value = self._now(node)
        if value is MISSING:
            return True  # a place that no longer counts
        watched = node.watched[at]
        is_held = value is node.value and not node.is_found_anew
        part = watched.part if is_held else parts_of(value, node.label).parts[at]
        now = _those(part.now(), watched.names)
        values = self._beside(node, watched, now)
        if values is None:
            return self._other_names(watched, now)
        keys = watched.keys_beside(now, node.ordered)
        for key, entry, beside, there in zip(
            watched.held, watched.held.values(), keys, values, strict=True
        ):
            known = None if is_plain(key) else self.nodes.get(id(key))
            if not (self._is_in_place(known, beside) and self._is_in_place(entry, there)):
                self.words = f"{watched.part.where(key)}: {_PARTED}"
                return False
        return True

    def _now(self, node: Node) -> Any:
        return self.moved[id(node)][1] if id(node) in self.moved else node.current()

    def _is_in_place(self, entry: Entry | None, value: Any) -> bool:
        if not isinstance(entry, Node) or entry.is_found_anew or id(entry) not in self.moved:
            return True
        stands = self.moved[id(entry)][1]
        return stands is value or _are_one(stands, value)

    def part(self, node: Node, at: int, watched: Watched, now: dict[Any, Any]) -> bool:
        """Whether a part holds the same under the same names, in the same order."""
        values = self._beside(node, watched, now)
        if values is None:
            return self._other_names(watched, now)
        for (name, entry), value in zip(watched.held.items(), values, strict=True):
            if self._entry(entry, value):
                continue
            label = watched.part.where(name) if type(watched.part) is not Part else node.label
            self.words = self.words or f"{label}: {words_of(entry)} became {_words(value)}"
            is_number = isinstance(entry, ReadValue) and entry.fact[0] is type(value) in (
                int,
                float,
            )
            # (Of what is taken apart the step has a copy, in which nothing is put.)
            if is_number and watched.part.settable and node.parts is None:
                self.number = Location(node, at, name, label)
            return False
        return True

    def _beside(self, node: Node, watched: Watched, now: dict[Any, Any]) -> Iterable[Any] | None:
        """The values that stand where those that were held stood; ``None`` for other names, or
        another order where that counts."""
        held = watched.held
        if len(now) != len(held):
            return None
        if isinstance(watched.part, Sequenced | Members):
            return now.values() if list(now) == list(held) else None
        if not watched.part.entries:
            return map(now.__getitem__, held) if now.keys() == held.keys() else None
        keys = list(watched.keys_beside(now, node.ordered))
        pairs = zip(held, keys, strict=True)
        same = all(a is b or is_same_value(a, b) or self._stands_for(a, b) for a, b in pairs)
        return [now[key] for key in keys] if same else None

    def _stands_for(self, key: Any, other: Any) -> bool:
        """Whether another object may be the key that this one was."""
        node = None if is_plain(key) else self.nodes.get(id(key))
        return node is not None and self.object(node, other)

    def _other_names(self, watched: Watched, now: dict[Any, Any]) -> bool:
        label = watched.part.label
        for name in {**watched.held, **now}:
            if name not in now or name not in watched.held:
                if watched.part.settable and not watched.part.entries:
                    label = watched.part.where(name)
                before = words_of(watched.held[name]) if name in watched.held else "nothing"
                after = _words(now[name]) if name in now else "nothing"
                self.words = f"{label}: {before} became {after}"
                if watched.part.entries:
                    self.words = f"{label} has other entries"
                return False
        self.words = f"{label} is in another order"
        return False

    def _entry(self, entry: Entry, value: Any) -> bool:
        match entry:
            case ReadValue(fact):
                return is_plain(value) and plain_fact(value) == fact
            case Contents():
                return entry.is_same(value)
            case Same(held):
                return held is value
            case Fact(fact):
                return isinstance(value, Tensor) and tensor_fact(value) == fact
            case Any_(kind):
                return type(value) is kind
            case Node():
                return self.object(entry, value)

    def object(self, node: Node, value: Any) -> bool:
        """Whether an object is what a node says; itself, or another that is equal all through."""
        if value is node.value and node.getter is None and not node.loose:
            return True
        if type(value) is not node.kind or (node.only is not None and value is not node.only):
            return False
        known = self.moved.get(id(node))
        if known is not None and known[1] is value:
            return True
        if known is not None and not isinstance(value, tuple | frozenset):
            return False
        if isinstance(value, _ONLY_ITSELF) or not (node.watched or node.only):
            return False  # of what has no parts there is nothing to compare
        if node.parts is None and not isinstance(value, tuple | frozenset | MethodType | CellType):
            other = self._taken.get(id(value)) or self.nodes.get(id(value))
            if other is not None and other is not node and not other.loose and other.getter is None:
                return False
            self._taken[id(value)] = node
        self.moved[id(node)] = node, value
        parts = parts_of(value, node.label).parts
        if len(parts) < len(node.watched):
            return False
        return all(
            self.part(
                node, at, Watched(part, each.names, each.held), _those(part.now(), each.names)
            )
            for at, (part, each) in enumerate(zip(parts, node.watched, strict=False))
        )


def _are_one(one: Any, other: Any) -> bool:
    """Whether they are tuples or frozen sets of the very same objects, or of equal plain values."""
    if not isinstance(one, tuple | frozenset) or type(one) is not type(other):
        return one is other or is_same_value(one, other)
    pairs = cast("tuple[Iterable[Any], Iterable[Any]]", (one, other))
    return len(one) == len(other) and all(map(_are_one, *pairs))


_PARTED = "an object that stood in several places is another one in some of them"
_OTHER_ALIASES = "tensors outside of the step that were one are several, or the other way round"
_ONLY_ITSELF = (Tensor, type, ModuleType, MappingProxyType, Optimizer, Enum)
"""Objects that no other can stand for."""


def words_of(entry: Entry) -> str:
    """What was there, in words."""
    match entry:
        case ReadValue((_, value)) if isinstance(value, str) and not isinstance(entry.fact[0], str):
            return value if entry.fact[0] in (float, complex, slice) else repr(value)
        case ReadValue((_, value)):
            return repr(value)
        case Fact(fact):
            return f"a tensor {list(fact[1])} of {fact[0]}"
        case Node():
            return f"a {entry.kind.__name__}"
        case Contents():
            return "its contents"
        case Same(held):
            return _words(held)
        case Any_(kind):
            return f"a {kind.__name__}"
        case _:
            return "another value"


def _words(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if is_plain(value):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
