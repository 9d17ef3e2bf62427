"""Whether objects are unchanged: the same objects, or others that are deeply equal."""

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, MappingProxyType, MethodType, ModuleType
from typing import cast, final

from torch import Tensor
from torch.optim import Optimizer

from treadle.capture.python_state.container_parts import Members, Sequenced
from treadle.capture.python_state.introspect import ARRAYS, parts_of
from treadle.capture.python_state.parts import MISSING, Part, Reading
from treadle.capture.python_state.plain_values import (
    NUMBERS,
    is_plain,
    is_real,
    is_same_value,
    plain_fact,
)
from treadle.capture.python_state.reads.object_graph import (
    Contents,
    Entry,
    Fact,
    Location,
    Node,
    OfKind,
    ReadValue,
    Same,
    Watched,
    of_names,
    tensor_fact,
    words_of,
    words_of_value,
)

_PARTED = "an object that was in several places was replaced in some of them"
ONLY_ITSELF = (Tensor, type, ModuleType, MappingProxyType, Optimizer, Enum)
"""Objects that only themselves match."""


@dataclass(slots=True)
class Match:
    """One comparison of the present objects with the earlier ones, and which object corresponds to
    which."""

    nodes: Mapping[int, Node]
    moved: dict[int, tuple[Node, object]] = field(default_factory=dict[int, tuple[Node, object]])
    words: str = ""
    numbers: list[Location] = field(default_factory=list[Location])
    arrays: list[Node] = field(default_factory=list[Node])  # with other numbers in them
    renewed: list[tuple[Node, int]] = field(default_factory=list[tuple[Node, int]])
    _taken: dict[int, Node] = field(default_factory=dict[int, Node])

    def said(self) -> str:
        """The words of the last refusal, once."""
        words, self.words = self.words, ""
        return words or "an object outside the step was replaced"

    def held(self) -> list[tuple[Node, object]]:
        """What stands for another, but for what is found anew at every call."""
        return [pair for pair in self.moved.values() if not pair[0].is_found_anew]

    def holds_throughout(self, node: Node, at: int) -> bool:
        """Whether objects correspond consistently: an object that was in two places is still the
        same in both. (Tuples are compared by their contents.)"""
        value = self._now(node)
        if value is MISSING:
            return True  # a place that no longer counts
        watched = node.watched[at]
        is_held = value is node.value and not node.is_found_anew
        part = watched.part if is_held else parts_of(value, node.label).parts[at]
        now = of_names(part.now(), watched.names)
        values = self._beside(node, watched, now)
        if values is None:
            return self._other_names(node, watched, now)
        keys = watched.keys_beside(now, node.read.ordered)
        for key, entry, beside, there in zip(
            watched.held, watched.held.values(), keys, values, strict=True
        ):
            known = None if is_plain(key) else self.nodes.get(id(key))
            if not (self._is_in_place(known, beside) and self._is_in_place(entry, there)):
                self.words = f"{watched.part.where(key)}: {_PARTED}"
                return False
        return True

    def _now(self, node: Node) -> object:
        return self.moved[id(node)][1] if id(node) in self.moved else node.current()

    def _is_in_place(self, entry: Entry | None, value: object) -> bool:
        if not isinstance(entry, Node) or entry.is_found_anew or id(entry) not in self.moved:
            return True
        stands = self.moved[id(entry)][1]
        return stands is value or _are_one(stands, value)

    def part(self, node: Node, at: int, watched: Watched, now: Reading) -> bool:
        """Whether a part holds the same under the same names, in the same order. All numbers that
        are others are noted."""
        values = self._beside(node, watched, now)
        if values is None:
            return self._other_names(node, watched, now)
        alike = True
        for (name, entry), value in zip(watched.held.items(), values, strict=True):
            if self.is_alike(entry, value):
                continue
            alike = False
            label = watched.part.where(name) if type(watched.part) is not Part else node.label
            change = f"{words_of(entry)} became {words_of_value(value)}"
            if isinstance(entry, Contents):
                change = f"{words_of(entry)} changed"
                self.arrays += [node] if node.kind in ARRAYS else []
            self.words = self.words or f"{label}: {change}"
            is_number = isinstance(entry, ReadValue) and entry.fact[0] in NUMBERS and is_real(value)
            place = Location(node, at, name, label, rooted=True)
            if is_number and place.is_settable:
                self.numbers.append(place)
        return alike

    def _beside(self, node: Node, watched: Watched, now: Reading) -> Iterable[object] | None:
        """The values that stand where those that were held stood; ``None`` for other names, or
        another order where that counts."""
        held = watched.held
        if len(now) != len(held):
            return None
        if isinstance(watched.part, Sequenced | Members):
            return now.values() if list(now) == list(held) else None
        if not watched.part.entries:
            return map(now.__getitem__, held) if now.keys() == held.keys() else None
        keys = list(watched.keys_beside(now, node.read.ordered))
        pairs = zip(held, keys, strict=True)
        same = all(a is b or is_same_value(a, b) or self._stands_for(a, b) for a, b in pairs)
        return [now[key] for key in keys] if same else None

    def _stands_for(self, key: object, other: object) -> bool:
        """Whether another object matches the earlier key."""
        node = None if is_plain(key) else self.nodes.get(id(key))
        return node is not None and self.object(node, other)

    def _other_names(self, node: Node, watched: Watched, now: Reading) -> bool:
        label = watched.part.label
        for name in {**watched.held, **now}:
            if name not in now or name not in watched.held:
                if watched.part.settable and not watched.part.entries:
                    label = watched.part.where(name)
                before = words_of(watched.held[name]) if name in watched.held else "nothing"
                after = words_of_value(now[name]) if name in now else "nothing"
                self.words = f"{label}: {before} became {after}"
                if watched.part.entries:
                    self.words = f"{label} has other entries{node.note}"
                return False
        self.words = f"{label} is in another order"
        return False

    def is_alike(self, entry: Entry, value: object) -> bool:
        """Whether a value matches an entry."""
        match entry:
            case ReadValue(fact):
                return is_plain(value) and plain_fact(value) == fact
            case Contents():
                return entry.is_same(value)
            case Same(held):
                return held is value
            case Fact(fact):
                return isinstance(value, Tensor) and tensor_fact(value) == fact
            case OfKind(kind):
                return kind is object or type(value) is kind
            case Node():
                return self.object(entry, value)

    def object(self, node: Node, value: object) -> bool:
        """Whether an object matches a node: it is the same object, or a deeply equal one."""
        if value is node.value and node.getter is None and not node.loose:
            return True
        if type(value) is not node.kind or (node.only is not None and value is not node.only):
            return False
        known = self.moved.get(id(node))
        if known is not None and known[1] is value:
            return True
        if known is not None and not isinstance(value, tuple | frozenset):
            return False
        if isinstance(value, ONLY_ITSELF) or not (node.watched or node.only):
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
                node,
                at,
                Watched(part, watched.names, watched.held),
                of_names(part.now(), watched.names),
            )
            for at, (part, watched) in enumerate(zip(parts, node.watched, strict=False))
        )


