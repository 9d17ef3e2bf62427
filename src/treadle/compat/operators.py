"""What an operator declares: its arguments, what it writes to, what it returns."""

from typing import Any

import torch
from torch._ops import OpOverload


def schema_of(op: Any) -> Any:
    """What the operator was declared as: its name, arguments and results."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """Its name among the operators of one name: ``"default"``, ``"Tensor"``."""
    return op._overloadname


def is_mutable(target: Any) -> bool:
    """Does this operator declare that it writes to an argument?"""
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


def changes_shape(target: Any) -> bool:
    """Does this operator make its argument another view of its own storage, as ``t_`` does?"""
    return isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags


def argument_types(target: Any) -> tuple[tuple[str, str], ...]:
    """Names and types of an operator's arguments, those of an ``out=`` aside."""
    arguments = schema_of(target).arguments
    return tuple((each.name, str(each.type)) for each in arguments if not each.is_out)


def filled_arguments(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments by position, defaults filled in where positions are missing."""
    positional = [each for each in schema_of(target).arguments if not each.kwarg_only]
    return (*given, *(each.default_value for each in positional[len(given) :]))


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    if not is_mutable(target):
        return []
    arguments = enumerate(schema_of(target).arguments)
    return [
        (at, each.name)
        for at, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]


def returns_written(target: Any) -> bool:
    """Does this operator return nothing but what it has written to, if anything?"""
    return all(each.alias_info is not None for each in schema_of(target).returns)


def communicates(target: Any) -> bool:
    """Does this operator exchange data with other processes? Those of ``torch.distributed`` live in
    namespaces of their own, or take a process group."""
    if not isinstance(target, OpOverload):
        return False
    takes = any("c10d" in str(each.type) for each in schema_of(target).arguments)
    return takes or target.namespace.strip("_").startswith(("c10d", "symm_mem", "dtensor"))


__all__ = [
    "OpOverload",
    "argument_types",
    "changes_shape",
    "communicates",
    "filled_arguments",
    "is_mutable",
    "overload_of",
    "returns_written",
    "schema_of",
    "written_arguments",
]
