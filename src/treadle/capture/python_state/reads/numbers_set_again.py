"""Numbers that a run read and that the code around it sets again, likely before the next call."""

from collections.abc import Iterator
from types import CellType

from treadle.capture.python_state.code.set_again import SetAgain
from treadle.capture.python_state.container_parts import Sequenced
from treadle.capture.python_state.parts import Part
from treadle.capture.python_state.plain_values import NUMBERS
from treadle.capture.python_state.reads.object_graph import Location, Node, ReadValue, Space
from treadle.capture.python_state.reads.reads_graph import ReadsGraph


def numbers_set_again(graph: ReadsGraph, again: SetAgain) -> Iterator[Location]:
    """The places of such numbers. (Of containers among the arguments the step has copies, in which
    nothing is set.)"""
    for node in graph.nodes:
        if node.parts is not None:
            continue
        for at, watched in enumerate(node.watched):
            for name, entry in watched.held.items():
                is_number = isinstance(entry, ReadValue) and entry.fact[0] in NUMBERS
                if is_number and _is_set(node, watched.part, name, again):
                    yield Location(node, at, name, watched.part.where(name), rooted=True)


def _is_set(node: Node, part: Part, name: object, again: SetAgain) -> bool:
    """Whether the code sets what is under this name."""
    if isinstance(part, Sequenced):
        return name in again.keys and not issubclass(node.kind, tuple)
    if not part.settable:
        return False
    if part.entries:
        return name in again.keys
    if node.kind is Space:
        return (id(node.value.__dict__), name) in again.variables
    if node.kind is CellType:
        return node.label in again.cells
    return name in again.attributes
