"""PyTorch's pytrees: nested containers taken apart into leaves and a structure."""

from torch.utils._pytree import (
    GetAttrKey,
    KeyEntry,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)


def parts_of_spec(spec: TreeSpec) -> tuple[object, object, list[TreeSpec]]:
    """The class of a container, ``None`` of a leaf; what it is made again with; its parts."""
    return spec.type, spec.context, _children(spec)


def spec_of(kind: object, context: object, children: list[TreeSpec]) -> TreeSpec:
    """The inverse."""
    return _LEAF if kind is None else TreeSpec(kind, context, children)


_LEAF = tree_flatten(0)[1]


def _children(spec: TreeSpec) -> list[TreeSpec]:
    """By a method from 2.13 on."""
    method = getattr(spec, "children", None)
    return spec.children_specs if method is None else list(method())


__all__ = [
    "GetAttrKey",
    "KeyEntry",
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "keystr",
    "parts_of_spec",
    "register_pytree_node",
    "spec_of",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
