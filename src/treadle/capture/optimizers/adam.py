"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), as ``torch.optim``
rounds; SparseAdam, which is Adam for sparse gradients."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.optimizers.moments import (
    decays,
    moved_moments,
    read,
    signed,
    with_either_decay,
)
from treadle.capture.optimizers.registry import (
    AVERAGE,
    SQUARES,
    ZEROS,
    ElementwiseUpdate,
    Group,
    OptimizerUpdate,
    Start,
    Values,
    refused_gradients,
    register,
)
from treadle.capture.optimizers.rounding import addcdiv, lerp
from treadle.capture.tensors.sparse_gradients import SparseRows


@dataclass(frozen=True)
class AdamUpdate(ElementwiseUpdate):
    """Weight decay shrinks the parameter itself (``decoupled_weight_decay``, as AdamW sets it) or
    joins the gradient.

    ``m += (1 - b1) (g - m)``, ``v = b2 v + (1 - b2) g g``,
    ``p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``
    """

    def structure(self, group: Group) -> tuple[object, ...]:
        decay = group["decoupled_weight_decay"]
        return (group["amsgrad"], group["maximize"], decays(group), decay)

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        names = {"exp_avg": AVERAGE, "exp_avg_sq": SQUARES}
        return names | {"max_exp_avg_sq": SQUARES} if group["amsgrad"] else names

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "betas", "eps", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        step, beta1, beta2 = scalars["step"], scalars["beta1"], scalars["beta2"]
        return {
            "beta2": beta2,
            "eps": scalars["eps"],
            "keep": 1.0 - scalars["lr"] * scalars["weight_decay"],
            "weight_decay": scalars["weight_decay"],
            "rate1": 1.0 - beta1,
            "rate2": 1.0 - beta2,
            "step_size": -(scalars["lr"] / (1.0 - torch.pow(beta1, step))),
            "correction": torch.sqrt(1.0 - torch.pow(beta2, step)),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        value, grad = with_either_decay(parameter, grad, shared, group)
        mean, square = moved_moments(grad, state, shared)
        largest = square
        if group["amsgrad"]:
            largest = state["max_exp_avg_sq"]
            largest.copy_(torch.maximum(largest, square))
        denominator = largest.sqrt() / shared["correction"] + shared["eps"]
        parameter.copy_(addcdiv(value, mean, denominator, shared["step_size"]))


@dataclass(frozen=True)
class SparseAdamUpdate(OptimizerUpdate):
    """Adam on the rows of a sparse gradient. The moments of other rows stay, and bias correction
    uses the step count of the parameter."""

    @property
    def counters(self) -> Mapping[str, float]:
        return {"step": 0}

    def structure(self, group: Group) -> tuple[object, ...]:
        return (group["maximize"],)

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"exp_avg": ZEROS, "exp_avg_sq": ZEROS}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "betas", "eps")

    def prepare(self, scalars: Values, group: Group) -> Values:
        step, beta1, beta2 = scalars["step"], scalars["beta1"], scalars["beta2"]
        correction = torch.sqrt(1.0 - torch.pow(beta2, step))
        return {
            "beta2": beta2,
            "eps": scalars["eps"],
            "rate1": 1.0 - beta1,
            "rate2": 1.0 - beta2,
            "step_size": -(scalars["lr"] * correction / (1.0 - torch.pow(beta1, step))),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        raise refused_gradients(self, "dense")

    def update_rows(
        self, parameter: Tensor, rows: SparseRows, state: Values, shared: Values, group: Group
    ) -> None:
        at, grad = rows.summed()
        grad = signed(grad, group)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        new_mean = lerp(mean[at], grad, shared["rate1"])
        new_square = lerp(square[at], grad * grad, shared["rate2"])
        mean.index_copy_(0, at, new_mean)
        square.index_copy_(0, at, new_square)
        denominator = new_square.sqrt() + shared["eps"]
        moved = addcdiv(parameter[at], new_mean, denominator, shared["step_size"])
        parameter.index_copy_(0, at, moved)


UPDATE_RULES = {
    torch.optim.Adam: AdamUpdate(),
    torch.optim.AdamW: AdamUpdate(),
    torch.optim.SparseAdam: SparseAdamUpdate(),
}
for _kind, _rule in UPDATE_RULES.items():
    register(_kind, _rule)
