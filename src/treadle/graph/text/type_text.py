"""Types in a step's text, as ``graph/text/exact.py`` writes them, read back."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.algebra.extents import least
from treadle.algebra.strides import contiguous_strides
from treadle.graph.analysis.dynamic import SampleMode, sample_with_twin
from treadle.graph.core.types import TensorType, short_dtypes, type_of_tensor
from treadle.graph.text.exact import USUAL_DEVICE
from treadle.graph.text.size_text import SizeReader
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
        found = type_of_tensor(value)
        strides = found.strides if self.strides is None else self.strides
        return TensorType(self.dtype, self.shape, strides, self.device) == found

    def empty(self, mode: SampleMode | None = None) -> Tensor:
        """A tensor of this type: a sample of ``mode``, or in the mode that is on."""
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        if mode is not None:
            return sample_with_twin(mode, self.shape, strides, self.dtype, self.device)
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
    """Reads types where ``scanner`` stands, literals with ``literals`` and sizes with ``sizes``."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.sizes = SizeReader(scanner)
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
        of_dims = self.sizes.size()
        size = self.scanner.number() if of_dims is None else of_dims
        longer = not (self.scanner.sees(",") or self.scanner.sees("]"))
        if not isinstance(size, int) or longer or least(size) < 0:
            text = "this is not a size: a number, or a formula of dims that the text says"
            raise self.scanner.error(text, at)
        return size
