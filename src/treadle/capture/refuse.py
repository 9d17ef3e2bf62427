"""Refusals before anything is traced."""

import inspect
import itertools
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.explain_errors import here
from treadle.capture.optimizers import adam, adaptive, matrices, sgd
from treadle.capture.python_state.changes import LateError
from treadle.compat.distributed.fully_sharded import ShardedStatePlan, is_fully_sharded, plans_of
from treadle.compat.hooks import is_initialized
from treadle.compat.tracing import is_traced_here
from treadle.util.errors import CaptureError, kind_of, with_article

KNOWN_UPDATE_RULES = (
    adam.UPDATE_RULES,
    sgd.UPDATE_RULES,
    adaptive.UPDATE_RULES,
    matrices.UPDATE_RULES,
)
"""Importing the modules registers their update rules."""

LOOSE = "loose"
"""The prefix of the names of tensors that an optimizer steps and that belong to no model."""

T = TypeVar("T")
_WRAPPERS = ("FullyShardedDataParallel", "DataParallel")


def check_call(function: object, models: object, compiled: type) -> None:
    """Check the arguments of ``compile``: a function of a whole step, and the model that it uses.
    ``compiled``: the class of its results."""
    if isinstance(function, compiled):
        raise CaptureError(
            "treadle.compile received a step that treadle.compile returned: it is compiled already",
            code="TR-135",
            remedy="call it as it is, or compile the original function with other options",
        )
    if models is None and isinstance(function, nn.Module):
        raise CaptureError(
            "treadle.compile received a module, but it compiles the function of a whole step",
            code="TR-135",
            remedy="def step(x, y): loss = ...; loss.backward(); optimizer.step(); ...; then "
            "treadle.compile(step, model=model, optimizer=optimizer). For a module alone: "
            'torch.compile(model, backend="treadle")',
        )
    if not callable(function) or isinstance(function, type):
        raise CaptureError(
            f"treadle.compile received {kind_of(function)}, not the function of a step",
            code="TR-135",
            remedy="pass the function of the whole step, and the rest by name: "
            "treadle.compile(step, model=model, optimizer=optimizer)",
        )
    later = _runs_later(function)
    if later:
        name = getattr(function, "__name__", type(function).__name__)
        raise CaptureError(
            f"{name} is a {later}: calling it does not run its code",
            code="TR-135",
            remedy="pass a plain function, which runs the step when it is called",
        )


