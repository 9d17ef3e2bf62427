"""The user's step: a function, and what it trains."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType

from torch import nn
from torch.optim import Optimizer

from treadle.session.bind import without_updates


@dataclass(frozen=True, slots=True)
class UserStep:
    """``function`` with its models and optimizers by name. ``has_update``: whether it has a
    parameter ``update`` of its own; otherwise calls may be given one."""

    function: Callable[..., object]
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    has_update: bool

    @staticmethod
    def of(
        function: Callable[..., object],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
    ) -> "UserStep":
        """A function and what it trains."""
        return UserStep(function, models, optimizers, "update" in parameter_names(function))

    @property
    def name(self) -> str:
        """What to call it: the function's name, or its class's."""
        kind = self.function if isinstance(self.function, FunctionType) else type(self.function)
        return kind.__name__

    def take_update(self, kwargs: dict[str, object]) -> bool:
        """Whether optimizers step in a call with these ``kwargs``, which lose what is ours."""
        return True if self.has_update else bool(kwargs.pop("update", True))

    def run_eagerly(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The function as it is, for one call."""
        named = dict(kwargs)
        update = self.take_update(named)
        with nullcontext() if update else without_updates(self.models, self.optimizers):
            return self.function(*args, **named)


def parameter_names(function: Callable[..., object]) -> list[str]:
    """The parameters that a call fills by position or by name, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [each.name for each in parameters if each.kind in kinds]
