"""What a captured run read of the Python around it, and whether a later call finds the same.

A snapshot of all that can be got from the step's function, models, optimizers, arguments, and the
globals that the code of the run names; of attributes those that were read. A call checks that the
same objects stand in the same places; where other objects stand there, whether they are of the
same kind and hold the same all the way down.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from functools import cached_property
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.introspect import ObjectLayout, is_heap, parts_of
from treadle.capture.python_state.parts import (
    Computed,
    Members,
    Part,
    Referent,
)
from treadle.capture.python_state.plain_values import is_plain, plain_fact
from treadle.capture.python_state.reads.identity_guards import IdentityGuards
from treadle.capture.python_state.reads.object_graph import (
    Contents,
    Entry,
    Fact,
    Location,
    Names,
    Node,
    ObjectReads,
    OfKind,
    ReadValue,
    Same,
    Space,
    Watched,
    first_of_each,
    of_names,
    tensor_fact,
    words_of,
    words_of_value,
)
from treadle.capture.python_state.reads.object_match import (
    ONLY_ITSELF,
    AlikePart,
    Match,
    comes_and_goes,
)
from treadle.capture.python_state.reads.read_names import ReadNames, is_memory, is_sealed
from treadle.capture.python_state.virtual_subclasses import VirtualSubclasses, existing_classes
from treadle.capture.symbolic.arrays.arrays import span_of
from treadle.compat.distributed.collectives import HANDLES
from treadle.guards.watching import Watches

IDENTITIES = (CodeType, BuiltinFunctionType, Tensor, torch.Generator, *HANDLES)
"""What no equal object can stand for."""
_HELD = (
    nn.Parameter, nn.Module, Optimizer, FunctionType, type, ModuleType, CellType, MethodType, Enum,
    MappingProxyType,
)  # fmt: skip
"""What is held although tensors can be reached from it: it does not come and go with a call."""
_OTHER_ALIASES = "tensors outside of the step that were one are several, or the other way round"


@final
class Reads:
    """The snapshot, with its check."""

    def __init__(
        self,
        names: ReadNames,
        *,
        bound: Iterable[Tensor] = (),
    ) -> None:
        """``bound``: parameters, which count by identity."""
        self._names = names
        self._bound = {id(tensor): tensor for tensor in bound}
        self._nodes: dict[int, Node] = {}
        self._queue: list[Node] = []
        self._order: list[Node] = []
        self._facts: list[Fact] = []
        self._same: tuple[int, ...] = ()
        self.opaque: list[str] = []
        self.of_objects: list[ObjectReads] = []  # what was read of each that it met, in order
        self._sweep = IdentityGuards()
        self._parts: list[tuple[Node, int]] = []
        self._swept: list[tuple[Node, int]] = []
        self._given: list[Node] = []  # those that a call brings
        self._places: dict[int, list[tuple[Node, int]]] = {}  # by a node's id, where it is

    @cached_property
    def _classes(self) -> frozenset[int]:
        """All that there are now that the run has ended."""
        return existing_classes()

    # -- making

    def add(self, label: str, value: object) -> Node | None:
        """A root, with all that hangs on it."""
        if is_plain(value) or self._names.ours(value) or isinstance(value, Tensor):
            return None
        node = self._node(label, value, None)
        self._drain()
        return node

    def add_argument(self, label: str, value: object, getter: Callable[[], object]) -> None:
        """An object among the arguments: at every call another one."""
        if isinstance(value, ONLY_ITSELF) or id(value) in self._nodes:
            # The model, a part of a global, another argument: it has to be that at every call.
            self.add_found(label, getter)
            return
        node = self._node(label, value, None)
        node.getter = getter
        self._drain()
        if isinstance(value, (*IDENTITIES, Enum)) or not node.watched:
            node.only = value  # there is nothing to compare

    def add_found(self, label: str, getter: Callable[[], object]) -> None:
        """What ``getter`` finds at every call: the same object, an equal value, or a tensor of the
        same type."""
        node = Node(Space, label, getter)
        self._nodes[id(getter)] = node
        self._order.append(node)
        self._watch(node, 0, Referent(label, getter), None, deep=True)
        self._drain()

    def add_container(
        self, label: str, value: object, getter: Callable[[], object], parts: frozenset[object]
    ) -> None:
        """An argument that was taken apart: what it has beside its entries, and the attributes
        that are ``parts``. The step gets a copy, so that it may be any object."""
        node = Node(type(value), label, value, getter=getter, parts=parts)
        self._nodes[id(getter)] = node
        self._queue.append(node)
        self._order.append(node)
        self._drain()

    def add_computed(self, label: str, read: Callable[[], object]) -> None:
        """What a call of the process' own says, which can be compared."""
        node = Node(object, label, object())
        self._nodes[id(node.value)] = node
        self._order.append(node)
        self._watch(node, 0, Computed(label, read), None, deep=False)

    def add_names(
        self, label: str, values: dict[str, object], names: Iterable[str], deep: bool
    ) -> None:
        """Some variables of a module's globals."""
        module = Space(values)
        node = Node(Space, label, module, read=self._read_of(values))
        self._nodes[id(module)] = node
        self._order.append(node)
        part = parts_of(module, label).parts[0]
        self._watch(node, 0, part, frozenset(names), deep=deep)
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            node = self._queue.pop(0)
            self._expand(node)

    def _node(self, label: str, value: object, place: Location | None) -> Node:
        node = self._nodes.get(id(value))
        if node is None:
            node = Node(type(value), label, value, place, read=self._read_of(value))
            self._nodes[id(value)] = node
            self._queue.append(node)
            self._order.append(node)
        return node

    def _read_of(self, value: object) -> ObjectReads:
        reads = self._names.of(value)
        self.of_objects.append(reads)
        return reads

    def _expand(self, node: Node) -> None:
        value = node.value
        parts = self._made(value, node.label)
        if parts.opaque and node.asked:
            self.opaque.append(f"{node.label}: {node.kind.__qualname__}")
        for at, part in enumerate(parts.parts):
            names = self._names.of_part(value, part, node.read)
            if node.parts is not None:  # what was read of it was read of a copy
                copied = self._names.of_copy(node.kind, node.parts)
                names = frozenset() if part.entries else copied
            deep = self._names.is_followed(value, node.read)
            self._watch(node, at, part, names, deep=deep)
        kind = type(value)
        if isinstance(value, type) and is_heap(kind):
            self._node(kind.__qualname__, kind, None)  # a metaclass
        if isinstance(value, type):
            for base in value.__mro__[1:-1]:
                if is_heap(base):
                    self._node(base.__qualname__, base, None)
        if not isinstance(value, type):
            for base in kind.__mro__[:-1]:
                if base.__flags__ & 1 << 9:
                    self._node(base.__qualname__, base, None)

    def _made(self, value: object, label: str) -> ObjectLayout:
        return ObjectLayout() if is_sealed(value) else parts_of(value, label)

    def _watch(self, node: Node, at: int, part: Part, names: Names | None, *, deep: bool) -> None:
        held: dict[object, Entry] = {}
        for name, value in of_names(part.now(), names).items():
            if isinstance(part, Computed):
                if isinstance(value, VirtualSubclasses):
                    value.existing = self._classes
                held[name] = Contents(value)
                continue
            if part.entries and not is_plain(name) and not isinstance(part, Members):
                self._node(part.where(name), name, None)  # keys may change inside
            place = Location(node, at, name, part.where(name))
            if is_memory(place) or name in node.read.free:
                held[name] = OfKind(object if is_memory(place) else type(value))
            else:
                held[name] = self._entry(place, value, deep=deep)
        node.watched.append(Watched(part, names, held))

    def _entry(self, place: Location, value: object, *, deep: bool) -> Entry:
        if is_plain(value):
            return ReadValue(plain_fact(value))
        if isinstance(value, Tensor) and id(value) not in self._bound:
            fact = Fact(tensor_fact(value), place)
            self._facts.append(fact)
            return fact
        if id(value) in self._bound and not isinstance(place.node.value, Tensor):
            return self._node(place.label, value, place)  # its attributes; its type is in the key
        if isinstance(value, IDENTITIES) or is_sealed(value) or self._names.ours(value):
            return Same(value)
        if isinstance(value, type) and not is_heap(value):
            return Same(value)
        named = isinstance(value, type) and isinstance(place.node.value, ModuleType | Space)
        if not deep and not named and not self._names.is_state(place, value):
            return Same(value)  # functions of the library's are what they are
        node = self._node(place.label, value, place)
        kind = type(place.node.value)
        holder = place.node.value if isinstance(place.node.value, ModuleType) else kind
        theirs = not isinstance(holder, type) or is_heap(holder)
        if not place.node.asked or (theirs and self._names.owner(holder) < CodeOwner.USER):
            node.asked = False
        return node

    def settle(self) -> None:
        """After the last root: which objects are held, and what each call looks at."""
        for node in self._order:
            node.loose = node.place is not None and self._comes_and_goes(node, set())
        for node in self._order:
            for at, watched in enumerate(node.watched):
                node.watched[at] = replace(watched, raw=self._raw(node, watched))
        self._same = self._aliases()
        self._arrange()

    def _raw(self, node: Node, watched: Watched) -> tuple[object, ...] | None:
        if node.is_found_anew or any(map(comes_and_goes, watched.held.values())):
            return None
        return tuple(watched.now().values())

    def _comes_and_goes(self, node: Node, seen: set[int]) -> bool:
        if id(node) in seen or isinstance(node.value, _HELD):
            return False
        seen.add(id(node))
        return any(
            isinstance(held, Fact) or (isinstance(held, Node) and self._comes_and_goes(held, seen))
            for watched in node.watched
            for held in watched.held.values()
        )

    def _arrange(self) -> None:
        """The flat lists of the fast check."""
        self._sweep, self._swept, self._parts = IdentityGuards(), [], []
        self._given = [node for node in self._order if node.getter is not None]
        for node in self._order:
            if node.getter is not None or node.loose:
                continue
            if type(node.value) is not Space:  # one of those here
                self._sweep.add_type(node.value)
            for at, watched in enumerate(node.watched):
                if watched.names == frozenset():
                    continue  # whatever is there
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
        match = Match(self._nodes)
        if any(True for _ in self._differences(match)):
            return False
        self._sweep.accept()
        for node, at in match.renewed:
            self._renew(node, at, node.watched[at].part)
        if moved := match.held():
            self._rebind(moved)
        return True

    def join(self, watches: Watches) -> bool:
        """All of it, while the very same objects are there, but for what is found anew at every
        call; whether that can be said."""
        if self._given:
            return False
        parts: list[Watched | AlikePart] = []
        for node, at in self._swept:
            watched = node.watched[at]
            by_raw = watched.raw is not None or isinstance(watched.part, Computed)
            parts.append(watched if by_raw else AlikePart(self._nodes, watched))
        if not all(part.is_now_same() for part in parts):
            return False
        anew = {
            number: AlikePart(self._nodes, node.watched[at])
            for number, (node, at) in enumerate(self._parts)
            if node.watched[at].raw is None
        }
        self._sweep.join(watches, lambda number: self._is_untouched(number, anew.get(number)))
        watches.polled += [part.is_now_same for part in parts]
        watches.polled += [self._are_facts_same] if self._facts else []
        return True

    def _is_untouched(self, number: int, anew: AlikePart | None) -> bool:
        """Of a part that was written to: whether what counts of it is the very same, but for what
        comes and goes."""
        node, at = self._parts[number]
        return node.watched[at].is_untouched() if anew is None else anew.is_now_same()

    def _are_facts_same(self) -> bool:
        return not any(True for _ in self._other_facts())

    def _other_facts(self) -> Iterator[str]:
        """Tensors that are no longer of the same type, or not the same ones as others."""
        for fact in self._facts:
            now = fact.place.get()
            if not isinstance(now, Tensor) or tensor_fact(now) != fact.fact:
                yield f"{fact.place.label}: {words_of(fact)} became {words_of_value(now)}"
            elif id(now) in self._bound:
                yield f"{fact.place.label}: a tensor became a parameter"
        if self._aliases() != self._same:
            yield _OTHER_ALIASES

    def changed(self) -> list[str]:
        """What is different now, in words; empty if nothing is."""
        return list(self._differences(Match(self._nodes)))

    def other_numbers(self) -> list[Location]:
        """Where numbers stand that are others now, and arrays in which others are."""
        match = Match(self._nodes)
        list(self._differences(match))
        locations = match.numbers
        for array in match.arrays:
            for node, at in self._places_of([(array, None)]):
                watched = node.watched[at]
                if watched.part.settable and node.parts is None:
                    names = [name for name, entry in watched.held.items() if entry is array]
                    where = watched.part.where
                    locations += [Location(node, at, name, where(name), True) for name in names]
        return locations

    def _differences(self, match: "Match") -> Iterator[str]:
        written: list[tuple[Node, int]] = []
        if not self._sweep.is_same():
            for value, kind in self._sweep.other_types():
                yield f"a {kind.__name__} became a {type(value).__name__}"
            for value in self._sweep.other_spaces():
                yield f"a {type(value).__name__} got another __dict__"
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

    def _places_of(self, moved: Iterable[tuple[Node, object]]) -> list[tuple[Node, int]]:
        """The parts in which nodes are, as values or as keys."""
        those = {id(node) for node, _ in moved}
        if those and not self._places:
            for node in self._order:
                for at, watched in enumerate(node.watched):
                    there = [held for held in watched.held.values() if isinstance(held, Node)]
                    there += [self._nodes[id(k)] for k in watched.held if id(k) in self._nodes]
                    for inner in there:
                        self._places.setdefault(id(inner), []).append((node, at))
        return [place for key in those for place in self._places.get(key, ())]

    def _aliases(self) -> tuple[int, ...]:
        return first_of_each(fact.place.get() for fact in self._facts)

    def _rebind(self, moved: Iterable[tuple[Node, object]]) -> None:
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
        keys = fresh.keys_beside(fresh.now(), node.read.ordered)
        fresh = replace(fresh, held=dict(zip(keys, fresh.held.values(), strict=True)))
        node.watched[at] = replace(fresh, raw=self._raw(node, fresh))

    # -- what was found

    @property
    def nodes(self) -> list[Node]:
        """All that it knows, in the order in which it was met."""
        return self._order

    @property
    def by_identity(self) -> Mapping[int, Node]:
        """Likewise, by the ids of the objects."""
        return self._nodes

    @property
    def count(self) -> int:
        """How many these are."""
        return len(self._order)

    def places(self) -> dict[int, Location]:
        """By its id, where a tensor was found."""
        places: dict[int, Location] = {}
        for fact in self._facts:
            places.setdefault(id(fact.place.get()), fact.place)
        return places

    def has_memory_in(self, start: int, end: int) -> bool:
        """Whether an array or another buffer of the snapshot has memory between two addresses."""
        spans = (span_of(node.current()) for node in self._order)
        return any(span is not None and span[0] < end and start < span[1] for span in spans)

    def node_of(self, value: object) -> Node | None:
        """What the snapshot knows of an object."""
        return self._nodes.get(id(value))

    def place_of(self, owner: object, at: int, name: object, label: str) -> Location | None:
        """A place of an object that is part of the snapshot."""
        node = self._nodes.get(id(owner))
        if node is None or at >= max(1, len(node.watched)):
            return None
        return Location(node, at, name, label)

    def __len__(self) -> int:
        return sum(len(watched.held) for node in self._order for watched in node.watched)
