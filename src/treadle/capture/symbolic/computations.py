"""Python's computations and branches on substitute numbers, repeated at every call."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from treadle.capture.explain_errors import here
from treadle.capture.stored.names import NOT_STORED

Key = Hashable


@final
@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """``function`` of the values of its parts at a call. A part that several others use is computed
    once, and a long chain causes no deep recursion."""

    function: Callable[..., object]
    parts: Sequence[Callable[[], object]]

    def __call__(self) -> Any:
        known: dict[int, object] = {}
        waiting = [self]
        while waiting:
            computation = waiting[-1]
            before = [
                p for p in computation.parts if isinstance(p, Computation) and id(p) not in known
            ]
            if before:
                waiting += before
                continue
            waiting.pop()
            if id(computation) not in known:
                values = (
                    known[id(p)] if isinstance(p, Computation) else p() for p in computation.parts
                )
                known[id(computation)] = computation.function(*values)
        return known[id(self)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class NumberDecision:
    """A question that Python asked about numbers, and its outcome. ``label``: the user's words for
    the numbers."""

    compute: Callable[[], object]
    outcome: object
    label: str
    where: str
    roots: frozenset[Key] = field(default=frozenset(), metadata=NOT_STORED)

    def holds(self) -> bool:
        """Whether the outcome is the same now; an exception counts as another outcome."""
        try:
            outcome = self.compute()
        except Exception:
            return False
        return type(outcome) is type(self.outcome) and bool(outcome == self.outcome)

    @property
    def words(self) -> str:
        """A message that the outcome has changed."""
        try:
            outcome = repr(self.compute())
        except Exception as error:
            outcome = type(error).__name__
        return f"a branch on {self.label} was {self.outcome!r} and is {outcome}: {self.where}"


@final
@dataclass(slots=True)
class Decisions:
    """The decisions of one run, without duplicates. ``labels``: the user's words for values with
    stand-ins."""

    labels: dict[Key, str] = field(default_factory=dict[Key, str])
    _made: dict[Key, NumberDecision] = field(default_factory=dict[Key, NumberDecision])
    _numbered: dict[Key, int] = field(default_factory=dict[Key, int])

    def key_of(self, *parts: Key) -> int:
        """A key that is equal for equal computations."""
        return self._numbered.setdefault(parts, len(self._numbered))

    def add(
        self, key: int, compute: Callable[[], object], outcome: object, roots: frozenset[Key]
    ) -> None:
        """Add ``outcome`` of the question ``key``, with which the run continues; ``compute`` asks
        it again."""
        if key not in self._made:
            label = ", ".join(sorted(self.labels.get(root, "a number") for root in roots))
            self._made[key] = NumberDecision(compute, outcome, label, here(), roots)

    def roots(self) -> set[Key]:
        """The roots on which the decisions depend."""
        return {root for decision in self._made.values() for root in decision.roots}

    def beside(self, known: set[Key]) -> tuple[NumberDecision, ...]:
        """The decisions that do not depend only on ``known`` roots."""
        return tuple(decision for decision in self._made.values() if not decision.roots <= known)
