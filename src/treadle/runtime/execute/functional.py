"""Custom operators that write to their arguments, as operators that return the written values.

::

    bump(Tensor(a!) x, Tensor y) -> ()                mine::bump
    bump(Tensor x, Tensor y) -> Tensor                treadle_functional::mine__bump__default

The second copies ``x``, calls the first on the copy, and returns the copy after its own results. It
is defined when it is first needed, in any process, under its name in an artifact.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.compat.operators.schemas import OpOverload, overload_of, schema_of, written_arguments

NAMESPACE = "treadle_functional"
_ORIGINALS: dict[OpOverload, OpOverload] = {}
"""Maps each operator that returns the written values to the operator that writes."""


def written_by(op: OpOverload) -> tuple[str, ...]:
    """The arguments that the original of ``op`` writes to, in the order in which ``op`` returns
    them after its other results; none of any other operator."""
    original = _ORIGINALS.get(op)
    if original is None:
        return ()
    return tuple(schema_of(original).arguments[at].name for at in _written(original))


def functional_of(op: OpOverload) -> OpOverload | None:
    """The operator that returns what ``op`` writes; ``None`` if ``op`` writes to lists or returns
    one of its arguments."""
    written = _written(op)
    if not written or not all(
        isinstance(schema_of(op).arguments[at].type, torch.TensorType) for at in written
    ):
        return None
    if any(result.alias_info is not None for result in schema_of(op).returns):
        return None
    namespace, name = schema_of(op).name.split("::")
    return _defined(f"{namespace}__{name}__{overload_of(op)}", op)


def named(name: str) -> OpOverload:
    """The operator ``treadle_functional.<name>``, defined if it is not yet."""
    namespace, packet, overload = name.split("__")
    packet_: object = getattr(getattr(torch.ops, namespace), packet)
    operator = functional_of(getattr(packet_, overload))
    assert operator is not None, name
    return operator


def updating(name: str) -> Callable[..., tuple[object, ...]]:
    """``treadle_functional.<name>`` with an option ``out``: the tensors that get the written
    values, with ``None`` for values that nobody reads. A value that is already in its tensor is not
    copied. The results are those of the original operator only."""
    op = _ORIGINALS[named(name)]
    names = [argument.name for argument in schema_of(op).arguments]
    written = [names[at] for at in _written(op)]

    def call(*args: Any, out: Sequence[Tensor | None], **kwargs: Any) -> tuple[object, ...]:
        every = dict(zip(names, args, strict=False)) | kwargs
        places = zip(written, out, strict=True)
        every |= {each: _put(every[each], place) for each, place in places}
        result = op(**every)
        return () if result is None else result if isinstance(result, tuple) else (result,)

    return call


def _put(value: Tensor, place: Tensor | None) -> Tensor:
    if place is None:
        return _copied(value)
    return place if place.data_ptr() == value.data_ptr() else place.copy_(value)


@functools.cache
def _defined(name: str, op: OpOverload) -> OpOverload:
    written = _written(op)
    parameters = [f"{argument.type} {argument.name}" for argument in schema_of(op).arguments]
    parameters = [
        _with_default(text, argument)
        for text, argument in zip(parameters, schema_of(op).arguments, strict=True)
    ]
    star = next(
        (at for at, argument in enumerate(schema_of(op).arguments) if argument.kwarg_only), None
    )
    if star is not None:
        parameters.insert(star, "*")
    returns = [str(result.type) for result in schema_of(op).returns] + ["Tensor"] * len(written)
    shown = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    names = [argument.name for argument in schema_of(op).arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        every = dict(zip(names, args, strict=False)) | kwargs
        copies = [_copied(every[names[at]]) for at in written]
        every |= {names[at]: copy for at, copy in zip(written, copies, strict=True)}
        result = op(**every)
        own = () if result is None else result if isinstance(result, tuple) else (result,)
        both = (*own, *copies)
        return both[0] if len(both) == 1 else both

    schema = f"{name}({', '.join(parameters)}) -> {shown}"
    functional = CustomOp(schema, fake=call, kernel=call, namespace=NAMESPACE).op
    _ORIGINALS[functional] = op
    return functional


def _with_default(text: str, argument: Any) -> str:
    if not argument.has_default_value():
        return text
    value = argument.default_value
    return f"{text}={value if not isinstance(value, str) else repr(value)}"


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _written(op: OpOverload) -> list[int]:
    return [at for at, _ in written_arguments(op)]
