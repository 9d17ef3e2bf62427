"""A compiled step beside an eager one: results, parameters, buffers, state and ``.grad``."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import treadle

Parts = tuple[Callable[..., Any], Any, Any]
"""The step's function, and its models and optimizers: one, a list or a dict of each."""


def training(loss_of: Callable[..., Tensor], optimizer: Optimizer) -> Callable[..., Tensor]:
    """The ordinary step: loss, backward, update, and gradients cleared."""

    def step(*batch: Any) -> Tensor:
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _listed(value: Any, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, Sequence) else []


def state_of(models: Any, optimizers: Any) -> dict[str, Tensor | None]:
    """Everything a step may change, by name."""
    found: dict[str, Tensor | None] = {}
    for at, model in enumerate(_listed(models, nn.Module)):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found[f"{at}.{name}"] = tensor
        for name, parameter in model.named_parameters():
            found[f"{at}.{name}.grad"] = parameter.grad
    for at, optimizer in enumerate(_listed(optimizers, Optimizer)):
        for number, entry in optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    found[f"optimizer {at}.{number}.{name}"] = value
    return found


def assert_same_state(ours: Any, theirs: Any, *, rtol: float, atol: float) -> None:
    """Equal names; values close; what is ``None`` is so on both sides."""
    mine, others = state_of(*ours), state_of(*theirs)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        other = others[name]
        assert (value is None) == (other is None), f"{name}: {value} and {other}"
        torch.testing.assert_close(
            value, other, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def well_conditioned(optimizers: Any) -> None:
    """Raise the ``eps`` of optimizers far above rounding: with the default one a gradient that is
    zero but for rounding (of a bias before a norm, of attention's keys) becomes a step of up to
    ``lr``, and into which direction is another matter on each machine."""
    for each in _listed(optimizers, Optimizer):
        for group in each.param_groups:
            if isinstance(group.get("eps"), float):
                group["eps"] = max(group["eps"], 1e-4)


def beside_eager(
    make: Callable[[], Parts],
    batches: Callable[[int], tuple[Any, ...]],
    *,
    steps: int = 5,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    between: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> treadle.Step:
    """``make`` twice from one seed, one of them compiled; ``steps`` calls, compared after each.

    ``between``: called before each step with its number and the models, for both.
    """
    torch.manual_seed(0)
    function, models, optimizers = make()
    torch.manual_seed(0)
    eager, twins, others = make()
    well_conditioned(optimizers)
    well_conditioned(others)
    compiled = treadle.compile(function, model=models, optimizer=optimizers, **options)
    for number in range(steps):
        batch = batches(number)
        mirror = copy.deepcopy(batch)
        if between is not None:
            between(number, models)
            between(number, twins)
        torch.manual_seed(100 + number)
        ours = compiled(*batch)
        torch.manual_seed(100 + number)
        theirs = eager(*mirror)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        assert_same_state((models, optimizers), (twins, others), rtol=rtol, atol=atol)
    return compiled


def said(error: Exception) -> tuple[str, str, str]:
    """The code, the line and the remedy of an error, or of the note at one of the user's own."""
    if isinstance(error, treadle.TreadleError):
        return error.code, error.where, error.remedy
    text = "\n".join(getattr(error, "__notes__", []))
    code, _, rest = text.partition("] ")
    where, _, remedy = rest.partition("remedy:")
    return code.lstrip("["), where, remedy
