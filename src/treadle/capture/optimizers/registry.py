"""Which update rule serves which optimizer."""

import abc
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.failures import of_torch
from treadle.capture.tensors.sparse_gradients import SparseRows
from treadle.util.errors import CaptureError, kind_of

Group = Mapping[str, Any]
Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Start:
    """The initial value of a state tensor: filled with ``value``, in ``shape`` or the shape of the
    parameter. ``codes``: the dtype of its codes if it may be kept in 8 bits, as averages may:
    ``torch.int8``, or ``torch.uint8`` for what is never negative."""

    value: float = 0.0
    shape: tuple[int, ...] | None = None
    codes: torch.dtype | None = None


ZEROS = Start()
AVERAGE = Start(codes=torch.int8)
"""Of gradients."""
SQUARES = Start(codes=torch.uint8)
"""An average of squares or magnitudes."""


class OptimizerUpdate(abc.ABC):
    """The update rule of one optimizer, as tensor operations. Scalars are 0-dim float64 tensors."""

    @abc.abstractmethod
    def structure(self, group: Group) -> tuple[object, ...]:
        """The options that change the graph itself."""

    @abc.abstractmethod
    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        """State tensors of a parameter, under the names ``torch.optim`` uses."""

    @abc.abstractmethod
    def scalars(self, group: Group) -> dict[str, float]:
        """Hyper-parameters read at every call."""

    @abc.abstractmethod
    def prepare(self, scalars: Values, group: Group) -> Values:
        """The values that all parameters of a group share, computed once."""

    @abc.abstractmethod
    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        """Write the new parameter and state in place, under ``no_grad``."""

    def update_rows(
        self, parameter: Tensor, rows: SparseRows, state: Values, shared: Values, group: Group
    ) -> None:
        """The same for a sparse gradient. An optimizer need not support these."""
        raise refused_gradients(self, "sparse")

    @property
    def elementwise(self) -> bool:
        """Whether the new value of an element depends only on that element of the parameter,
        gradient and state. If ranks hold shards of a parameter, only such an update is in the
        graph."""
        return False

    @property
    def counters(self) -> Mapping[str, float]:
        """The counters that ``torch.optim`` keeps per parameter, with their initial values: 0-dim
        tensors on the host, or Python ints if the initial value is an int. ``prepare`` receives
        them as scalars, with ``step`` already advanced by one."""
        return {"step": 0.0}

    def advanced(self, counters: dict[str, float], group: Group) -> dict[str, float]:
        """The counters after a step; ``step`` is already advanced."""
        return counters


class ElementwiseUpdate(OptimizerUpdate):
    """An update of each element by itself."""

    @property
    def elementwise(self) -> bool:
        return True


def refused_gradients(rule: OptimizerUpdate, layout: str) -> CaptureError:
    """TR-132 for gradients that the optimizer does not accept in PyTorch either."""
    kinds = [kind.__name__ for kind, known in _UPDATE_RULES.items() if known is rule]
    text = f"{' and '.join(kinds)} cannot step with {layout} gradients"
    return of_torch(RuntimeError(text), here())


_UPDATE_RULES: dict[type[Optimizer], OptimizerUpdate] = {}


def register(kind: type[Optimizer], rule: OptimizerUpdate) -> None:
    """Serve exactly ``kind`` (not its subclasses, which may override ``step``)."""
    if kind in _UPDATE_RULES:
        raise ValueError(f"{kind.__name__} has two update rules")
    _UPDATE_RULES[kind] = rule
    _found.cache_clear()


def update_rules() -> dict[type[Optimizer], OptimizerUpdate]:
    """The update rules of all classes, for inspection."""
    return _UPDATE_RULES


def has_update_rule(optimizer: Optimizer) -> bool:
    """Whether the update can be part of a graph."""
    return _find(type(optimizer)) is not None


def update_rule(optimizer: Optimizer) -> OptimizerUpdate:
    """The update rule of an optimizer that has one."""
    rule = _find(type(optimizer))
    assert rule is not None, optimizer
    return rule


def _find(kind: type[Optimizer]) -> OptimizerUpdate | None:
    return _found(kind, kind.__mro__, kind.step)


@functools.lru_cache(maxsize=256)
def _found(
    kind: type[Optimizer], parents: tuple[type[Any], ...], step: Callable[..., object]
) -> OptimizerUpdate | None:
    """The update rule of the nearest base class that has one, if ``kind`` steps as that class does.
    ``parents``, ``step``: those of ``kind``, looked up at every call because they may change."""
    base = next((parent for parent in parents if parent in _UPDATE_RULES), None)
    return _UPDATE_RULES[base] if base is not None and _steps_as(kind, base, step) else None


def check_step(optimizer: Optimizer) -> None:
    """``CaptureError`` TR-114 for an update through which gradients should flow."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CaptureError(
            f"{type(optimizer).__name__}(differentiable=True): updates have no derivative",
            code="TR-114",
            remedy="set differentiable=False in a compiled step",
        )


def _steps_as(kind: type[Optimizer], base: type[Optimizer], step: Callable[..., object]) -> bool:
    """Whether ``kind`` is a ``base`` that steps as its base does. ``step``: that of ``kind``."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    if any("_init_group" in vars(parent) for parent in between):
        return False
    return inspect.unwrap(step) is inspect.unwrap(base.step)


def register_optimizer(kind: type[Optimizer], rule: OptimizerUpdate) -> None:
    """Register the update ``rule`` for optimizers of class ``kind``, so that steps with them
    are captured.

    ``rule`` declares the state tensors, the hyper-parameters that are read at each call, and how a
    parameter and its state change, in tensor operations. It serves ``kind`` and its subclasses that
    do not override ``step``. ``CaptureError`` TR-105 if ``kind`` is not an optimizer class or has
    an update rule already.
    """
    pair: tuple[Any, Any] = kind, rule  # users' code is not always typed
    if not isinstance(pair[0], type) or not issubclass(pair[0], Optimizer):
        raise CaptureError(
            f"{kind_of(kind)} is not a class of optimizers",
            code="TR-105",
            remedy="register a subclass of torch.optim.Optimizer, and not an instance of it",
        )
    if not isinstance(pair[1], OptimizerUpdate):
        raise CaptureError(
            f"{kind_of(rule)} is not an update rule",
            code="TR-105",
            remedy="register an instance of a subclass of treadle.OptimizerUpdate",
        )
    if kind in _UPDATE_RULES:
        raise CaptureError(
            f"{kind.__name__} has an update rule already",
            code="TR-105",
            remedy="register one rule for a class, once; a subclass may have another one",
        )
    _UPDATE_RULES[kind] = rule
