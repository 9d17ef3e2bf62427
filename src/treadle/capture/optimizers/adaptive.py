"""Optimizers that scale each element by its history, as ``torch.optim`` rounds.

Adagrad (Duchi et al., 2011), RMSprop (Hinton, 2012; centred: Graves, 2013), Adadelta (Zeiler,
2012), Adamax (Kingma and Ba, 2015, section 7), NAdam (Dozat, 2016), RAdam (Liu et al., 2020).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.optimizers.moments import (
    decays,
    moved_moments,
    number,
    read,
    signed,
    with_decay,
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
from treadle.capture.optimizers.rounding import add, addcdiv, addcmul, lerp
from treadle.capture.tensors.sparse_gradients import SparseRows


@dataclass(frozen=True)
class AdagradUpdate(ElementwiseUpdate):
    """``s += g g``, ``p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)``."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"sum": Start(number(group, "initial_accumulator_value"))}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "lr_decay", "eps", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        rate = scalars["lr"] / (1.0 + (scalars["step"] - 1.0) * scalars["lr_decay"])
        return {**scalars, "rate": -rate, "one": torch.ones_like(rate)}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        total = state["sum"]
        total.copy_(addcmul(total, grad, grad, shared["one"]))
        parameter.copy_(addcdiv(parameter, grad, total.sqrt() + shared["eps"], shared["rate"]))

    def update_rows(
        self, parameter: Tensor, rows: SparseRows, state: Values, shared: Values, group: Group
    ) -> None:
        """Update only the rows that the gradient has."""
        if decays(group):
            raise refused_gradients(self, "weight_decay and sparse")
        at, grad = rows.summed()
        grad = signed(grad, group)
        total = state["sum"]
        new = addcmul(total[at], grad, grad, shared["one"])
        total.index_copy_(0, at, new)
        updated = addcdiv(parameter[at], grad, new.sqrt() + shared["eps"], shared["rate"])
        parameter.index_copy_(0, at, updated)


@dataclass(frozen=True)
class RMSpropUpdate(ElementwiseUpdate):
    """``s = a s + (1 - a) g g``, ``p -= lr g / (sqrt(s) + eps)``, with momentum on the quotient;
    centred: ``s - m m`` in the place of ``s``, with the mean ``m`` of the gradients."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"], group["centered"], group["momentum"] > 0)

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        names = {"momentum_buffer": AVERAGE} if group["momentum"] > 0 else {}
        if group["centered"]:  # a difference of the two, which has a root: neither is rounded
            return names | {"square_avg": ZEROS, "grad_avg": ZEROS}
        return names | {"square_avg": SQUARES}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "alpha", "eps", "momentum", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        minus = -torch.ones_like(scalars["lr"])
        fresh = 1.0 - scalars["alpha"]
        return {**scalars, "fresh": fresh, "rate": -scalars["lr"], "minus": minus}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        square = state["square_avg"]
        square.copy_(addcmul(square * shared["alpha"], grad, grad, shared["fresh"]))
        spread = square
        if group["centered"]:
            mean = state["grad_avg"]
            mean.copy_(lerp(mean, grad, shared["fresh"]))
            spread = addcmul(square, mean, mean, shared["minus"])
        root = spread.sqrt() + shared["eps"]
        if group["momentum"] > 0:
            buffer = state["momentum_buffer"]
            buffer.copy_(addcdiv(buffer * shared["momentum"], grad, root, -shared["minus"]))
            parameter.copy_(add(parameter, buffer, shared["rate"]))
        else:
            parameter.copy_(addcdiv(parameter, grad, root, shared["rate"]))


@dataclass(frozen=True)
class AdadeltaUpdate(ElementwiseUpdate):
    """``s = r s + (1 - r) g g``, ``d = sqrt(a + eps) / sqrt(s + eps) g``,
    ``a = r a + (1 - r) d d``, ``p -= lr d``."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"square_avg": ZEROS, "acc_delta": ZEROS}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "rho", "eps", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        return {**scalars, "fresh": 1.0 - scalars["rho"], "rate": -scalars["lr"]}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        square, moved = state["square_avg"], state["acc_delta"]
        square.copy_(addcmul(square * shared["rho"], grad, grad, shared["fresh"]))
        eps = shared["eps"]
        change = (moved + eps).sqrt() / (square + eps).sqrt() * grad
        moved.copy_(addcmul(moved * shared["rho"], change, change, shared["fresh"]))
        parameter.copy_(add(parameter, change, shared["rate"]))


