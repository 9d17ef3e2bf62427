"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.optimizers.registry import (
    ZEROS,
    ElementwiseUpdate,
    Group,
    Start,
    Values,
    refused_gradients,
    register,
)
from treadle.capture.optimizers.rounding import add
from treadle.capture.tensors.sparse_gradients import SparseRows, refused_sparse


@dataclass(frozen=True)
class SGDUpdate(ElementwiseUpdate):
    """``b = momentum b + (1 - dampening) g``, ``p -= lr b``; at the first step ``b = g``.

    The buffer starts as zeros and ``first`` is 1 at the first step, so both steps are one graph.
    """

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def structure(self, group: Group) -> tuple[object, ...]:
        decays, moves = float(group["weight_decay"]) != 0.0, float(group["momentum"]) != 0.0
        return (decays, moves, group["nesterov"], group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"momentum_buffer": ZEROS} if float(group["momentum"]) != 0.0 else {}

    def scalars(self, group: Group) -> dict[str, float]:
        names = ("lr", "momentum", "dampening", "weight_decay")
        return {name: float(group[name]) for name in names}

    def prepare(self, scalars: Values, group: Group) -> Values:
        shared = {
            "momentum": scalars["momentum"],
            "decay": scalars["weight_decay"],
            "rate": -scalars["lr"],
        }
        if float(group["momentum"]) != 0.0:
            shared["fresh"] = 1.0 - scalars["dampening"] * (1.0 - scalars["first"])
        return shared

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        if group["maximize"]:
            grad = -grad
        if float(group["weight_decay"]) != 0.0:
            grad = add(grad, parameter, shared["decay"])
        if float(group["momentum"]) != 0.0:
            buffer = state["momentum_buffer"]
            buffer.copy_(add(buffer * shared["momentum"], grad, shared["fresh"]))
            grad = add(grad, buffer, shared["momentum"]) if group["nesterov"] else buffer
        parameter.copy_(add(parameter, grad, shared["rate"]))

    def update_rows(
        self, parameter: Tensor, rows: SparseRows, state: Values, shared: Values, group: Group
    ) -> None:
        """``p[i[n]] -= lr g[n]``, in the order of the rows."""
        if float(group["weight_decay"]) != 0.0:
            raise refused_gradients(self, "weight_decay and sparse")
        if float(group["momentum"]) != 0.0:
            raise refused_sparse(
                "steps SGD with momentum with a sparse gradient, for which PyTorch accumulates "
                "the rows of all steps",
                "use momentum=0, SparseAdam, or an embedding without sparse=True",
            )
        values = -rows.values if group["maximize"] else rows.values
        parameter.index_add_(0, rows.at, (values * shared["rate"]).to(parameter.dtype))


UPDATE_RULES = {torch.optim.SGD: SGDUpdate()}
for _kind, _form in UPDATE_RULES.items():
    register(_kind, _form)
