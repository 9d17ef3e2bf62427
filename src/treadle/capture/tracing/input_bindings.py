"""The traced values for the tensors that a step is called with."""

import functools
from collections.abc import Iterable
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.optimizers.eight_bits import SCALE
from treadle.capture.optimizers.registry import update_rule
from treadle.capture.python_state.changes import RunPlaces, refused
from treadle.capture.python_state.parts import MISSING
from treadle.capture.sources import (
    Batch,
    BufferSlot,
    ClosedOverTensor,
    Grad,
    Held,
    Parameter,
    RunTimeArray,
    RunTimeNumber,
    Scalar,
    State,
    StateKey,
)
from treadle.capture.tensors.sparse_gradients import SparseGradients, is_sparse
from treadle.capture.tensors.tensor_effects import TensorUses, refused_storage
from treadle.capture.tracing.request import TraceRequest
from treadle.compat.distributed.sharded_tensors import ShardedLayout, layout_of
from treadle.compat.fake import mark_parameter, stand_in_for, users_class
from treadle.compat.hooks import copy_hooks, tensor_hooks
from treadle.compat.tensors import storage_key


@final
class InputBindings:
    """The traced tensors for the user's objects."""

    def __init__(self, request: TraceRequest, sync: GradientSync, sparse: SparseGradients) -> None:
        self.parameters: dict[int, Tensor] = {}  # by the id of the user's
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.states: dict[StateKey, Tensor] = {}
        self.scalars: dict[tuple[int, str], Tensor] = {}  # by the id of a group
        self.hyper_parameters: dict[int, dict[str, float]] = {}  # as the call begins, likewise
        self.batch: list[object] = []  # the leaves of the arguments
        self.memory: frozenset[int | None] = frozenset()  # the keys of that of all inputs
        self._request = request
        self._sync = sync
        self._sparse = sparse
        self._of_fakes: set[str] = set()  # attributes that all fake tensors have
        self._on_tensor: set[str] = set()  # and those of the user's parameters
        self._hooks: dict[int, tuple[object, ...]] = {}  # of parameters, by their ids

    def bind(self, inputs: list[Tensor]) -> None:
        """Trace these values, which are in the order of the sources, from now on; parameters get
        their gradients and hooks."""
        self.memory = frozenset(map(storage_key, inputs))
        batch = list(self._request.leaves)
        for (_, source), value in zip(self._request.sources, inputs, strict=True):
            match source:
                case Parameter(parameter):
                    self._bind_parameter(parameter, value)
                case BufferSlot(owner, key):
                    self.buffers.append((owner, key, _like(owner._buffers[key], value)))
                case State():
                    self.states[source.slot] = value
                case Scalar(param_group, key, _):
                    self.scalars[id(param_group), key] = value
                    scalars = update_rule(param_group.optimizer).scalars(param_group.group)
                    self.hyper_parameters.setdefault(id(param_group), scalars)
                case Grad(parameter, layout):
                    self.of(parameter).grad = _around(value, layout)
                case Batch(at):
                    batch[at] = _like(batch[at], value)
                case ClosedOverTensor() | Held() | RunTimeNumber() | RunTimeArray():
                    raise AssertionError("constants are found after the trace")
        leaves = zip(self._request.leaves, batch, strict=True)
        # a parameter that is passed is traced as that
        self.batch = [self.parameters.get(id(leaf), traced) for leaf, traced in leaves]

    def _bind_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        leaf = _like(parameter, value.detach()).requires_grad_(parameter.requires_grad)
        mark_parameter(leaf)
        self._of_fakes |= vars(leaf).keys()
        self._on_tensor |= vars(parameter).keys()
        theirs = vars(parameter).items()  # of a fake one also where it is
        vars(leaf).update({k: v for k, v in theirs if k not in self._of_fakes})
        if is_sparse(parameter.grad):
            leaf.grad = self._sparse.left_before(leaf)
        self._sync.watch(leaf, has_gradient=parameter.grad is not None)
        copy_hooks(parameter, leaf)
        self._hooks[id(parameter)] = tensor_hooks(leaf)
        self.parameters[id(parameter)] = leaf

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The traced tensor for a parameter."""
        return self.parameters[id(parameter)]

    def state_of(
        self, optimizer: Optimizer, parameter: nn.Parameter, names: Iterable[str]
    ) -> dict[str, Tensor]:
        """What is traced in the place of an optimizer's state of a parameter; of state in 8 bits
        codes, and scales by a name of their own."""
        of = id(optimizer), id(parameter)
        parts = [part for name in names for part in (name, name + SCALE)]
        return {part: self.states[*of, part] for part in parts if (*of, part) in self.states}

    def by_id(self) -> dict[int, Tensor]:
        """The traced tensors for parameters and buffers, by their ids."""
        buffers = {id(owner._buffers[key]): traced for owner, key, traced in self.buffers}
        return self.parameters | buffers

    def refuse_changed_parameters(self, uses: TensorUses) -> None:
        """TR-117 for attributes, hooks and shapes that the step leaves on parameters."""
        for parameter in self._request.parameters:
            leaf = self.of(parameter)
            where, look = uses.line_of(leaf), functools.partial(_own, parameter)
            now, before = vars(leaf), vars(parameter)
            known = self._on_tensor - self._of_fakes
            if any(now.get(k, MISSING) is not before.get(k, MISSING) for k in known):
                raise refused("an attribute of a parameter", "tensor").seen_by(look)
            new = now.keys() - before.keys() - self._of_fakes
            if new:
                raise refused(f"the attribute {min(new)} of a parameter", "tensor").seen_by(look)
            if tensor_hooks(leaf) != self._hooks[id(parameter)]:
                raise refused("the hooks of a parameter", "tensor").seen_by(look)
            if leaf.shape != parameter.shape:
                raise refused_storage(leaf, where)


def _own(parameter: nn.Parameter, run: RunPlaces) -> list[object]:
    """The attributes of the tensor that is traced for a parameter."""
    leaf = run.tensor_for(parameter)
    if leaf is None:
        return []
    return [*vars(leaf), *vars(leaf).values(), *tensor_hooks(leaf)]


def _like(original: object, value: Tensor) -> Tensor:
    """``value`` as a tensor of the class and the layout of the user's."""
    return stand_in_for(_around(value, layout_of(original)), users_class(original))


def _around(local: Tensor, layout: ShardedLayout | None) -> Tensor:
    """The DTensor with this part here, or ``local`` itself where there is no layout."""
    return local if layout is None else layout.around(local)
