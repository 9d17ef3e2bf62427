"""A user's random generator, as data: the graph and the artifact refer to it by a number."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """The ``number``-th of the generators that the captured step draws from."""

    number: int

    def __str__(self) -> str:
        return f"generator {self.number}"
