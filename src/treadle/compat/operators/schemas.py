"""What an operator declares: its arguments, what it writes to, what it returns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket


def schema_of(op: Any) -> Any:
    """What the operator was declared as: its name, arguments and results."""
    return op._schema


def direct_call(op: Any) -> Callable[..., Any]:
    """What a call of an overload calls, without the frame of Python's around it."""
    return op._op if type(op) is OpOverload else op


def overloads_of(op: object) -> tuple[str, ...]:
    """The names of its overloads, for an operator that is named without one; none for others."""
    return tuple(op.overloads()) if isinstance(op, OpOverloadPacket) else ()


def overload_of(op: OpOverload) -> str:
    """Its name among the operators of one name: ``"default"``, ``"Tensor"``."""
    return op._overloadname


def changes_shape(target: object) -> bool:
    """Does this operator make its argument another view of its own storage, as ``t_`` does?"""
    return isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags


def argument_types(target: object) -> tuple[tuple[str, str], ...]:
    """Names and types of an operator's arguments, those of an ``out=`` aside."""
    arguments = schema_of(target).arguments
    return tuple((each.name, str(each.type)) for each in arguments if not each.is_out)


_ENUMS: Mapping[str, type] = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
}


def enum_given_as_number(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    """The first argument that should be a dtype, a layout or a memory format and is not; empty if
    there is none. PyTorch takes any number for one, and a number that it does not know crashes the
    process."""
    declared = schema_of(op).arguments
    given = {each.name: value for each, value in zip(declared, args, strict=False)} | dict(kwargs)
    for each in declared:
        kind = _ENUMS.get(str(each.real_type).removeprefix("Optional[").removesuffix("]"))
        value = given.get(each.name)
        if kind is not None and value is not None and not isinstance(value, kind):
            return each.name
    return ""


def filled_arguments(target: object, given: tuple[object, ...]) -> tuple[object, ...]:
    """Arguments by position, defaults filled in where positions are missing."""
    positional = [each for each in schema_of(target).arguments if not each.kwarg_only]
    return (*given, *(each.default_value for each in positional[len(given) :]))


def written_arguments(target: object) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator declares that it writes to."""
    if not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
        return []
    arguments = enumerate(schema_of(target).arguments)
    return [
        (at, each.name)
        for at, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]


def decided_by_values(op: OpOverload) -> bool:
    """Do values of its arguments decide the sizes of its results, or a number that it gives?"""
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*op.tags})


def gives_tensors(op: OpOverload) -> bool:
    """Does this operator return tensors and lists of them, and nothing else?"""
    types = {str(each.type) for each in schema_of(op).returns}
    return bool(types) and types <= {"Tensor", "List[Tensor]"}


def returns_written(target: object) -> bool:
    """Does this operator return nothing but what it has written to, if anything?"""
    return all(each.alias_info is not None for each in schema_of(target).returns)


ALL_TRUE: Mapping[OpOverload, Callable[..., object]] = {
    torch.ops.aten._is_all_true.default: Tensor.all,
    torch.ops.aten._is_any_true.default: Tensor.any,
}
"""What checks of arguments call (``torch.distributions``): what to trace instead. Of rows of which
nobody knows how many there are, PyTorch has no fake results of them."""