def decorated(args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """The function that the decorator of ``compile`` is called with. TR-135 for another call, as
    if it were the step."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    given = [*map(_kind, args), *(f"{name}={_kind(value)}" for name, value in kwargs.items())]
    raise CaptureError(
        "treadle.compile was called without a function, so it returned a decorator, which now "
        f"received {', '.join(given) or 'nothing'}",
        code="TR-135",
        remedy="treadle.compile(function, model=model, ...), or @treadle.compile(model=model, ...) "
        "above the function",
    )


def refuse_within_trace(function: Callable[..., object]) -> None:
    """TR-135 for a compiled step that another one calls."""
    if not is_traced_here():
        return
    name = getattr(function, "__name__", type(function).__name__)
    raise CaptureError(
        f"a compiled step calls another one, {name}; treadle captures a step whole",
        code="TR-135",
        where=here(),
        remedy="leave the inner step a plain function, and compile only the outer one",
    )


def _runs_later(function: Callable[..., object]) -> str:
    """The kind of a function whose call only makes a generator or a coroutine; empty for others."""
    unwrapped = inspect.unwrap(function)
    if inspect.iscoroutinefunction(unwrapped):
        return "coroutine function"
    generates = inspect.isgeneratorfunction(unwrapped) or inspect.isasyncgenfunction(unwrapped)
    return "generator function" if generates else ""


def refuse_unfinished(results: Sequence[object]) -> None:
    """TR-136 for a result that runs only when the caller takes values from it: a generator or a
    coroutine."""
    for result in results:
        if isinstance(result, Iterator | Awaitable | AsyncIterator):
            raise LateError(
                f"the step returns {with_article(type(result).__name__)}, which would do its work "
                "later, and only once",
                code="TR-136",
                remedy="return a list, or its items",
            )


def named_models(models: object) -> dict[str, nn.Module]:
    """One module, a list or a dict, as a dict; a single one is named ``""``. None is no model: what
    optimizers step is trained all the same."""
    return {} if models is None else _named(models, nn.Module, "model")


def named_optimizers(optimizers: object) -> dict[str, Optimizer]:
    """One optimizer, a list or a dict, as a dict; a single one is named ``""``. A wrapper that is
    not an optimizer (Accelerate's) stands for the optimizer whose ``step`` it calls. Optimizers
    inside an optimizer (``self.base_optimizer``) follow it. None occurs twice."""
    named: dict[int, tuple[str, Optimizer]] = {}
    left = [*_named(_opened(optimizers), Optimizer, "optimizer").items()]
    for name, candidate in left:  # which grows
        optimizer = _unwrapped(candidate)
        if id(optimizer) not in named:
            named[id(optimizer)] = name, optimizer
            left += [(f"{name}.{at}".lstrip("."), held) for at, held in _held_by(optimizer)]
    return dict(named.values())


def _opened(value: object) -> object:
    """In the place of an object that is not an optimizer, but has some as attributes, those."""
    if isinstance(value, Optimizer | Mapping | Sequence):
        return value
    try:
        return dict(_held_by(value)) or value
    except TypeError:  # it has no attributes
        return value


def _held_by(owner: object) -> list[tuple[str, Optimizer]]:
    """Optimizers among the attributes of an object, and in lists and dicts among them."""
    optimizers: list[tuple[str, Optimizer]] = []
    for name, value in vars(owner).items():
        if type(value) is dict:
            held = [(f"{name}.{key}", item) for key, item in value.items()]
        elif type(value) in (list, tuple):
            held = [(f"{name}.{at}", item) for at, item in enumerate(value)]
        else:
            held = [(name, value)]
        optimizers += [(at, item) for at, item in held if isinstance(item, Optimizer)]
    return optimizers


def with_loose(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> dict[str, nn.Module]:
    """The ``models``, and one more for what ``optimizers`` step that belongs to none of them: an
    image, a temperature."""
    owned = {id(parameter) for model in models.values() for parameter in model.parameters()}
    stepped = [
        owned_optimizer
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for owned_optimizer in group["params"]
    ]
    loose = list(
        {id(optimizer): optimizer for optimizer in stepped if id(optimizer) not in owned}.values()
    )
    if not models and not loose:
        raise CaptureError(
            "there is no model= (or it is empty), and no optimizer has a tensor to train",
            code="TR-108",
            remedy="pass the model that the step uses: model=model",
        )
    return {**models, LOOSE: LooseTensors(loose)} if loose else dict(models)


class LooseTensors(nn.Module):
    """Tensors as the parameters of a module. They stay the user's own."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        held: dict[str, Any] = {str(at): tensor for at, tensor in enumerate(tensors)}
        self._parameters.update(held)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    own = vars(optimizer)
    if is_initialized(optimizer) or own.keys() >= {"param_groups", "state"}:
        return optimizer  # the latter as well steps parameters, and keeps something of each
    held = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if len(held) == 1:
        return _unwrapped(held[0])
    raise CaptureError(
        f"{type(optimizer).__name__} is an Optimizer whose __init__ did not run, and it wraps no "
        "optimizer",
        code="TR-108",
        remedy="pass the optimizer that it wraps",
    )


def _named(value: object, kind: type[T], word: str) -> dict[str, T]:
    if isinstance(value, kind):
        return {"": value}
    named: dict[str, T] = {}
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
    elif isinstance(value, Sequence):
        named = {str(at): item for at, item in enumerate(value)}
    none = isinstance(value, Mapping | Sequence) and not isinstance(value, str) and not value
    if not (named or none) or not all(isinstance(item, kind) for item in named.values()):
        raise CaptureError(
            f"{word}= takes a torch {kind.__name__}, or a list or dict of them, not {_kind(value)}",
            code="TR-108",
            remedy=f"pass the {word} that the step uses",
        )
    return named


def _kind(value: object) -> str:
    """``"a list of Parameter"``, ``"an int"``."""
    name = with_article(type(value).__name__)
    items: Iterable[object] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
    return f"{name} of {kinds}" if kinds else name


def check_models(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Wrapped or spread models, foreign optimizers: ``CaptureError``."""
    for model in models.values():
        _check_wrapping(model)
    for plan in plans_of(models.values()):
        _check_parts(plan)
    _check_devices(models)
    owned = {id(p) for model in models.values() for p in model.parameters()}
    for optimizer in optimizers.values():
        _check_owner(optimizer, owned)


def _check_wrapping(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS or (kind.startswith("FSDP") and not is_fully_sharded(module)):
            raise CaptureError(
                f"{name or 'the model'} is wrapped in {kind}, whose communication treadle cannot "
                "capture",
                code="TR-101",
                remedy="pass the wrapped module",
            )


def _check_parts(plan: ShardedStatePlan) -> None:
    gathered = [group.name for group in plan.groups if group.is_gathered]
    if gathered:
        raise CaptureError(
            f"fully_shard has gathered the parameters of {gathered[0]}, but a step trains their "
            "shards",
            code="TR-511",
            remedy="call module.reshard() before the call",
        )


def _check_devices(models: Mapping[str, nn.Module]) -> None:
    devices = {p.device for model in models.values() for p in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CaptureError(
            f"the model's parameters are on several devices: {names}",
            code="TR-104",
            remedy="move the whole model to one device",
        )


def _check_owner(optimizer: Optimizer, owned: set[int]) -> None:
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if foreign:
        shapes = ", ".join(str(list(p.shape)) for p in foreign[:3])
        raise CaptureError(
            f"the optimizer steps {len(foreign)} parameters ({shapes}) that the model no longer "
            "has, or that were added after treadle.compile",
            code="TR-103",
            remedy=(
                "build the optimizer from the current parameters of the model "
                "(load_state_dict(assign=True) replaces them); call add_param_group() before "
                "treadle.compile"
            ),
        )


def device_of(models: Mapping[str, nn.Module], arguments: Iterable[object] = ()) -> torch.device:
    """The one device of the parameters; without any that of the first buffer, then of the first of
    ``arguments`` that is a tensor away from the CPU, else the CPU."""
    for held in (nn.Module.parameters, nn.Module.buffers):
        for tensor in itertools.chain.from_iterable(map(held, models.values())):
            return tensor.device
    tensors = (
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and not argument.is_cpu
    )
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
