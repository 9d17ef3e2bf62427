"""Arguments and results taken apart into leaves, and put together again."""

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treadle.capture.python_state.object_pytrees import (
    Flattened,
    ObjectSpec,
    Sized,
    flattened,
    has_own,
    is_value,
    names_of_parts,
)
from treadle.capture.python_state.plain_values import WITHOUT_PARTS, is_plain, plain_fact
from treadle.compat import pytree
from treadle.compat.pytree import TreeSpec
from treadle.util.errors import CaptureError


def flatten_containers(tree: object) -> tuple[list[object], TreeSpec]:
    """Leaves of nested lists, tuples, dicts and registered classes, and their structure."""
    return pytree.tree_flatten(tree, is_leaf=_stays_whole)


_ENTRIES = (dict, list, tuple)


def _stays_whole(node: object) -> bool:
    """A shape, which PyTorch would put together again as a tuple; entries of an object that has
    attributes as well, which PyTorch would lose."""
    kind = type(node)
    if kind in _ENTRIES:
        return False
    return kind is torch.Size or (isinstance(node, _ENTRIES) and has_own(node))


Instead = Callable[[object, object], object]
"""Takes a leaf, and what remains of it without its parts; returns a container for its place, or
``None``."""


def flatten(tree: object, instead: Instead | None = None) -> tuple[list[object], TreeSpec]:
    """Leaves of nested lists, tuples, dicts, registered classes and objects that hold tensors, and
    their structure."""
    with _no_circles():
        leaves, spec = pytree.tree_flatten(tree, is_leaf=_stays_whole)
        if all(map(is_value, leaves)):
            return leaves, spec
        return pytree.tree_flatten(_open(tree, instead), is_leaf=_stays_whole)


@contextmanager
def _no_circles() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise CaptureError(
            "a container among the arguments or results contains itself",
            code="TR-116",
            remedy="pass and return nested lists, dicts and dataclasses without cycles",
        ) from None


def _open(tree: object, instead: Instead | None = None) -> object:
    """``tree`` with objects that hold tensors, and shapes that hold symbols, as nodes."""

    def opened(leaf: object) -> object:
        if type(leaf) is torch.Size and not is_value(leaf):
            return Sized(tuple(leaf))
        parts = flattened(leaf, pytree.tree_leaves)
        other = instead and instead(leaf, leaf if parts is None else parts.shell.blank)
        if other is not None:
            return other
        if parts is None:
            return leaf
        return Flattened(parts.shell, tuple(_open(value, instead) for value in parts.values))

    return pytree.tree_map(opened, tree, is_leaf=_stays_whole)


def _sizes_with_keys(node: Sized) -> tuple[list[tuple[pytree.KeyEntry, object]], None]:
    key: Any = pytree.SequenceKey
    return [(key(at), size) for at, size in enumerate(node.sizes)], None


pytree.register_pytree_node(
    Sized,
    lambda node: (list(node.sizes), None),
    lambda sizes, _: torch.Size(sizes),
    flatten_with_keys_fn=_sizes_with_keys,
)


def _keys(node: Flattened) -> tuple[list[tuple[pytree.KeyEntry, object]], ObjectSpec]:
    named = issubclass(node.shell.kind, dict | list | tuple | UserDict)
    key: Any = pytree.MappingKey if named else pytree.GetAttrKey
    pairs = zip(node.shell.names, node.values, strict=True)
    return [(key(name), value) for name, value in pairs], node.shell


pytree.register_pytree_node(
    Flattened,
    lambda node: (list(node.values), node.shell),
    lambda values, shell: shell.filled(list(values)),
    flatten_with_keys_fn=_keys,
)


def unflatten(leaves: Sequence[object], spec: TreeSpec) -> Any:
    """The structure with these leaves."""
    if spec.is_leaf():
        (leaf,) = leaves
        return leaf
    return pytree.tree_unflatten(leaves, spec)


def _with_paths(
    call: Any, is_leaf: Callable[[object], bool]
) -> tuple[list[tuple[Any, object]], TreeSpec]:
    try:
        return pytree.tree_flatten_with_path(call, is_leaf=is_leaf)
    except ValueError:  # a class that was registered without names of its parts
        place, name = pytree.SequenceKey, pytree.MappingKey
        args, kwargs = call
        arguments: list[tuple[tuple[object, ...], object]] = [
            ((place(0), place(at)), value) for at, value in enumerate(args)
        ]
        arguments += [((place(1), name(key)), value) for key, value in kwargs.items()]
        pairs = [
            ((*path, place(at)), leaf)
            for path, value in arguments
            for at, leaf in enumerate(pytree.tree_leaves(value, is_leaf=is_leaf))
        ]
        return pairs, pytree.tree_flatten(call, is_leaf=is_leaf)[1]


def flatten_with_paths(
    call: tuple[tuple[object, ...], dict[str, object]],
    names: Sequence[str] = (),
    is_leaf: Callable[[object], bool] = _stays_whole,
) -> tuple[list[tuple[str, object]], TreeSpec]:
    """Leaves of a call's arguments with readable paths, and their structure: ``x``, ``batch['y']``,
    and ``args[3]`` beyond the ``names`` of those by position."""
    with _no_circles():
        pairs, spec = _with_paths(call, is_leaf)
        if not all(is_value(value) for _, value in pairs):
            pairs, spec = _with_paths(_open(call), _stays_whole)
    named: dict[str, object] = {}
    for (kind, which, *rest), value in pairs:
        if kind.idx == 0:
            place = int(which.idx)
            path = names[place] if place < len(names) else f"args[{place}]"
        else:
            path = str(which.key)
        path += "".join(map(_step, rest))
        if path in named:  # of two keys of one class
            path = f"{path} #{len(named)}"
        named[path] = value
    return list(named.items()), spec


