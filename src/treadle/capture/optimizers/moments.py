"""Functions that update rules share: hyper-parameters by name, weight decay, and moments of
gradients."""

from typing import Any

from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.capture.failures import also
from treadle.capture.optimizers.registry import Group, Values
from treadle.capture.optimizers.rounding import add, addcmul, lerp


def number(group: Group, name: str) -> float:
    """A hyper-parameter that is one number."""
    return as_number(name, group[name])


def as_number(name: str, value: Any) -> float:
    """``value`` as a number. TR-132, a ``TypeError``, for text, which Python would convert and no
    optimizer of PyTorch's takes."""
    if value is None or isinstance(value, str | bytes):
        raise also(TypeError)(
            f"an optimizer of the step has {name}={value!r}, which is not a number",
            code="TR-132",
            where=here(),
            remedy=f"set {name!r} in param_groups to a number",
        )
    return float(value)


def decays(group: Group) -> bool:
    """Whether weight decay is on, which decides the graph."""
    return number(group, "weight_decay") != 0.0


def signed(grad: Tensor, group: Group) -> Tensor:
    """The gradient to descend."""
    return -grad if group["maximize"] else grad


def with_decay(grad: Tensor, parameter: Tensor, shared: Values, group: Group) -> Tensor:
    """``g + weight_decay * p``, where there is any."""
    return add(grad, parameter, shared["weight_decay"]) if decays(group) else grad


def read(group: Group, *names: str) -> dict[str, float]:
    """Hyper-parameters under their own names; ``betas`` are ``beta1`` and ``beta2``."""
    hyper_parameters: dict[str, float] = {}
    for name in names:
        if name == "betas":
            beta1, beta2 = group[name]
            hyper_parameters |= {"beta1": as_number(name, beta1), "beta2": as_number(name, beta2)}
        else:
            hyper_parameters[name] = number(group, name)
    return hyper_parameters


def with_either_decay(
    parameter: Tensor, grad: Tensor, shared: Values, group: Group
) -> tuple[Tensor, Tensor]:
    """The parameter and the gradient to descend: weight decay shrinks the parameter itself
    (``decoupled_weight_decay``) or joins the gradient."""
    grad = signed(grad, group)
    if decays(group) and group["decoupled_weight_decay"]:
        return parameter * shared["keep"], grad
    return parameter, with_decay(grad, parameter, shared, group)


def moved_moments(grad: Tensor, state: Values, shared: Values) -> tuple[Tensor, Tensor]:
    """``m += (1 - b1) (g - m)``, ``v = b2 v + (1 - b2) g g``, in the optimizer's state."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.copy_(lerp(mean, grad, shared["rate1"]))
    square.copy_(addcmul(square * shared["beta2"], grad, grad, shared["rate2"]))
    return mean, square
