"""Which functional form serves which optimizer."""

import abc
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from treadle.util.errors import CaptureError

Group = Mapping[str, Any]
Values = dict[str, Tensor]


class Form(abc.ABC):
    """One optimizer's update. Scalars are 0-dim float64, state has the parameter's shape."""

    @abc.abstractmethod
    def structure(self, group: Group) -> tuple[Any, ...]:
        """The options that change the graph itself."""

    @abc.abstractmethod
    def state_names(self, group: Group) -> tuple[str, ...]:
        """Per-parameter state tensors, under the names ``torch.optim`` uses."""

    @abc.abstractmethod
    def scalars(self, group: Group) -> dict[str, float]:
        """Hyper-parameters read at every call."""

    @abc.abstractmethod
    def prepare(self, scalars: Values, group: Group) -> Values:
        """What all parameters of a group share, computed once."""

    @abc.abstractmethod
    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        """Write the new parameter and state in place, under ``no_grad``."""

    @property
    @abc.abstractmethod
    def counts_steps(self) -> bool:
        """Does ``torch.optim`` keep a ``step`` counter per parameter?"""


_FORMS: dict[type[Optimizer], Form] = {}


def register(kind: type[Optimizer], form: Form) -> None:
    """Serve exactly ``kind`` (not its subclasses, which may override ``step``)."""
    if kind in _FORMS:
        raise ValueError(f"{kind.__name__} has two functional forms")
    _FORMS[kind] = form


def form_of(optimizer: Optimizer) -> Form:
    """The functional form, or ``CaptureError`` TR-105."""
    found = _FORMS.get(type(optimizer))
    if found is None:
        known = ", ".join(sorted(kind.__name__ for kind in _FORMS))
        raise CaptureError(
            f"{type(optimizer).__name__} has no form that can be captured",
            code="TR-105",
            remedy=f"use one of {known}",
        )
    return found
