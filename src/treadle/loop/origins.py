"""What the origins of a kernel's formulas say together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.loop.program import Origin
from treadle.util.wording import layer_of, operation_counts

_OPERATIONS, _LAYERS = 6, 3
"""The most that a name of a launch lists."""


@dataclass(frozen=True, slots=True)
class OriginSummary:
    """The operations of some formulas, each node's once, and the phase, module and user's line that
    most of them belong to."""

    operations: tuple[str, ...]
    phase: str
    module: str
    where: str

    @staticmethod
    def of(origins: Sequence[Origin]) -> "OriginSummary":
        """Of these origins; lines and modules are those of the phase."""
        names = {name: origin.operation or name for origin in origins for name in origin.nodes}
        phase = _most(origin.phase for origin in origins)
        own = [origin for origin in origins if origin.phase == phase]
        module = _most(origin.module for origin in own)
        where = _most(origin.where for origin in own)
        return OriginSummary(tuple(names.values()), phase, module, where)


def profile_name(function: str, kernels: Sequence[Sequence[Origin]]) -> str:
    """How profiles call a launch of ``function`` for kernels with these origins::

    treadle_1 backward blocks.*.mlp: gelu_backward, mul.Tensor ×2
    """
    found = [OriginSummary.of(origins) for origins in kernels]
    layers = list(dict.fromkeys(layer_of(each.module) for each in found if each.module))
    shown = ", ".join([*layers[:_LAYERS], *(["..."] if len(layers) > _LAYERS else [])])
    phase = next((each.phase for each in found if each.phase), "")
    head = " ".join(part for part in (function, phase, shown) if part)
    operations = operation_counts(found[0].operations, _OPERATIONS) if found else ""
    return f"{head}: {operations}" if operations else head


def _most(words: Iterable[str]) -> str:
    """The word that occurs most often, of equals the last; empty ones do not count."""
    counts = Counter(word for word in words if word)
    return max(reversed(counts), key=counts.__getitem__, default="")
