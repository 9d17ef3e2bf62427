"""The gradients that a step leaves in ``.grad`` of parameters, as data."""

from dataclasses import dataclass
from typing import final

from torch import nn

Toggle = tuple[nn.Parameter, bool]
"""A parameter, and whether it needs a gradient from then on."""


@final
@dataclass(frozen=True, slots=True)
class GradientEffects:
    """By parameters. ``left``: ``.grad`` has a value of the graph after the step; ``slots``, beside
    them: how it is made of what the graph gives. ``cleared``: nothing is there. ``untouched``: the
    gradient stays, and nobody reads it. ``fresh``: the gradient before the step does not matter;
    ``kept``: those of ``fresh`` whose gradient must stay until the conditions are known to hold."""

    left: tuple[nn.Parameter, ...] = ()
    slots: tuple[object, ...] = ()
    cleared: tuple[nn.Parameter, ...] = ()
    untouched: tuple[nn.Parameter, ...] = ()
    fresh: tuple[nn.Parameter, ...] = ()
    kept: tuple[nn.Parameter, ...] = ()
    toggled: tuple[Toggle, ...] = ()