@dataclass(frozen=True)
class AdamaxUpdate(ElementwiseUpdate):
    """``m += (1 - b1) (g - m)``, ``u = max(b2 u, |g| + eps)``, ``p -= lr / (1 - b1^t) m / u``."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"exp_avg": AVERAGE, "exp_inf": SQUARES}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "eps", "weight_decay", "betas")

    def prepare(self, scalars: Values, group: Group) -> Values:
        left = 1.0 - torch.pow(scalars["beta1"], scalars["step"])
        return {**scalars, "fresh": 1.0 - scalars["beta1"], "rate": -scalars["lr"] / left}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        mean, largest = state["exp_avg"], state["exp_inf"]
        mean.copy_(lerp(mean, grad, shared["fresh"]))
        largest.copy_(torch.maximum(largest * shared["beta2"], grad.abs() + shared["eps"]))
        parameter.copy_(addcdiv(parameter, mean, largest, shared["rate"]))


@dataclass(frozen=True)
class NAdamUpdate(ElementwiseUpdate):
    """Adam with Nesterov's momentum, whose factor ``mu_t = b1 (1 - 0.96^(t d) / 2)`` grows:
    ``p -= lr (1 - mu_t) / (1 - M_t) g / n + lr mu_{t+1} / (1 - M_{t+1}) m / n``, M their product.
    """

    @property
    def counters(self) -> Mapping[str, float]:
        return {"step": 0.0, "mu_product": 1.0}

    def advanced(self, counters: dict[str, float], group: Group) -> dict[str, float]:
        power = 0.96 ** (counters["step"] * group["momentum_decay"])
        grown = group["betas"][0] * (1.0 - 0.5 * power)
        return {**counters, "mu_product": counters["mu_product"] * grown}

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["decoupled_weight_decay"], group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"exp_avg": AVERAGE, "exp_avg_sq": SQUARES}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "eps", "weight_decay", "momentum_decay", "betas")

    def prepare(self, scalars: Values, group: Group) -> Values:
        step, beta1, lr = scalars["step"], scalars["beta1"], scalars["lr"]

        def grown(t: Tensor) -> Tensor:
            return beta1 * (1.0 - 0.5 * torch.pow(0.96, t * scalars["momentum_decay"]))

        now, later = grown(step), grown(step + 1.0)
        product = scalars["mu_product"] * now
        return {
            **scalars,
            "keep": 1.0 - lr * scalars["weight_decay"],
            "rate1": 1.0 - beta1,
            "rate2": 1.0 - scalars["beta2"],
            "left": 1.0 - torch.pow(scalars["beta2"], step),
            "of_grad": -lr * (1.0 - now) / (1.0 - product),
            "of_mean": -lr * later / (1.0 - product * later),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        value, grad = with_either_decay(parameter, grad, shared, group)
        mean, square = moved_moments(grad, state, shared)
        spread = (square / shared["left"]).sqrt() + shared["eps"]
        value = addcdiv(value, grad, spread, shared["of_grad"])
        parameter.copy_(addcdiv(value, mean, spread, shared["of_mean"]))


@dataclass(frozen=True)
class RAdamUpdate(ElementwiseUpdate):
    """Adam whose adaptive rate is rectified, and off while its variance is unknown:
    ``rho_t = rho - 2 t b2^t / (1 - b2^t)`` with ``rho = 2 / (1 - b2) - 1`` must exceed 5."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["decoupled_weight_decay"], group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"exp_avg": AVERAGE, "exp_avg_sq": SQUARES}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "eps", "weight_decay", "betas")

    def prepare(self, scalars: Values, group: Group) -> Values:
        step, beta2 = scalars["step"], scalars["beta2"]
        power = torch.pow(beta2, step)
        longest = 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * step * power / (1.0 - power)
        rectified = (length - 4.0) * (length - 2.0) * longest
        rectified = rectified / ((longest - 4.0) * (longest - 2.0) * length)
        return {
            **scalars,
            "keep": 1.0 - scalars["lr"] * scalars["weight_decay"],
            "rate1": 1.0 - scalars["beta1"],
            "rate2": 1.0 - beta2,
            "left": 1.0 - torch.pow(scalars["beta1"], step),
            "rate": -scalars["lr"],
            "known": length > 5.0,
            "rectified": torch.sqrt(rectified.clamp(min=0.0)) * torch.sqrt(1.0 - power),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        value, grad = with_either_decay(parameter, grad, shared, group)
        mean, square = moved_moments(grad, state, shared)
        plain = mean / shared["left"] * shared["rate"]
        adaptive = plain * (shared["rectified"] / (square.sqrt() + shared["eps"]))
        parameter.copy_(value + torch.where(shared["known"], adaptive, plain))


UPDATE_RULES: dict[type[torch.optim.Optimizer], OptimizerUpdate] = {
    torch.optim.Adagrad: AdagradUpdate(),
    torch.optim.RMSprop: RMSpropUpdate(),
    torch.optim.Adadelta: AdadeltaUpdate(),
    torch.optim.Adamax: AdamaxUpdate(),
    torch.optim.NAdam: NAdamUpdate(),
    torch.optim.RAdam: RAdamUpdate(),
}
for _kind, _rule in UPDATE_RULES.items():
    register(_kind, _rule)
