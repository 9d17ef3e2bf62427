"""The results of a compiled graph: computed values, unchanged arguments, and constants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class Return:
    """A result: one of those computed, one of the arguments, or a constant."""

    computed: int | None
    place: int | None
    constant: object

    def value(self, args: Mapping[int, object], values: Sequence[object]) -> object:
        """With these arguments, by their places, and these computed values."""
        if self.computed is not None:
            return values[self.computed]
        return self.constant if self.place is None else args[self.place]


@dataclass(frozen=True, slots=True)
class Returns:
    """What a graph returns; ``computed``: the nodes that a call computes, in their order."""

    plan: tuple[Return, ...]
    computed: tuple[fx.Node, ...]

    @staticmethod
    def of(
        returned: Sequence[object], places: Sequence[fx.Node], computed: tuple[fx.Node, ...]
    ) -> "Returns":
        """Of nodes and constants; ``places``: the nodes of its arguments."""
        number = {node: at for at, node in enumerate(places)}
        position = {node: at for at, node in enumerate(computed)}
        plan = (
            Return(position.get(result), number.get(result), None)
            if isinstance(result, fx.Node)
            else Return(None, None, result)
            for result in returned
        )
        return Returns(tuple(plan), computed)

    def of_call(self, args: Mapping[int, object], values: Sequence[object]) -> list[object]:
        """As ``Return.value``, of each."""
        return [result.value(args, values) for result in self.plan]


def resolved(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Their numbers as memory has them: no conjugate or negative is left to be taken."""
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors]
