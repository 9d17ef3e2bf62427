"""Reads the output of ``show`` from left to right; errors show their position."""

import ast
import re
from collections.abc import Callable
from typing import TypeVar

from treadle.util.errors import ParseError

T = TypeVar("T")

_BLANKS = re.compile(r"[ \t]*")
_REST = re.compile(r"[^\n]*")
_QUOTED = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
_IN_WORD = re.compile(r"\w")
_NUMBER = re.compile(r"-?(?:inf\b|nan\b|\d+(?:\.(?!\.)\d*)?(?:[eE][+-]?\d+)?)")
_NAME = re.compile(r"[^\W\d]\w*")
_KEY = re.compile(r"[^\W\d]\w*=(?!=)")


class Scanner:
    """A text and a place in it. Blanks are skipped before each piece; the ends of lines count.

    ``remedy``: what the author of a text that does not fit can do.
    """

    def __init__(self, text: str, remedy: str) -> None:
        self.text = text
        self.at = 0
        self._remedy = remedy

    def error(self, message: str, at: int | None = None) -> ParseError:
        """To be raised: ``message`` about the piece at ``at``, or about the next one."""
        return ParseError(message, self.text, self.place() if at is None else at, self._remedy)

    def place(self) -> int:
        """Where the next piece begins."""
        blanks = _BLANKS.match(self.text, self.at)
        assert blanks is not None
        self.at = blanks.end()
        return self.at

    def sees(self, symbol: str) -> bool:
        """Whether the next piece is this symbol. A word is not seen in a longer one."""
        return self._sees(symbol, self.place())

    def _sees(self, symbol: str, at: int) -> bool:
        end = at + len(symbol)
        if not self.text.startswith(symbol, at):
            return False
        return not (symbol[-1].isalnum() and _IN_WORD.match(self.text, end))

    def take(self, symbol: str) -> bool:
        """Go past ``symbol`` if it is the next piece."""
        if not self.sees(symbol):
            return False
        self.at += len(symbol)
        return True

    def need(self, symbol: str) -> None:
        """Go past ``symbol``, which must be the next piece."""
        if not self.take(symbol):
            raise self.error(f"{symbol!r} is expected here")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Go past what fits ``pattern``, if the next piece does."""
        matched = pattern.match(self.text, self.place())
        if matched is None or not matched[0]:
            return None
        self.at = matched.end()
        return matched[0]

    def word(self, pattern: re.Pattern[str] = _NAME, what: str = "a name") -> str:
        """Go past what fits ``pattern``, which the next piece must."""
        matched = self.match(pattern)
        if matched is None:
            raise self.error(f"{what} is expected here")
        return matched

    def quoted(self) -> str | None:
        """Go past a text between quotes, as Python writes it, if that is the next piece."""
        at = self.place()
        matched = self.match(_QUOTED)
        try:
            return None if matched is None else str(ast.literal_eval(matched))
        except (SyntaxError, ValueError) as error:
            raise self.error(f"this is not text between quotes: {error}", at) from error

    def number(self) -> int | float | None:
        """Go past a number, if that is the next piece; ``1`` is an int and ``1.0`` a float."""
        matched = self.match(_NUMBER)
        if matched is None:
            return None
        return int(matched) if matched.lstrip("-").isdecimal() else float(matched)

    def integer(self) -> int:
        """Go past an integer, which the next piece must be."""
        at = self.place()
        value = self.number()
        if not isinstance(value, int):
            raise self.error("a whole number is expected here", at)
        return value

    def several(self, close: str, item: Callable[[], T]) -> list[T]:
        """``item, item, ... close``; a comma may follow the last."""
        values: list[T] = []
        while not self.take(close):
            if values:
                self.need(",")
                if self.take(close):
                    break
            values.append(item())
        return values

    def arguments(self, value: Callable[[], T]) -> tuple[tuple[T, ...], dict[str, T]]:
        """``value, name=value, ...)``: what is given by position, and by name."""

        def operand() -> tuple[str, T]:
            key = self.match(_KEY)
            return (key or "").rstrip("= "), value()

        operands = self.several(")", operand)
        return tuple(argument for key, argument in operands if not key), {
            k: v for k, v in operands if k
        }

    def rest(self) -> str:
        """Go past the rest of the line, without blanks around it."""
        return (self.match(_REST) or "").rstrip()

    def at_end_of_line(self) -> bool:
        """Whether nothing but space is left of the line."""
        at = self.place()
        return at == len(self.text) or self.text[at] == "\n"

    def next_line(self) -> None:
        """Go to the next line; nothing may be left of this one."""
        if not self.at_end_of_line():
            raise self.error("the line should end here")
        self.at += 1

    def at_end(self) -> bool:
        """Whether the whole text was read."""
        return self.at >= len(self.text)
