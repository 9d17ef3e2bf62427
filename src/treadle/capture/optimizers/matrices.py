"""Optimizers that look at a parameter as a matrix or by its signs, as ``torch.optim`` rounds.

Adafactor (Shazeer and Stern, 2018), Muon (Jordan et al., 2024), ASGD (Polyak and Juditsky, 1992),
Rprop (Riedmiller and Braun, 1993).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.capture.optimizers.moments import as_number, decays, number, read, signed, with_decay
from treadle.capture.optimizers.registry import (
    AVERAGE,
    ZEROS,
    ElementwiseUpdate,
    Group,
    OptimizerUpdate,
    Start,
    Values,
    register,
)
from treadle.capture.optimizers.rounding import add, lerp


@dataclass(frozen=True)
class AdafactorUpdate(OptimizerUpdate):
    """Second moments of a matrix as the outer product of its row means and column means; the rate
    is relative to the size of the parameter, and the update's root mean square is at most ``d``."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"], group["eps"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        if parameter.ndim < 2:
            return {"variance": ZEROS}
        *batch, rows, columns = parameter.shape
        return {
            "row_var": Start(shape=(*batch, rows, 1)),
            "col_var": Start(shape=(*batch, 1, columns)),
        }

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "beta2_decay", "weight_decay", "d")

    def prepare(self, scalars: Values, group: Group) -> Values:
        step, lr = scalars["step"], scalars["lr"]
        return {
            **scalars,
            "keep": 1.0 - lr * scalars["weight_decay"],
            "fresh": torch.pow(step, scalars["beta2_decay"]),
            "relative": torch.minimum(lr, torch.rsqrt(step)),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        small, least = group["eps"]
        small = torch.finfo(parameter.dtype).eps if small is None else small
        grad, elements = signed(grad, group), math.sqrt(parameter.numel())
        size = parameter.norm(2).double() / elements
        rate = size.clamp(min=least) * shared["relative"]
        value = parameter * shared["keep"] if decays(group) else parameter
        estimate = _variance(grad, state, shared["fresh"], small)
        update = estimate.clamp(min=small * small).rsqrt() * grad
        clipped = (update.norm(2).double() / (elements * shared["d"])).clamp(min=1.0)
        parameter.copy_(add(value, update, -rate / clipped))


def _variance(grad: Tensor, state: Values, fresh: Tensor, small: float) -> Tensor:
    if grad.ndim < 2:
        variance = state["variance"]
        variance.copy_(lerp(variance, grad * grad, fresh))
        return variance
    for name, dim in (("row_var", -1), ("col_var", -2)):
        mean = torch.norm(grad, dim=dim, keepdim=True).square() / grad.shape[dim]
        state[name].copy_(lerp(state[name], mean, fresh))
    rows = state["row_var"]
    return rows @ state["col_var"] / rows.mean(dim=-2, keepdim=True).clamp(min=small)


@dataclass(frozen=True)
class MuonUpdate(OptimizerUpdate):
    """Momentum, orthogonalised by Newton-Schulz iterations in bfloat16, of matrices alone."""

    @property
    def counters(self) -> Mapping[str, float]:
        return {}

    def structure(self, group: Group) -> tuple[object, ...]:
        names = ("nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
        return tuple(group[name] for name in names)

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"momentum_buffer": AVERAGE}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "momentum", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        keep = 1.0 - scalars["lr"] * scalars["weight_decay"]
        return {**scalars, "keep": keep, "fresh": 1.0 - scalars["momentum"]}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        buffer = state["momentum_buffer"]
        buffer.copy_(lerp(buffer, grad, shared["fresh"]))
        moved = lerp(grad, buffer, shared["momentum"]) if group["nesterov"] else buffer
        turned = _orthogonal(moved, group)
        rows, columns = parameter.shape
        ratio = math.sqrt(max(1.0, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        parameter.copy_(add(parameter * shared["keep"], turned, shared["lr"] * -ratio))


def _orthogonal(matrix: Tensor, group: Group) -> Tensor:
    """Singular values drawn to one by ``x -> a x + b x^3 + c x^5``, a few times."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.t() if tall else x
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


@dataclass(frozen=True)
class ASGDUpdate(ElementwiseUpdate):
    """``p = (1 - lambda eta) p - eta g``, and the average ``ax += mu (p - ax)``."""

    @property
    def counters(self) -> Mapping[str, float]:
        return {"step": 0.0, "eta": math.nan, "mu": 1.0}

    def advanced(self, counters: dict[str, float], group: Group) -> dict[str, float]:
        step, lr = counters["step"], number(group, "lr")
        eta = lr / (1.0 + group["lambd"] * lr * step) ** group["alpha"]
        return {"step": step, "eta": eta, "mu": 1.0 / max(1.0, step - group["t0"])}

    def structure(self, group: Group) -> tuple[object, ...]:
        return (decays(group), group["maximize"])

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"ax": ZEROS}

    def scalars(self, group: Group) -> dict[str, float]:
        return read(group, "lr", "lambd", "weight_decay")

    def prepare(self, scalars: Values, group: Group) -> Values:
        eta = torch.where(scalars["eta"].isnan(), scalars["lr"], scalars["eta"])
        keep = 1.0 - scalars["lambd"] * eta
        return {**scalars, "keep": keep, "rate": -eta, "first": scalars["mu"] == 1.0}

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad = with_decay(signed(grad, group), parameter, shared, group)
        value = add(parameter * shared["keep"], grad, shared["rate"])
        mean = state["ax"]
        mean.copy_(torch.where(shared["first"], value, mean + (value - mean) * shared["mu"]))
        parameter.copy_(value)


@dataclass(frozen=True)
class RpropUpdate(ElementwiseUpdate):
    """Each element has a step size that grows while the gradient keeps its sign."""

    def structure(self, group: Group) -> tuple[object, ...]:
        return (group["maximize"],)

    def states(self, parameter: Tensor, group: Group) -> Mapping[str, Start]:
        return {"prev": ZEROS, "step_size": Start(number(group, "lr"))}

    def scalars(self, group: Group) -> dict[str, float]:
        (less, more), (low, high) = group["etas"], group["step_sizes"]
        return {
            "less": as_number("etas", less),
            "more": as_number("etas", more),
            "low": as_number("step_sizes", low),
            "high": as_number("step_sizes", high),
        }

    def prepare(self, scalars: Values, group: Group) -> Values:
        return scalars

    def update(
        self, parameter: Tensor, grad: Tensor, state: Values, shared: Values, group: Group
    ) -> None:
        grad, before, size = signed(grad, group), state["prev"], state["step_size"]
        turn = grad * before
        grown = torch.where(turn > 0, size * shared["more"], size)
        grown = torch.where(turn < 0, size * shared["less"], grown)
        size.copy_(torch.minimum(torch.maximum(grown, shared["low"]), shared["high"]))
        grad = torch.where(turn < 0, 0.0, grad)
        before.copy_(grad)
        parameter.copy_(parameter - grad.sign() * size)


UPDATE_RULES: dict[type[torch.optim.Optimizer], OptimizerUpdate] = {
    torch.optim.Adafactor: AdafactorUpdate(),
    torch.optim.Muon: MuonUpdate(),
    torch.optim.ASGD: ASGDUpdate(),
    torch.optim.Rprop: RpropUpdate(),
}
for _kind, _rule in UPDATE_RULES.items():
    register(_kind, _rule)
