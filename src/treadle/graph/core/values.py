"""Fake values of new and changed nodes: shapes, strides and storages without any data."""

import operator
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from treadle.compat.fake import FakeTensor, fake_like, fake_result
from treadle.graph.analysis.alias import storages
from treadle.graph.analysis.dynamic import is_sized, pair, twin_of, twin_result
from treadle.graph.core.arguments import Argument, types_of
from treadle.graph.core.node_info import belong, known_value, set_value, value_of
from treadle.graph.core.node_keys import NoKey, plain_key, value_key
from treadle.graph.core.operators import OpOverload
from treadle.graph.core.types import same_types, tensors_in
from treadle.util.nested import map_leaves


def compute(node: fx.Node, mode: AbstractContextManager[object] | None = None) -> Any:
    """What ``node`` gives for the fake values of its operands. Draws no random numbers. ``mode``:
    what makes them, for a graph that may have none yet."""
    known = mode or _fake_mode(node.graph)
    value = _sample(node, known)
    twin = twin_result(node, known)
    if twin is not None:
        pair(value, twin)
    return value


def like(value: object) -> Any:
    """A value of the same type in storages of its own."""
    match value:
        case torch.Tensor():
            copied = _apart(value)
            twin = twin_of(value)
            if twin is not value:
                pair(copied, twin)
            return copied
        case tuple() | list():
            return type(value)(map(like, value))
        case _:
            return value


def _apart(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, FakeTensor):
        return fake_like(value)
    return value.new_empty_strided(value.shape, value.stride())


def _sample(node: fx.Node, mode: AbstractContextManager[object]) -> object:
    args, kwargs = types_of(node)
    assert callable(node.target), node
    if not isinstance(node.target, OpOverload):
        return node.target(*args, **kwargs)
    with torch.no_grad(), mode:
        return fake_result(node.target, args, kwargs)


def value_of_constant(graph: fx.Graph, constant: torch.Tensor) -> torch.Tensor:
    """The value of a node that is ``constant``."""
    with _fake_mode(graph):
        return torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype)


def _fake_mode(graph: fx.Graph) -> AbstractContextManager[object]:
    """The fake mode of the graph's values: new values must be of the same mode."""
    for node in graph.nodes:
        for tensor in tensors_in(known_value(node)):
            return tensor.fake_mode  # pyright: ignore[reportAttributeAccessIssue]
    raise ValueError("no value of the graph is a tensor")


def inherit(node: fx.Node, root: fx.Node) -> None:
    """Give a new node its value, and phase, source line, module, region and what a checkpoint
    policy says from ``root``."""
    belong(node, root)
    set_value(node, compute(node))


def emit(
    root: fx.Node, target: Callable[..., object], *args: Argument, **kwargs: Argument
) -> fx.Node:
    """``target(*args)`` where the graph inserts nodes; it belongs where ``root`` does."""
    node = root.graph.call_function(target, args, kwargs)
    inherit(node, root)
    return node


def emit_ahead(
    place: fx.Node,
    root: fx.Node,
    target: Callable[..., object],
    *args: Argument,
    **kwargs: Argument,
) -> fx.Node:
    """``emit`` ahead of ``place``."""
    with place.graph.inserting_before(place):
        return emit(root, target, *args, **kwargs)


def gather_results(makers: Iterable[fx.Node]) -> None:
    """Each result of an operation with several stands behind it, and is of the same pass.

    before:  n = layer_norm(x); y = n[0]; ...; backward: r = n[2]; dx = f(r)
    after:   n = layer_norm(x); y = n[0]; r = n[2]; ...; backward: dx = f(r)

    Results are made together: the forward pass can keep them, and the operation never is kept.
    """
    for maker in dict.fromkeys(makers):
        last = maker
        for item in [user for user in maker.users if user.target is operator.getitem]:
            belong(item, maker)
            last.append(item)
            last = item


def refresh(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Recompute the values of the readers of ``changed``, and on while types or storages move.

    Needed after an operand was replaced by one of the same type and other storage: views of
    it must say so. Readers that are neither views nor of another type end the walk.
    """
    dirty = set(changed)
    if not dirty:
        return
    lasting: set[Hashable] = set()  # nodes that keep their values, as those of other layers do
    for node in graph.nodes:
        if node.op != "call_function" or dirty.isdisjoint(node.all_input_nodes):
            continue
        old, shared = value_of(node), _operand_storages(node)
        key = _key_of(node) if storages(old).isdisjoint(shared) else None
        if key is not None and key in lasting:
            continue
        new = compute(node)
        if not same_types(old, new) or not shared.isdisjoint(storages(new) | storages(old)):
            set_value(node, new)
            dirty.add(node)
        elif key is not None:
            lasting.add(key)


def _key_of(node: fx.Node) -> Hashable:
    """Equal for nodes of which equal types are computed, in storages of their own or not, where
    they have equal types so far; ``None`` where that is not known."""

    def keyed(leaf: object) -> Hashable:
        return _plain_key(value_of(leaf)) if isinstance(leaf, fx.Node) else plain_key(leaf)

    try:
        given = map_leaves(keyed, node.args), map_leaves(keyed, tuple(node.kwargs.items()))
        return node.target, given, _plain_key(value_of(node))
    except NoKey:
        return None


def _plain_key(value: object) -> Hashable:
    """``value_key`` of a tensor of which it says all: its sizes are numbers, its elements unknown,
    and it shows memory as it is."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or is_sized(value):
        raise NoKey
    if vars(value).get("constant") is not None or value.is_conj() or value.is_neg():
        raise NoKey
    return value_key(value)


def _operand_storages(node: fx.Node) -> frozenset[int]:
    return frozenset().union(*(storages(value_of(operand)) for operand in node.all_input_nodes))
