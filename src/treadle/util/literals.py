"""Arguments and numbers as text, and reading them back: the common part of both IRs' texts.

::

    1  -2.5  float('inf')  complex(1.0, 2.0)  True  None  'mean'  torch.float32  torch.strided
    torch.contiguous_format  device('cpu')  slice(1, None, None)  generator 0
    [1.0, 2.0]  bytes 'eJx...'                                the numbers of a tensor
"""

import base64
import functools
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treadle.util.generators import GeneratorRef
from treadle.util.scanner import Scanner

DOTTED = re.compile(r"[^\W\d]\w*(?:\.\w+)*")
"""A name with parts: of a dtype, of an operation."""
_FEW = 16
"""Numbers of a tensor that are shown as such."""
_MOST = 1 << 20
"""Bytes of a tensor that are shown at all."""


def literal_text(arg: object) -> str:
    """An argument that is not a value of the graph."""
    if arg is None or type(arg) in (bool, int, str):
        return repr(arg)
    match arg:
        case float():
            return repr(float(arg)) if math.isfinite(arg) else f"float('{arg}')"
        case complex():
            return f"complex({literal_text(arg.real)}, {literal_text(arg.imag)})"
        case torch.device():
            return f"device({str(arg)!r})"
        case GeneratorRef() | torch.dtype() | torch.layout() | torch.memory_format():
            return str(arg)
        case _:
            return f"<{type(arg).__name__} {arg}>"  # ``parse`` refuses it


def numbers_text(value: Tensor) -> str:
    """The numbers of a tensor, or its bytes if there are many; nothing for a very large one."""
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    wide = plain.dtype.itemsize > 1 or not plain.is_floating_point()  # of others nothing is known
    if plain.numel() <= _FEW and wide and not (plain != plain).any():
        return f"[{', '.join(map(literal_text, plain.tolist()))}]"
    if plain.nbytes > _MOST:
        return ""
    packed = zlib.compress(plain.view(torch.uint8).numpy().tobytes())
    return f"bytes {base64.b64encode(packed).decode()!r}"


@functools.cache
def _named_constants() -> dict[str, object]:
    """By its text, every dtype, layout and memory format."""
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return {
        str(constant): constant for constant in vars(torch).values() if isinstance(constant, kinds)
    }


class LiteralReader:
    """Reads literals where ``scanner`` stands. ``short``: other words for some."""

    def __init__(self, scanner: Scanner, short: Mapping[str, object]) -> None:
        self.scanner = scanner
        self._words = {**_named_constants(), **short}

    def dtype(self) -> torch.dtype:
        """A dtype by one of its names."""
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "a dtype")
        named = self._words.get(word, self._words.get(f"torch.{word}"))
        if not isinstance(named, torch.dtype):
            raise self.scanner.error(f"there is no dtype {word!r}", at)
        return named

    def literal(self) -> object:
        """An argument that is not a value of the graph."""
        for name, value in (("None", None), ("True", True), ("False", False)):
            if self.scanner.take(name):
                return value
        for read in (self.scanner.quoted, self.scanner.number):
            result = read()
            if result is not None:
                return result
        at = self.scanner.place()
        word = self.scanner.word(DOTTED, "a value or a literal")
        if word == "generator":
            return GeneratorRef(self.scanner.integer())
        if word in self._words:
            return self._words[word]
        if not self.scanner.take("("):
            raise self.scanner.error(f"there is no value {word!r} here", at)
        return self._made(word, self.scanner.several(")", self.literal), at)

    def _made(self, word: str, values: list[Any], at: int) -> object:
        match word, values:
            case "float", ["inf" | "-inf" | "nan" as text]:
                return float(text)
            case "complex", [int() | float() as real, int() | float() as imaginary]:
                return complex(real, imaginary)
            case "device", [str() as text]:
                return self.device(text)
            case "slice", [_, _, _]:
                return slice(*values)
            case _:
                raise self.scanner.error(f"{word}(...) is not a literal", at)

    def device(self, text: str) -> torch.device:
        """The device of a name."""
        try:
            return torch.device(text)
        except RuntimeError as error:
            raise self.scanner.error(f"there is no device {text!r}") from error

    def numbers(self, tensor: Tensor) -> Tensor:
        """``tensor`` with the numbers that stand here: ``[1.0, 2.0]``, or ``bytes '...'``."""
        at = self.scanner.place()
        if self.scanner.take("["):
            flat = torch.tensor(self.scanner.several("]", self.literal), dtype=tensor.dtype)
        elif self.scanner.take("bytes"):
            flat = self._bytes(tensor.dtype)
        else:
            raise self.scanner.error("the numbers of the constant are not in the text")
        if flat.numel() != tensor.numel():
            text = f"{flat.numel()} numbers of a constant of {tensor.numel()}"
            raise self.scanner.error(text, at)
        return tensor.copy_(flat.view(tensor.shape))

    def _bytes(self, dtype: torch.dtype) -> Tensor:
        at = self.scanner.place()
        try:
            raw = zlib.decompress(base64.b64decode(self.scanner.quoted() or ""))
        except (ValueError, zlib.error) as error:
            raise self.scanner.error(f"these are no bytes of a constant: {error}", at) from error
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
