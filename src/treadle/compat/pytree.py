"""PyTorch's pytrees: nested containers taken apart into leaves and a structure."""

from torch.utils._pytree import (
    GetAttrKey,
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

__all__ = [
    "GetAttrKey",
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "keystr",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
