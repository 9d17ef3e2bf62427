"""A random generator of the user's, in data: the graph and the artifact name it by a number."""

from dataclasses import dataclass
from typing import Any, final

from torch.fx.node import map_aggregate


@final
@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """The ``number``-th of the generators that the captured step draws from."""

    number: int

    def __str__(self) -> str:
        return f"generator {self.number}"


def without_generators(tree: Any) -> Any:
    """Arguments for a call that computes types alone: no generator is touched."""
    return map_aggregate(tree, _without)


def _without(value: Any) -> Any:
    return None if isinstance(value, GeneratorRef) else value


__all__ = ["GeneratorRef", "without_generators"]
