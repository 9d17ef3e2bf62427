"""A random generator of the user's, in data: the graph and the artifact name it by a number."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """The ``number``-th of the generators that the captured step draws from."""

    number: int

    def __str__(self) -> str:
        return f"generator {self.number}"
