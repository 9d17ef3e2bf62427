"""A call that no variant serves yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from treadle.algebra.dims import Sizes
from treadle.capture.input_sources import Dims
from treadle.capture.symbolic.branches.decisions import Answers


def _no_sizes() -> Mapping[str, int]:
    return {}


@final
@dataclass(frozen=True, slots=True)
class NewCall:
    """``update``: whether optimizers step; ``path``: that it is known to take, at its beginning,
    and ``parts`` where it parts from the last call's. ``dims``: what serves it is to be for many
    sizes, which these are for the call."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    update: bool
    path: Answers
    parts: str = ""
    dims: Dims | None = None
    sizes: Sizes = field(default_factory=_no_sizes)
