"""The walk from roots to all that a run may have read of the Python around it.

Everything reachable from the step's function, models, optimizers, arguments, and the globals that
the code of the run names; for attributes, those that were read.
"""

import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import final

import torch
from torch import Tensor

from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.computed_parts import Computed, Referent
from treadle.capture.python_state.container_parts import Members
from treadle.capture.python_state.introspect import ObjectLayout, is_heap, parts_of
from treadle.capture.python_state.parts import Part
from treadle.capture.python_state.plain_values import is_plain, plain_fact
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
    of_names,
    tensor_fact,
)
from treadle.capture.python_state.reads.object_match import ONLY_ITSELF
from treadle.capture.python_state.reads.read_names import ReadNames, is_memory, is_sealed
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.python_state.virtual_subclasses import VirtualSubclasses
from treadle.compat.distributed.collectives import HANDLES

IDENTITIES = (CodeType, BuiltinFunctionType, Tensor, torch.Generator, *HANDLES)
"""Objects that are matched only by themselves."""


@final
class ReadsWalk:
    """Builds a graph of everything reachable from roots. Roots are added one after another, and
    each is followed before the next; nodes are in the order in which the walk meets them.

    ``opaque``: objects that can be neither compared nor read.
    """

    def __init__(self, names: ReadNames, *, bound: Iterable[Tensor] = ()) -> None:
        """``bound``: parameters, which count by identity."""
        self._names = names
        self.graph = ReadsGraph(bound)
        self.opaque: list[str] = []
        self._queue: list[Node] = []

    def end(self) -> ReadsGraph:
        """The graph, after the last root."""
        self.graph.settle()
        return self.graph

    @cached_property
    def _modules(self) -> frozenset[str]:
        """All modules that are loaded at the end of the run."""
        return frozenset(sys.modules)

    # -- roots

    def add(self, label: str, value: object) -> Node | None:
        """Add a root, with everything reachable from it."""
        if is_plain(value) or self._names.ours(value) or isinstance(value, Tensor):
            return None
        node = self._node(label, value, None)
        self._drain()
        return node

    def add_argument(self, label: str, value: object, getter: Callable[[], object]) -> None:
        """Add an object among the arguments, which each call brings anew."""
        if isinstance(value, ONLY_ITSELF) or self.graph.node_of(value) is not None:
            # The model, a part of a global, another argument: it has to be that at every call.
            self.add_found(label, getter)
            return
        node = self._node(label, value, None)
        node.getter = getter
        self._drain()
        if isinstance(value, (*IDENTITIES, Enum)) or not node.watched:
            node.only = value  # there is nothing to compare

    def add_found(self, label: str, getter: Callable[[], object]) -> None:
        """Add what ``getter`` finds at every call: the same object, an equal value, or a tensor of
        the same type."""
        node = Node(Space, label, getter)
        self.graph.enter(node, getter)
        self._watch(node, 0, Referent(label, getter), None, deep=True)
        self._drain()

    def add_container(
        self, label: str, value: object, getter: Callable[[], object], parts: frozenset[object]
    ) -> None:
        """Add a container argument: what it holds besides its entries, and the attributes that are
        ``parts``. The step gets a copy, so it may be any object."""
        node = Node(type(value), label, value, getter=getter, parts=parts)
        self.graph.enter(node, getter)
        self._queue.append(node)
        self._drain()

    def add_computed(self, label: str, read: Callable[[], object]) -> None:
        """Add the answer to a question about the process, which can be compared."""
        node = Node(object, label, object())
        self.graph.enter(node, node.value)
        self._watch(node, 0, Computed(label, read), None, deep=False)

    def add_names(
        self, label: str, values: dict[str, object], names: Iterable[str], deep: bool
    ) -> None:
        """Add some variables of a module's globals."""
        module = Space(values)
        node = Node(Space, label, module, read=self._read_of(values))
        self.graph.enter(node, module)
        self.graph.spaces.setdefault(id(values), node)
        part = parts_of(module, label).parts[0]
        self._watch(node, 0, part, frozenset(names), deep=deep)
        self._drain()

    # -- what hangs on them

    def _drain(self) -> None:
        while self._queue:
            node = self._queue.pop(0)
            self._expand(node)

    def _node(self, label: str, value: object, place: Location | None) -> Node:
        node = self.graph.node_of(value)
        if node is None:
            node = Node(type(value), label, value, place, read=self._read_of(value))
            self.graph.enter(node, value)
            self._queue.append(node)
        return node

    def _read_of(self, value: object) -> ObjectReads:
        reads = self._names.of(value)
        self.graph.of_objects.append(reads)
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
                    value.loaded = self._modules
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
        is_bound = self.graph.tensors.is_bound(value)
        if isinstance(value, Tensor) and not is_bound:
            fact = Fact(tensor_fact(value), place)
            self.graph.tensors.facts.append(fact)
            return fact
        if is_bound and not isinstance(place.node.value, Tensor):
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
