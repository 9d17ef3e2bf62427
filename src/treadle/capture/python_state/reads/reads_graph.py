"""All objects that a run found in the Python around it, as one graph."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.python_state.introspect import parts_of
from treadle.capture.python_state.parts import Part
from treadle.capture.python_state.reads.object_graph import (
    Fact,
    Location,
    Node,
    ObjectReads,
    Space,
    Watched,
)
from treadle.capture.python_state.reads.object_match import comes_and_goes
from treadle.capture.python_state.reads.read_tensors import ReadTensors
from treadle.capture.symbolic.arrays.arrays import span_of

_HELD = (
    nn.Parameter, nn.Module, Optimizer, FunctionType, type, ModuleType, CellType, MethodType, Enum,
    MappingProxyType,
)  # fmt: skip
"""Classes of objects that are held although tensors can be reached from them, because they do not
change from call to call."""


@final
class ReadsGraph:
    """The nodes in the order in which a walk met them, and by the ids of the objects; the tensors
    among what they hold; and what was read of each object, in that order.

    A walk enters nodes until ``settle``. From then on only equal objects take the places of others:
    ``rebind``, ``renew``.
    """

    def __init__(self, bound: Iterable[Tensor]) -> None:
        """``bound``: parameters, which count by identity."""
        self.nodes: list[Node] = []
        self.by_identity: dict[int, Node] = {}
        self.tensors = ReadTensors(bound)
        self.of_objects: list[ObjectReads] = []
        self.spaces: dict[int, Node] = {}  # by the id of a module's globals, those of it
        self._holders: dict[int, list[tuple[Node, int]]] = {}  # by a node's id, where it is

    # -- making

    def enter(self, node: Node, known_as: object) -> None:
        """Add the next node. ``known_as``: the object by which it is found."""
        self.by_identity[id(known_as)] = node
        self.nodes.append(node)

    def settle(self) -> None:
        """Called after the last node: decide which objects are held, and what each call checks."""
        for node in self.nodes:
            node.loose = node.place is not None and _leads_to_tensors(node, set())
        for node in self.nodes:
            for at, watched in enumerate(node.watched):
                node.watched[at] = replace(watched, raw=_raw(node, watched))
        self.tensors.settle()
        for node in self.nodes:
            if node.is_found_anew:
                _let_go(node)

    # -- asking

    def node_of(self, value: object) -> Node | None:
        """The node of an object, if there is one."""
        return self.by_identity.get(id(value))

    def place_of(self, owner: object, at: int, name: object, label: str) -> Location | None:
        """A place of an object that is part of it."""
        is_space = type(owner) is Space
        node = self.spaces.get(id(owner.__dict__)) if is_space else self.node_of(owner)
        if node is None or at >= max(1, len(node.watched)):
            return None
        return Location(node, at, name, label)

    def has_memory_in(self, start: int, end: int) -> bool:
        """Whether an array or another buffer in it has memory between two addresses."""
        spans = (span_of(node.current()) for node in self.nodes)
        return any(span is not None and span[0] < end and start < span[1] for span in spans)

    def holders_of(self, nodes: Iterable[Node]) -> list[tuple[Node, int]]:
        """The parts in which nodes are, as values or as keys."""
        those = set(map(id, nodes))
        if those and not self._holders:
            for node in self.nodes:
                for at, watched in enumerate(node.watched):
                    there = [held for held in watched.held.values() if isinstance(held, Node)]
                    there += [self.by_identity[id(k)] for k in watched.held if self.node_of(k)]
                    for inner in there:
                        self._holders.setdefault(id(inner), []).append((node, at))
        return [holder for key in those for holder in self._holders.get(key, ())]

    # -- following

    def rebind(self, moved: Iterable[tuple[Node, object]]) -> None:
        """Follow equal objects that have replaced others."""
        for node, value in moved:
            self.by_identity.pop(id(node.value), None)
            self.by_identity[id(value)] = node
            node.value = value
            parts = parts_of(value, node.label).parts
            for at, part in enumerate(parts[: len(node.watched)]):
                self.renew(node, at, part)

    def renew(self, node: Node, at: int, part: Part) -> None:
        """Follow equal objects in a part, keys included."""
        fresh = replace(node.watched[at], part=part)
        keys = fresh.keys_beside(fresh.now(), node.read.ordered)
        fresh = replace(fresh, held=dict(zip(keys, fresh.held.values(), strict=True)))
        node.watched[at] = replace(fresh, raw=_raw(node, fresh))


def _leads_to_tensors(node: Node, seen: set[int]) -> bool:
    """Whether it comes and goes with a call: tensors that do are in what it holds."""
    if id(node) in seen or isinstance(node.value, _HELD):
        return False
    seen.add(id(node))
    return any(
        isinstance(held, Fact) or (isinstance(held, Node) and _leads_to_tensors(held, seen))
        for watched in node.watched
        for held in watched.held.values()
    )


def _raw(node: Node, watched: Watched) -> tuple[object, ...] | None:
    """The very objects in a part, where none of them comes and goes."""
    if node.is_found_anew or any(map(comes_and_goes, watched.held.values())):
        return None
    return tuple(watched.now().values())


def _let_go(node: Node) -> None:
    """Release objects that are looked up at every call, so that they are not kept alive between
    calls."""
    node.value = None
    for at, watched in enumerate(node.watched):
        part = Part(watched.part.label) if node.loose else watched.part.detached()
        node.watched[at] = replace(watched, part=part)
