"""Types in a step's text, as ``graph/text/exact.py`` writes them, read back."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.algebra.strides import contiguous_strides
from treadle.graph.core.types import short_dtypes, type_of_tensor
from treadle.graph.text.exact import USUAL_DEVICE
from treadle.util.literals import DOTTED, LiteralReader
from treadle.util.scanner import Scanner

_DEVICE = re.compile(r"[a-z]+(?::\d+)?")


@dataclass(frozen=True, slots=True)
class TensorText:
    """What a text says of one tensor; ``strides``: as it says, if it does."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: torch.device

    def fits(self, value: object) -> bool:
        """Whether ``value`` is a tensor of this type."""
        if not isinstance(value, Tensor):
            return False
        tensor_type = type_of_tensor(value)
        same = (tensor_type.dtype, tensor_type.shape, tensor_type.device) == (
            self.dtype,
            self.shape,
            self.device,
        )
        return same and self.strides in (None, tensor_type.strides)

    def empty(self) -> Tensor:
        """A tensor of this type, in the mode that is on."""
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=self.device)


TypeText = TensorText | str | list["TypeText"]
"""Of one tensor, of several, or the name of another kind of value."""


def fits(kind: TypeText, value: Any) -> bool:
    """Whether a node's ``val`` is what the text says."""
    match kind:
        case TensorText():
            return kind.fits(value)
        case list():
            several = isinstance(value, tuple | list) and len(value) == len(kind)
            return several and all(map(fits, kind, value))
        case _:
            return type(value).__name__ == kind


class TypeReader:
    """Reads types where ``scanner`` stands, and literals with ``literals``."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.literals = LiteralReader(scanner, short_dtypes())

    def type(self) -> TypeText:
        """A tensor's type, or those of several in parentheses."""
        if self.scanner.take("("):
            return self.scanner.several(")", self.type)
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "a type")
        if not self.scanner.sees("["):
            return word
        self.scanner.at = at
        dtype = self.literals.dtype()
        self.scanner.need("[")
        shape = tuple(self.scanner.several("]", self._size))
        strides = self._strides(len(shape)) if self.scanner.take("strides") else None
        device = USUAL_DEVICE
        if self.scanner.take("on"):
            device = self.literals.device(self.scanner.word(_DEVICE, "a device"))
        return TensorText(dtype, shape, strides, device)

    def _strides(self, rank: int) -> tuple[int, ...]:
        self.scanner.need("[")
        at = self.scanner.place()
        strides = tuple(self.scanner.several("]", self._size))
        if len(strides) != rank:
            raise self.scanner.error(f"{len(strides)} strides of {rank} dims", at)
        return strides

    def _size(self) -> int:
        at = self.scanner.place()
        size = self.scanner.number()
        longer = not (self.scanner.sees(",") or self.scanner.sees("]"))
        if not isinstance(size, int) or size < 0 or longer:
            text = "a size that each call decides has no number here; capture the step without it"
            raise self.scanner.error(text, at)
        return size