def _step(key: Any) -> str:
    """``['x']``, ``[0]``, ``.x``. For keys that are objects the class is shown, because their
    ``repr`` is arbitrary or has an address."""
    if isinstance(key, pytree.MappingKey):
        return f"[{_shown(key.key)}]"
    return pytree.keystr((key,))


def _shown(key: object) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_shown, key))})"
    return repr(key) if is_plain(key) else type(key).__name__


_LEAVES = WITHOUT_PARTS | {Tensor, nn.Parameter}

_TEXT = frozenset({str})
_PLAIN_NODES = _LEAVES | {list, tuple, dict, torch.Size}


@dataclass(frozen=True, slots=True)
class Container:
    """An argument that is taken apart, or a part of one. ``parts``: the names of attributes that
    are parts of it."""

    value: object
    parts: frozenset[object]


def _taken_apart(tree: object) -> Iterator[tuple[object, Flattened | None]]:
    """All containers, in an order that their structure decides."""
    met: list[object] = []

    def meet(node: object) -> bool:
        if type(node) not in _LEAVES:
            met.append(node)
        return _stays_whole(node)

    those = {id(leaf) for leaf in pytree.tree_flatten(tree, is_leaf=meet)[0]}
    for node in met:
        if id(node) not in those:
            yield node, None
            continue
        inside = flattened(node, pytree.tree_leaves)
        if inside is not None:
            yield node, inside
            yield from _taken_apart(inside.values)


def containers_in(tree: object) -> list[Container]:
    """The containers that may hold more than their parts, in an order that their structure
    decides."""
    containers: list[Container] = []
    for node, inside in _taken_apart(tree):
        if type(node) not in _ENTRIES:
            leaves = () if inside is not None else pytree.tree_leaves(node)
            containers.append(Container(node, names_of_parts(node, inside, leaves)))
    return containers


def keys_in(tree: object) -> list[object]:
    """The keys of its dicts, in the order of the containers, except strings and tensors, which the
    structure describes completely."""
    return [
        key
        for node in nodes_in(tree)
        if isinstance(node, dict)
        for key in node
        if type(key) is not str and not isinstance(key, Tensor)
    ]


def nodes_in(tree: object) -> list[object]:
    """All containers, and the dicts that they keep their entries in."""
    nodes: list[object] = []
    for node, _ in _taken_apart(tree):
        nodes.append(node)
        if isinstance(node, UserDict):
            nodes.append(node.data)
    return nodes


def replaced(tree: object, instead: Callable[[object], object]) -> object:
    """``tree`` with containers and leaves replaced by the results of ``instead`` that are not
    ``None``."""

    def put_in_place(node: object) -> object:
        other = instead(node)
        return node if other is None else other

    def is_leaf(node: object) -> bool:
        return instead(node) is not None or _stays_whole(node)

    with _no_circles():
        return pytree.tree_map(put_in_place, tree, is_leaf=is_leaf)


@dataclass(slots=True)
class FlatArguments:
    """A call's arguments: their leaves, and the original containers. ``keys``: the result of
    ``keys_in``."""

    leaves: list[object]
    containers: list[Container]
    keys: list[object]
    tree: object

    @staticmethod
    def none() -> "FlatArguments":
        """The arguments of no call."""
        return FlatArguments([], [], [], None)

    @staticmethod
    def of(leaves: list[object], tree: object) -> "FlatArguments":
        """The arguments of a tree with these leaves."""
        return FlatArguments(leaves, containers_in(tree), keys_in(tree), tree)


Structure = tuple[TreeSpec, tuple[object, ...]]
"""How arguments are nested, and what plain keys of their dicts are: ``0`` is not ``False``."""


class FlatCalls:
    """The leaves of calls' arguments with paths and structure. If all arguments are leaves
    themselves, these follow from the number and the names of the arguments. ``names``: those of
    positional arguments."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self._known: dict[object, tuple[tuple[str, ...], Structure]] = {}

    def of(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[FlatArguments, tuple[str, ...], Structure]:
        """Leaves and containers, the leaves' paths (``x``, ``batch['y']``), and their structure."""
        leaves = [*args, *kwargs.values()]
        if not _LEAVES.issuperset(map(type, leaves)):
            kinds: set[type] = set()

            def meet(node: object) -> bool:
                kinds.add(type(node))
                if type(node) is dict and not _TEXT.issuperset(map(type, node)):
                    kinds.add(object)  # its keys are to be looked at
                return _stays_whole(node)

            tree = args, kwargs
            pairs, structure = flatten_with_paths(tree, self._names, meet)
            leaves = [value for _, value in pairs]
            plain = kinds <= _PLAIN_NODES
            arguments = (
                FlatArguments(leaves, [], [], tree) if plain else FlatArguments.of(leaves, tree)
            )
            facts = tuple(plain_fact(key) for key in arguments.keys if is_plain(key))
            return arguments, tuple(path for path, _ in pairs), (structure, facts)
        key = len(args), *kwargs
        if key not in self._known:
            pairs, structure = flatten_with_paths((args, kwargs), self._names)
            self._known[key] = tuple(path for path, _ in pairs), (structure, ())
        return FlatArguments(leaves, [], [], (args, kwargs)), *self._known[key]
