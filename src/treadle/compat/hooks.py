"""Hooks of tensors, modules and optimizers, where PyTorch keeps them."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from treadle.util.frames.frame_variables import variables

HookDict = dict[int, Callable[..., Any]]
"""What PyTorch keeps hooks in, by the numbers of their handles."""

OURS = -1
"""The key of a hook of our own among those of an optimizer, and of every one while a step is
traced."""


def global_step_hooks() -> HookDict:
    """What is called before any optimizer's ``step``, but for those whose ``step`` is replaced."""
    return _global_optimizer_pre_hooks


def _own_step_hooks(optimizer: Optimizer) -> tuple[HookDict, ...]:
    """None of one whose ``__init__`` did not run."""
    if not is_initialized(optimizer):
        return ()
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def step_hooks(optimizer: Optimizer) -> bool:
    """Whether anything is to be called around ``optimizer.step``."""
    everywhere = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    return any(key != OURS for each in (*everywhere, *_own_step_hooks(optimizer)) for key in each)


def is_initialized(optimizer: Optimizer) -> bool:
    """Whether ``Optimizer.__init__`` ran: of a wrapper that only passes calls on it did not."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def step_hook_dicts(optimizers: Iterable[Optimizer]) -> tuple[HookDict, ...]:
    """Where the hooks of ``step_hooks`` are kept."""
    own = (hooks for each in optimizers for hooks in _own_step_hooks(each))
    return (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, *own)


def set_own_step_hook(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """``hook`` is called before ``optimizer.step``, and is none of ``step_hooks``."""
    optimizer._optimizer_step_pre_hooks[OURS] = hook


_STEPPED = {"_opt_called": True}
"""What an optimizer holds once it has stepped under a scheduler."""


def note_stepped(optimizer: Optimizer) -> None:
    """What schedulers look at to warn that they are stepped before the optimizer."""
    vars(optimizer).update(_STEPPED)


@contextmanager
def stepped_note_kept(optimizer: Optimizer) -> Iterator[None]:
    """Afterwards schedulers see what they saw before: ``note_stepped`` inside is forgotten."""
    held = vars(optimizer)
    before = {name: held[name] for name in _STEPPED if name in held}
    try:
        yield
    finally:
        for name in _STEPPED:
            held.pop(name, None)
        held.update(before)


def stands_for_step(optimizer: Optimizer, stepper: Callable[..., object]) -> Callable[..., object]:
    """``stepper`` as what schedulers and others see in the place of ``optimizer.step``: with its
    name and attributes, and noted like a call of it where a scheduler notes those."""
    own, held = optimizer.step, vars(optimizer)  # in the run, ``vars`` would be a reading
    noted = _STEPPED if hasattr(own, "_wrapped_by_lr_sched") else {}

    @functools.wraps(own)
    def step(*args: object, **kwargs: object) -> object:
        held.update(noted)
        return stepper(*args, **kwargs)

    return step


def is_scheduler_in_order(frame: FrameType) -> bool:
    """Whether ``frame`` is ``LRScheduler.step`` after the optimizer's: the number that it compares,
    of its own steps, is for a warning that it will not give."""
    if frame.f_code is not LRScheduler.step.__code__:
        return False
    scheduler: Any = variables(frame)["self"]
    optimizer = scheduler.optimizer
    is_noted = getattr(optimizer, "_opt_called", False)
    return is_noted and hasattr(optimizer.step, "_wrapped_by_lr_sched")


def tensor_hooks(tensor: Tensor) -> tuple[Callable[..., object], ...]:
    """What is called with the tensor's gradient, and what after it was accumulated."""
    own, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (*(own or {}).values(), *(after or {}).values())


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Let the gradient hooks of ``source`` see that of ``target``."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


def hook_dicts_of(tensor: Tensor) -> tuple[HookDict | None, HookDict | None]:
    """Where the hooks of ``tensor_hooks`` are kept; ``None`` where there never were any."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


_OWN_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def has_tensor_hooks(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them has hooks."""
    return any(chain.from_iterable(map(_OWN_HOOKS, tensors)))


def module_hooks(module: nn.Module) -> tuple[Callable[..., object], ...]:
    """What is called before and after the module's forward and backward."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    back = module._backward_pre_hooks, module._backward_hooks
    return tuple(hook for each in (*hooks, *back) if each for hook in each.values())


def hook_dicts(module: nn.Module) -> tuple[HookDict, ...]:
    """Where the hooks of ``module_hooks`` are kept."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def accumulator_hooks(parameter: Tensor) -> bool:
    """Whether Python hooks stand at the node that adds to the parameter's ``.grad``. A hook of our
    own joins them in their dict for a moment, which is the only way to see it."""
    if not (parameter.requires_grad and parameter.is_leaf):
        return False
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    if node is None:
        return False
    for register in (node.register_hook, node.register_prehook):
        handle: RemovableHandle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def after_backward(function: Callable[[], None]) -> None:
    """``function`` is called at the end of the backward pass that runs."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class _Engine:
    """PyTorch's engine, each of whose backward passes runs inside a context."""

    def __init__(self, engine: Any, inside: Callable[[], AbstractContextManager[object]]) -> None:
        self._engine = engine
        self._inside = inside
        self.queue_callback = engine.queue_callback
        self.is_checkpoint_valid = engine.is_checkpoint_valid

    def run_backward(self, *args: object, **kwargs: object) -> object:
        """A backward pass, hooks and all."""
        with self._inside():
            return self._engine.run_backward(*args, **kwargs)


@contextmanager
def backward_inside(inside: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While inside, backward passes run in a context of their own. Modes for functions are off by
    then, since ``backward`` is such a function itself."""
    kind: Any = torch.autograd.Variable
    engine = torch.autograd.Variable._execution_engine
    kind._execution_engine = _Engine(engine, inside)
    try:
        yield
    finally:
        kind._execution_engine = engine


def reducer_methods() -> tuple[tuple[type, str], ...]:
    """What ``DistributedDataParallel`` calls, however its forward is reached, before its hooks send
    anything."""
    if not torch.distributed.is_available():
        return ()
    from torch._C._distributed_c10d import Reducer  # builds without distributed lack it

    return (Reducer, "prepare_for_forward"), (Reducer, "prepare_for_backward")
