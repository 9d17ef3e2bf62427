"""Types and literals of a step's text, as ``graph/exact.py`` writes them, read back."""

import base64
import re
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treadle.graph.exact import USUAL_DEVICE, named_constants, usual_strides
from treadle.graph.types import type_of_tensor
from treadle.util.generators import GeneratorRef
from treadle.util.scanner import Scanner

DOTTED = re.compile(r"[^\W\d]\w*(?:\.\w+)*")
_DEVICE = re.compile(r"[a-z]+(?::\d+)?")


@dataclass(frozen=True, slots=True)
class TensorText:
    """What a text says of one tensor; ``strides``: as it says, if it does."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: torch.device

    def fits(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        found = type_of_tensor(value)
        same = (found.dtype, found.shape, found.device) == (self.dtype, self.shape, self.device)
        return same and self.strides in (None, found.strides)

    def empty(self) -> Tensor:
        """A tensor of this type, in the mode that is on."""
        strides = usual_strides(self.shape) if self.strides is None else self.strides
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


class Literals:
    """Reads types and literals where ``scanner`` stands."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self._words = named_constants()

    def type(self) -> TypeText:
        if self.scanner.take("("):
            return self.scanner.several(")", self.type)
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "a type")
        if not self.scanner.take("["):
            return word
        dtype = self._words.get(word, self._words.get(f"torch.{word}"))
        if not isinstance(dtype, torch.dtype):
            raise self.scanner.error(f"there is no dtype {word!r}", at)
        shape = tuple(self.scanner.several("]", self._size))
        strides = self._strides(len(shape)) if self.scanner.take("strides") else None
        device = USUAL_DEVICE
        if self.scanner.take("on"):
            device = self._device(self.scanner.word(_DEVICE, "a device"))
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

    def _device(self, text: str) -> torch.device:
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise self.scanner.error(f"there is no device {text!r}") from error

    def literal(self) -> Any:
        """An argument that is no value of the graph."""
        for name, value in (("None", None), ("True", True), ("False", False)):
            if self.scanner.take(name):
                return value
        for read in (self.scanner.quoted, self.scanner.number):
            found = read()
            if found is not None:
                return found
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "a value or a literal")
        if word == "generator":
            return GeneratorRef(self.scanner.integer())
        if word in self._words:
            return self._words[word]
        if not self.scanner.take("("):
            raise self.scanner.error(f"there is no value {word!r} here", at)
        return self._made(word, self.scanner.several(")", self.literal), at)

    def _made(self, word: str, given: list[Any], at: int) -> Any:
        match word, given:
            case "float", ["inf" | "-inf" | "nan" as text]:
                return float(text)
            case "complex", [int() | float() as real, int() | float() as imaginary]:
                return complex(real, imaginary)
            case "device", [str() as text]:
                return self._device(text)
            case "slice", [_, _, _]:
                return slice(*given)
            case _:
                raise self.scanner.error(f"{word}(...) is no literal", at)

    def numbers(self, kind: TensorText) -> Tensor:
        """The tensor of a constant: ``[1.0, 2.0]``, or ``bytes '...'``."""
        at = self.scanner.place()
        made = kind.empty()
        if self.scanner.take("["):
            flat = torch.tensor(self.scanner.several("]", self.literal), dtype=kind.dtype)
        elif self.scanner.take("bytes"):
            flat = self._bytes(kind.dtype)
        else:
            raise self.scanner.error("the numbers of the constant are not in the text")
        if flat.numel() != made.numel():
            text = f"{flat.numel()} numbers of a constant of {made.numel()}"
            raise self.scanner.error(text, at)
        return made.copy_(flat.view(kind.shape))

    def _bytes(self, dtype: torch.dtype) -> Tensor:
        at = self.scanner.place()
        try:
            raw = zlib.decompress(base64.b64decode(self.scanner.quoted() or ""))
        except (ValueError, zlib.error) as error:
            raise self.scanner.error(f"these are no bytes of a constant: {error}", at) from error
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


__all__ = ["DOTTED", "Literals", "TensorText", "TypeText", "fits"]
