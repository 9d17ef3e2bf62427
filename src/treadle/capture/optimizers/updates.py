"""Updates of parameters of one type, traced once.

A model has hundreds of parameters and few shapes. treadle's own update rules depend only on the
types of their arguments and on the options of the group. So the update of a second parameter with
the same types is that of the first, with other tensors.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import SymInt, Tensor

from treadle.capture.tracing_again import TracedPiece, tracing_of
from treadle.compat.tensors import storage_key


@final
@dataclass(frozen=True, slots=True)
class UpdatesOfGroup:
    """The updates of one step of one group, which share hyper-parameters."""

    _known: dict[Hashable, TracedPiece | None] = field(
        default_factory=dict[Hashable, TracedPiece | None]
    )

    def run(
        self, tensors: Sequence[Tensor], states: tuple[str, ...], update: Callable[[], None]
    ) -> None:
        """``update()``, which reads and writes ``tensors``: parameter, gradient and ``states``;
        traced, or as it was traced for others of their types."""
        types = _types(tensors)
        if types is None:
            update()
            return
        key = states, types
        if key not in self._known:
            piece = tracing_of(tensors)
            update()
            self._known[key] = piece()
            return
        known = self._known[key]
        if known is None:
            update()
        else:
            known.again(tensors)


def _types(tensors: Sequence[Tensor]) -> Hashable | None:
    """Equal for tensors that an update cannot tell apart; ``None`` where some share memory, or have
    dynamic sizes."""
    keys = {storage_key(tensor) for tensor in tensors}
    if len(keys) < len(tensors) or None in keys:
        return None
    types = tuple([_type(tensor) for tensor in tensors])
    return None if None in types else types


def _type(tensor: Tensor) -> Hashable | None:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if any(isinstance(size, SymInt) for size in sizes):
        return None
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tensor.dim(), sizes, flags