@final
class AlikePart:
    """A part with what comes and goes (a module's dict of buffers), as it is now: whether all else
    in it is still the very same, and what comes is like what went."""

    def __init__(self, nodes: Mapping[int, Node], watched: Watched) -> None:
        self._nodes, self._watched = nodes, watched
        now = watched.now()
        self._names = tuple(watched.held)
        pairs = list(enumerate(zip(watched.held.values(), now.values(), strict=False)))
        self._raw = [(at, value) for at, (entry, value) in pairs if not comes_and_goes(entry)]
        self._others = [(at, entry) for at, (entry, _) in pairs if comes_and_goes(entry)]

    def is_now_same(self) -> bool:
        """Of what is there."""
        now = self._watched.now()
        if len(now) != len(self._names) or not all(map(operator.is_, now, self._names)):
            return False
        values = list(now.values())
        if not all(values[at] is value for at, value in self._raw):
            return False
        match = Match(self._nodes)
        alike = all(match.is_alike(entry, values[at]) for at, entry in self._others)
        return alike and not match.held()


def tensors_within(
    part: Part, held: Mapping[object, Entry], watched: Collection[int]
) -> dict[int, Tensor] | None:
    """The tensors that come and go in a part, by the ids of their facts, where it and all that
    comes and goes in it are of the objects that are ``watched``, by their ids, in all that they
    hold: then there is nothing else to look at. ``None`` otherwise."""
    reading = part.dictionary()
    if reading is None or id(reading) not in watched:
        return None
    tensors: dict[int, Tensor] = {}
    for name, entry in held.items():
        if not comes_and_goes(entry):
            continue
        value = reading.get(name)
        if isinstance(entry, Fact) and isinstance(value, Tensor) and id(value) in watched:
            tensors[id(entry)] = value
            continue
        if not isinstance(entry, Node) or type(value) is not dict or id(value) not in watched:
            return None
        parts = parts_of(value, entry.label).parts
        for inner, of_node in zip(parts, entry.watched, strict=True):
            there = tensors_within(inner, of_node.held, watched)
            if there is None:
                return None
            tensors |= there
    return tensors


def comes_and_goes(entry: Entry) -> bool:
    """Whether what stands there may be another object at every call."""
    return isinstance(entry, Fact | OfKind) or (isinstance(entry, Node) and entry.is_found_anew)


def _are_one(one: object, other: object) -> bool:
    """Whether both are tuples or frozen sets of the same objects, or of equal plain values."""
    if not isinstance(one, tuple | frozenset) or type(one) is not type(other):
        return one is other or is_same_value(one, other)
    beside = cast("Collection[object]", other)
    return len(one) == len(beside) and all(map(_are_one, one, beside))
