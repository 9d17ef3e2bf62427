"""Inputs that share bytes, rather than only a storage.

``vector_to_parameters`` and a recurrent layer's ``flatten_parameters`` leave parameters that are
parts of one storage and have no byte in common. All later stages identify memory by storages, so
``separate`` gives each such part its own storage.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from treadle.compat.fake import FakeTensor, fakes_in_one_storage
from treadle.compat.tensors import storage_key
from treadle.graph.analysis.alias import read_by_strides
from treadle.graph.core.node_info import known_value, set_value, tensor_of
from treadle.graph.core.values import refresh


def separate(graph: fx.Graph) -> None:
    """Inputs that overlap share a storage afterwards, and no others do.

    before:  a = flat[0:6], b = flat[6:12], c = flat[8:12]     in one storage
    after:   a                                                 in one, b and c in another one

    A part whose readers count in its storage stays in it.
    """
    inputs = graph.find_nodes(op="placeholder")
    changed: list[fx.Node] = []
    for key, spans in spans_of(inputs).items():
        held = [node for node in inputs if storage_key(known_value(node)) == key]
        for low, high in spans if len(spans) > 1 else ():
            part = [node for node in held if _is_in(tensor_of(node), low, high)]
            if not any(map(read_by_strides, part)):
                _move(part)
                changed += part
    refresh(graph, changed)


def _is_in(value: Tensor, low: int, high: int) -> bool:
    return low <= bytes_of(value)[0] and bytes_of(value)[1] <= high


def _move(nodes: Sequence[fx.Node]) -> None:
    """Values in a new storage, as they lie to each other."""
    values = [value for node in nodes if isinstance(value := known_value(node), FakeTensor)]
    for node, value in zip(nodes, fakes_in_one_storage(values), strict=True):
        set_value(node, value)


def bytes_of(value: Tensor) -> tuple[int, int]:
    """From where to where in its storage the elements of a tensor are, in bytes."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    first: Any = value.storage_offset()
    size = value.element_size()
    return first * size, (first + reach + 1 if value.numel() else first) * size


def spans_of(inputs: Sequence[fx.Node]) -> dict[int, list[tuple[int, int]]]:
    """For each storage of several inputs the parts of it that do not overlap: the weights of a
    recurrent layer on a GPU are one piece of memory."""
    spans_by_storage: dict[int, list[tuple[int, int]]] = {}
    symbolic: set[int] = set()
    for node in inputs:
        value = known_value(node)
        key = storage_key(value)
        if key is None or not isinstance(value, Tensor):
            continue
        if not all(type(n) is int for n in (*value.shape, *value.stride(), value.storage_offset())):
            symbolic.add(key)
        else:
            spans_by_storage.setdefault(key, []).append(bytes_of(value))
    return {
        key: _joined(spans)
        for key, spans in spans_by_storage.items()
        if key not in symbolic and len(spans) > 1
    }


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low < joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
