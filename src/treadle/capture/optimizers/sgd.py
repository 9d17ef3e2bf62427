"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.optimizers.moments import decays, number, read, signed, with_decay
from treadle.capture.optimizers.registry import (
    AVERAGE,
    ElementwiseUpdate,
    Group,
    Start,
    Values,
    refused_gradients,
    register,
)
from treadle.capture.optimizers.rounding import add
from treadle.capture.tensors.sparse_gradients import SparseRows, refused_sparse


def _moves(group: Group) -> bool:
    """Whether there is momentum, which is a part of the graph."""
    return number(group, "momentum") != 0.0


@dataclass(frozen=True)
class SGDUpdate(ElementwiseUpdate):
    """``b = momentum b + (1 - dampening) g``, ``p -= lr b``; at the first step ``b = g``.

    The buffer starts as zeros and ``first`` is 1 at the first step, so both steps are one graph.
    """

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), _moves(group), group["nesterov"], group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"momentum_buffer": AVERAGE} if _moves(group) else {}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "momentum", "dampening", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        shared = {
            "momentum": scalars["momentum"],
            "weight_decay": scalars["weight_decay"],
            "rate": -scalars["lr"],
        }
        if _moves(group):
            shared["fresh"] = 1.0 - scalars["dampening"] * (1.0 - scalars["first"])
        return shared

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        if _moves(group):
            buffer = state["momentum_buffer"]
            buffer.copy_(add(buffer * shared["momentum"], grad, shared["fresh"]))
            grad = add(grad, buffer, shared["momentum"]) if group["nesterov"] else buffer
        parameter.copy_(add(parameter, grad, shared["rate"]))

    def update_rows(
        self, parameter: Tensor, rows: SparseRows, state: Values, shared: Values, group: Group
    ) -> None:
        """``p[i[n]] -= lr g[n]``, in the order of the rows."""
        if decays(group):
            raise refused_gradients(self, "weight_decay and sparse")
        if _moves(group):
            raise refused_sparse(
                "steps SGD with momentum with a sparse gradient, for which PyTorch accumulates "
                "the rows of all steps",
                "use momentum=0, SparseAdam, or an embedding without sparse=True",
            )
        values = signed(rows.values, group)
        parameter.index_add_(0, rows.at, (values * shared["rate"]).to(parameter.dtype))


UPDATE_RULES = {torch.optim.SGD: SGDUpdate()}
for _kind, _rule in UPDATE_RULES.items():
    register(_kind, _rule)
