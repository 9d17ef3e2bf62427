"""``treadle::normal`` and its like: what PyTorch draws in place, as a function of a layout.

::

    x.normal_(0.0, 1.0)      x of 4 x 3, strides (1, 4)
    treadle::normal([4, 3], [1, 4], float32, cpu, 0.0, 1.0)

Random numbers are drawn in the order of memory, and some kernels draw differently where memory is
contiguous: the numbers are a function of the strides. PyTorch's own functional versions return
other strides than the in-place ones, so they put the same numbers elsewhere.
"""

import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.compat.operators.schemas import OpOverload, schema_of

aten = torch.ops.aten

_IN_PLACE: tuple[OpOverload, ...] = (
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    getattr(aten.random_, "from"),  # a word of Python's
    aten.random_.default,
    aten.random_.to,
    aten.uniform_.default,
)
"""Operators that overwrite a tensor with random numbers, whatever was in it."""


def _defined(op: OpOverload) -> OpOverload:
    """Our operator for the in-place ``op``, with the same name but for the underscore."""
    schema = schema_of(op)
    name = schema.name.removeprefix("aten::").removesuffix("_")
    overload = schema.overload_name
    if keyword.iskeyword(overload):  # such an operator cannot stand in a traced graph
        overload += "_"
    rest = str(schema).partition("self")[2].rpartition(") ->")[0]
    rest = rest.replace(" from", " start").replace(" to", " end")  # words of Python's
    dotted = f"{name}.{overload}" if overload else name
    layout = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"

    def draw(
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *rest: object,
        **named: object,
    ) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return op(made, *rest, **named)

    def fake(
        size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    schema = f"{dotted}({layout}{rest}) -> Tensor"
    return CustomOp(schema, fake=fake, kernel=draw, tags=_TAGS).op


_TAGS = (torch.Tag.nondeterministic_seeded,)

DRAWS: Mapping[OpOverload, OpOverload] = {op: _defined(op) for op in _IN_PLACE}
"""Our operator for each of PyTorch's that draws in place."""

BERNOULLI = DRAWS[aten.bernoulli_.float]

_FUNCTIONAL: Mapping[OpOverload, OpOverload] = {
    aten.bernoulli.Tensor: aten.bernoulli_.Tensor,
    aten.cauchy.default: aten.cauchy_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.geometric.default: aten.geometric_.default,
    aten.log_normal.default: aten.log_normal_.default,
    aten.normal_functional.default: aten.normal_.default,
    getattr(aten.random, "from"): getattr(aten.random_, "from"),
    aten.random.default: aten.random_.default,
    aten.random.to: aten.random_.to,
    aten.uniform.default: aten.uniform_.default,
}

FUNCTIONAL: Mapping[OpOverload, OpOverload] = {
    functional: DRAWS[in_place] for functional, in_place in _FUNCTIONAL.items()
}
"""Our operator for each of PyTorch's that only functionalization calls, never a user."""


def _written(in_place: OpOverload) -> Callable[..., Tensor]:
    draw = DRAWS[in_place]

    def write(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        layout = list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device
        return tensor.copy_(draw(*layout, *args, **kwargs))

    return write


def _made(fill: Callable[..., Tensor], dtype: torch.dtype | None) -> Callable[..., object]:
    """Of a size that is not a number yet PyTorch knows no type of a draw by a generator: an empty
    tensor is filled, as eager's kernel does it."""

    def make(*args: Any, generator: object = None, **options: Any) -> object:
        *bounds, size = args
        if all(type(n) is int for n in size):
            return NotImplemented
        kind = options.get("dtype") or dtype
        made = torch.empty(size, dtype=kind, device=options.get("device"))
        return fill(made, *bounds, generator=generator)

    return make


def _without(draw: Callable[..., Tensor]) -> Callable[..., object]:
    """Likewise of whole numbers below a size. The generator is known of where it was given, and
    the operator without one has the same kernel."""

    def make(*args: Any, generator: object = None, **options: Any) -> object:
        if all(type(n) is int for given in args for n in _listed(given)):
            return NotImplemented
        return draw(*args, **options)

    return make


def _listed(given: object) -> Sequence[object]:
    return given if isinstance(given, list | tuple) else (given,)


BY_GENERATOR: Mapping[OpOverload, OpOverload] = {
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
}
"""Operators that are traced without the generator that was given, as those which take it."""

_MADE = {
    aten.randn.generator: _made(Tensor.normal_, None),
    aten.rand.generator: _made(Tensor.uniform_, None),
    **{given: _without(bare) for bare, given in BY_GENERATOR.items()},
}

TRACED_AS: Mapping[OpOverload, Callable[..., object]] = {
    **{op: _written(op) for op in _IN_PLACE if keyword.iskeyword(schema_of(op).overload_name)},
    **_MADE,
}
"""Operators whose name is a word of Python's, and draws of sizes that are no numbers: what to trace
instead."""
