"""Hooks on every way to read or write parameters and optimizer state between two calls.

::

    model(x), any of its modules          a forward hook of all modules
    state_dict, load_state_dict           hooks of the modules that own something, and of optimizers
    optimizer.step()                      a hook of the optimizer
    copy.deepcopy, pickle, torch.save     the reduction of the classes of modules and optimizers
    a parameter, a tensor of the state    the class of what is to be written (``awaited``)
"""

import copyreg
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from treadle.compat.hooks import set_own_step_hook
from treadle.compat.tracing import outside_modes
from treadle.session.awaited import AwaitedTensors

_PROTOCOL = 4


@final
class ReadHooks:
    """``reads`` is called before somebody reads, from ``attach`` on until ``detach``. It may be
    called more than once, and inside a walk over hooks, where nothing is detached."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        reads: Callable[[], None],
    ) -> None:
        self._models = tuple(models.values())
        self._optimizers = tuple(optimizers.values())
        self._reads = reads
        self._modules: dict[int, nn.Module] = {}
        self._owners: list[nn.Module] = []
        self._classes: list[type] = []
        self._undo: list[Callable[[], object]] = []
        self.tensors = AwaitedTensors(_weak(self._told))
        weakref.finalize(self, _run_all, self._undo).atexit = False
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def watch(self, written: Iterable[Tensor]) -> None:
        """Look for the owners of what is written; the models may have changed since."""
        ids = {id(tensor) for tensor in written}
        modules = {id(module): module for model in self._models for module in model.modules()}
        self._modules = modules
        self._owners = [
            module
            for module in modules.values()
            if any(id(tensor) in ids for tensor in _held(module))
        ]
        self._classes = list({type(owner) for owner in (*modules.values(), *self._optimizers)})
        for optimizer in self._optimizers:
            if optimizer not in self._watched:
                self._watched.add(optimizer)
                _watch_optimizer(optimizer, _weak(self._told))

    def attach(self, written: Sequence[Tensor]) -> None:
        """From now on, also what is done with ``written`` itself. The modules that own it keep
        this object alive, also when nobody else does any more."""
        if self._undo:
            return
        undo = self._undo
        copied = _weak(self._copied)
        undo.append(register_module_forward_pre_hook(_weak(self._called)).remove)
        for owner in self._owners:
            undo.append(owner.register_state_dict_pre_hook(self._told).remove)
            undo.append(owner.register_load_state_dict_pre_hook(self._told).remove)
        for kind in self._classes:
            undo.append(_reduced(kind, copied))
        self.tensors.attach(written)
        undo.append(self.tensors.detach)

    def detach(self) -> None:
        """No longer."""
        _run_all(self._undo)

    def _called(self, module: nn.Module, _: object) -> None:
        if id(module) in self._modules:
            self._told()

    def _told(self, *_: object, **__: object) -> None:
        with outside_modes():
            self._reads()

    def _copied(self, thing: object) -> None:
        """Hooks of ours must not be copied."""
        if id(thing) in self._modules or any(thing is optimizer for optimizer in self._optimizers):
            self._told()
            self.detach()


def _run_all(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


def _held(module: nn.Module) -> list[Tensor]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return list(own)


def _watch_optimizer(optimizer: Optimizer, told: Callable[..., None]) -> None:
    """These hooks stay: they are no part of what is copied of an optimizer."""
    optimizer.register_state_dict_pre_hook(told)
    optimizer.register_load_state_dict_pre_hook(told)
    set_own_step_hook(optimizer, told)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """A method that is called while its object is there."""
    known = weakref.WeakMethod(method)

    def call(*args: object, **kwargs: object) -> None:
        target = known()
        if target is not None:
            target(*args, **kwargs)

    return call


def _reduced(kind: type, copied: Callable[[object], None]) -> Callable[[], object]:
    """Objects of ``kind`` are told of before they are copied or pickled; what undoes that."""
    table: dict[type, Callable[[Any], Any]] = copyreg.dispatch_table
    before = table.get(kind)

    def reduce(thing: object) -> object:
        copied(thing)
        return thing.__reduce_ex__(_PROTOCOL) if before is None else before(thing)

    def undo() -> None:
        if table.get(kind) is not reduce:
            return  # somebody else's stands there by now, and calls this one
        if before is None:
            del table[kind]
        else:
            table[kind] = before

    table[kind] = reduce
    return undo
