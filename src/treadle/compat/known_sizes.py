"""The values of a trace's symbols if some of its tensors have known sizes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import SymInt, Tensor


@final
@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A tensor that is not there yet."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """One of this layout, a fake one where a mode makes them."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def known_layout(value: Tensor, pairs: Iterable[tuple[object, object]]) -> KnownLayout:
    """That of a traced value, whose sizes are formulas of those of the inputs. ``pairs``: what each
    input was in the trace, and what it is. ``KeyError`` for a symbol that no input has."""
    known = dict(_symbols(pairs))
    shape = tuple(_number(size, known) for size in value.shape)
    strides = tuple(_number(stride, known) for stride in value.stride())
    return KnownLayout(shape, strides, value.dtype, value.device)


def _symbols(pairs: Iterable[tuple[object, object]]) -> Iterator[tuple[object, int]]:
    """Each symbol that is a size of an input, or an input, and what it is."""
    for traced, actual in pairs:
        sizes: Iterable[tuple[object, object]] = [(traced, actual)]
        if isinstance(traced, Tensor) and isinstance(actual, Tensor):
            sizes = zip(traced.shape, actual.shape, strict=True)
        for size, number in sizes:
            if isinstance(size, SymInt) and isinstance(number, int):
                formula: Any = size.node.expr
                if formula.is_Symbol:
                    yield formula, number


def _number(size: object, known: Mapping[object, int]) -> int:
    if isinstance(size, int):
        return size
    assert isinstance(size, SymInt)
    formula: Any = size.node.expr
    number = formula.xreplace(known)
    if not isinstance(number, int) and number.free_symbols:  # a symbol alone becomes an ``int``
        raise KeyError(f"{size} has a symbol that no input has")
    return int(number)
