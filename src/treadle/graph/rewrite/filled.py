"""Values filled with one number."""

import torch
from torch import fx

from treadle.algebra.extents import Size
from treadle.graph.core.operators import arguments
from treadle.graph.core.types import is_tensor, type_of

aten = torch.ops.aten

FILLED = (
    aten.full.default,
    aten.full_like.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.scalar_tensor.default,
    aten.expand.default,
    aten.view.default,
)
"""What may be one number everywhere."""


def number_everywhere(value: object) -> complex | None:
    """The number that ``value`` is everywhere: a constant, or a tensor filled with one."""
    if isinstance(value, int | float | complex):
        return value
    if not isinstance(value, fx.Node) or not is_tensor(value):
        return None
    match value.target:
        case aten.full.default | aten.full_like.default:
            return _element(arguments(value)["fill_value"], type_of(value).dtype)
        case aten.ones.default | aten.ones_like.default:
            return as_element(1, type_of(value).dtype)
        case aten.zeros.default | aten.zeros_like.default:
            return as_element(0, type_of(value).dtype)
        case aten.scalar_tensor.default:
            return _element(arguments(value)["s"], type_of(value).dtype)
        case aten.expand.default | aten.view.default:
            return number_everywhere(value.args[0])
        case _:
            return None


def _element(number: complex, dtype: torch.dtype) -> complex | None:
    """``None`` for a size, which each call decides."""
    return None if isinstance(number, Size) else as_element(number, dtype)


def as_element(number: complex, dtype: torch.dtype) -> complex:
    """``number`` as an element of ``dtype``: 1.0000000001 is 1 in f32."""
    return torch.tensor(number, dtype=dtype).item()
