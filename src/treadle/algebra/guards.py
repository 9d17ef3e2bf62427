"""Answers that depend on sizes, taken from the sample and recorded: a ``Guard`` for each."""

from dataclasses import dataclass, field
from typing import final

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size, decided, difference, surely_less
from treadle.algebra.polynomial import Polynomial


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """``formula < 0`` or ``formula == 0``, and the answer that was assumed."""

    formula: Polynomial
    sign: str
    answer: bool

    def holds(self, sizes: Sizes) -> bool:
        """Whether the answer is right for these sizes."""
        value = self.formula.at(sizes)
        return (value < 0 if self.sign == "<" else value == 0) is self.answer

    def __str__(self) -> str:
        return f"{'' if self.answer else 'not '}{self.formula.text} {self.sign} 0"


@final
@dataclass(slots=True)
class GuardSet:
    """For which sizes the work done with it is right: those that every guard holds for."""

    guards: dict[Guard, None] = field(default_factory=dict[Guard, None])

    def holds(self, sizes: Sizes) -> bool:
        """Whether what was made is right for these sizes."""
        return all(guard.holds(sizes) for guard in self.guards)

    def equal(self, left: int, right: int) -> bool:
        """Whether ``left == right``; where sizes decide it, of the sample, and guarded."""
        if not isinstance(left, Size) and not isinstance(right, Size):
            return left == right
        return self._answer(difference(left, right), "==")

    def less(self, left: int, right: int) -> bool:
        """Whether ``left < right``; where sizes decide it, of the sample, and guarded."""
        if not isinstance(left, Size) and not isinstance(right, Size):
            return left < right
        return self._answer(difference(left, right), "<")

    def larger_of(self, left: int, right: int) -> int:
        """``max(left, right)``, guarded where sizes decide which one it is."""
        return right if surely_less(left, right + 1) or self.less(left, right) else left

    def smaller_of(self, left: int, right: int) -> int:
        """``min(left, right)``, guarded where sizes decide which one it is."""
        return right if surely_less(right, left + 1) or self.less(right, left) else left

    def _answer(self, formula: Polynomial, sign: str) -> bool:
        known = decided(formula, sign)
        if known is not None:
            return known
        answer = formula.sample < 0 if sign == "<" else formula.sample == 0
        self.guards.setdefault(Guard(formula, sign, answer))
        return answer
