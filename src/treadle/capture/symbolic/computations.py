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
    """``function`` of what the parts are at a call. A part that several others are computed of is
    computed once, and a long chain is no deep recursion."""

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
    """What Python asked of numbers, and what came out. ``label``: the user's words for them."""

    compute: Callable[[], object]
    outcome: object
    label: str
    where: str
    roots: frozenset[Key] = field(default=frozenset(), metadata=NOT_STORED)

    def holds(self) -> bool:
        """Whether it comes out the same now; an exception of Python's is another outcome."""
        try:
            outcome = self.compute()
        except Exception:
            return False
        return type(outcome) is type(self.outcome) and bool(outcome == self.outcome)

    @property
    def words(self) -> str:
        """That it came out otherwise."""
        try:
            outcome = repr(self.compute())
        except Exception as error:
            outcome = type(error).__name__
        return f"a branch on {self.label} was {self.outcome!r} and is {outcome}: {self.where}"


@final
@dataclass(slots=True)
class Decisions:
    """Those of one run, each once. ``labels``: the user's words for what stood in."""

    labels: dict[Key, str] = field(default_factory=dict[Key, str])
    _made: dict[Key, NumberDecision] = field(default_factory=dict[Key, NumberDecision])
    _numbered: dict[Key, int] = field(default_factory=dict[Key, int])

    def key_of(self, *parts: Key) -> int:
        """Equal for what is computed alike."""
        return self._numbered.setdefault(parts, len(self._numbered))

    def add(
        self, key: int, compute: Callable[[], object], outcome: object, roots: frozenset[Key]
    ) -> None:
        """The run goes on with ``outcome`` of the question ``key``, which ``compute`` asks
        again."""
        if key not in self._made:
            label = ", ".join(sorted(self.labels.get(root, "a number") for root in roots))
            self._made[key] = NumberDecision(compute, outcome, label, here(), roots)

    def roots(self) -> set[Key]:
        """What they are decided by."""
        return {root for decision in self._made.values() for root in decision.roots}

    def beside(self, known: set[Key]) -> tuple[NumberDecision, ...]:
        """Those that do not follow from what is ``known``."""
        return tuple(decision for decision in self._made.values() if not decision.roots <= known)
