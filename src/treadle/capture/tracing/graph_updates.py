"""Optimizer updates in the graph: functional, on traced parameters and state.

::

    optimizer.step()     for each group, for each parameter that has a gradient:
                         rule.update(parameter, gradient, state, scalars)      all traced
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.row_shards import RowShards
from treadle.capture.integrations.grad_scaler import selected
from treadle.capture.optimizers.eight_bits import as_numbers, scales_in, turn_of
from treadle.capture.optimizers.hyper_parameters import HyperParameters
from treadle.capture.optimizers.param_groups import ParamGroup
from treadle.capture.optimizers.registry import Group, OptimizerUpdate, Values, update_rule
from treadle.capture.optimizers.updates import UpdatesOfGroup
from treadle.capture.python_state.code.frames import CodeOwner
from treadle.capture.python_state.external import ExternalState
from treadle.capture.python_state.ownership import owner_of
from treadle.capture.sources import Scalar, Source, State
from treadle.capture.symbolic.numbers import Uses
from treadle.capture.tensors.sparse_gradients import SparseGradients, SparseRows, is_sparse
from treadle.capture.tracing.input_bindings import InputBindings
from treadle.capture.tracing.request import TraceRequest
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.distributed.sharded_tensors import layout_of, local_of, placed_as
from treadle.compat.tracing import outside_modes, traced_nodes, without_functions
from treadle.graph.core.signature import Input, Role


@final
class GraphUpdates:
    """The updates of one run.

    ``hyper``: hyper-parameters that the step sets in the groups. ``constants``: scalars of later
    steps of a call, by the ids of the tensors that stand for them, which become inputs when the
    trace is finished. ``stepped``: groups whose counters advance. ``own_rows``: nodes that take the
    rows of this rank, with the number of ranks.
    """

    def __init__(
        self,
        request: TraceRequest,
        bindings: InputBindings,
        recorder: TraceRecorder,
        uses: Uses,
        sparse: SparseGradients,
    ) -> None:
        self.hyper = HyperParameters(uses, recorder.held.traced_for)
        self.external: ExternalState | None = None  # once the run has begun
        self.constants: dict[int, tuple[Input, Source]] = {}
        self.stepped: set[int] = set()
        self.own_rows: dict[int, int] = {}
        self._request, self._bindings, self._recorder = request, bindings, recorder
        self._uses, self._sparse = uses, sparse
        self._groups = {id(group): dict(group.group) for group in request.param_groups}
        self._shards: dict[int, RowShards] = {
            id(source.parameter): source.shards
            for _, source in request.sources
            if isinstance(source, State) and source.shards is not None
        }
        self._later_scalars: dict[tuple[int, str], Tensor] = {}

    def group_of(self, param_group: ParamGroup) -> Group:
        """The options of a group as they were before the run."""
        return self._groups[id(param_group)]

    def is_divided(self, parameter: nn.Parameter) -> bool:
        """Whether each rank updates some of its rows."""
        return id(parameter) in self._shards

    def run(self, optimizer: Optimizer) -> None:
        """A step of an optimizer that has an update rule."""
        param_groups = [
            group for group in self._request.param_groups if group.optimizer is optimizer
        ]
        means = self._reduce_gradients(param_groups)
        rule = update_rule(optimizer)
        step = self._step
        if self.external is not None and owner_of(type(rule)) is CodeOwner.OURS:
            step = self.external.unseen(without_functions(step))  # it takes traced tensors alone
        for param_group in param_groups:
            with self._recorder.sync.unlooked():
                with_grad = [p for p in param_group.parameters if self._leaf(p).grad is not None]
            if with_grad:
                self._recorder.provenance.note_line()
                with self._unnoted():
                    step(rule, param_group, with_grad, means)

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        """Within, numbers that stand in are used by us, and not by the user's code."""
        self._uses.ours = True
        try:
            yield
        finally:
            self._uses.ours = False

    def _leaf(self, parameter: nn.Parameter) -> Tensor:
        return self._bindings.of(parameter)

    def _reduce_gradients(self, param_groups: Sequence[ParamGroup]) -> dict[int, Tensor]:
        """What of an optimizer's gradients is not a mean over ranks yet becomes one; where ranks
        divide an update, the rows of this rank, by their parameter. All of them are sent ahead of
        the first update, whose parameters ranks may have to send."""
        means: dict[int, Tensor] = {}
        sync = self._recorder.sync
        owners = {
            id(self._leaf(p)): id(p) for param_group in param_groups for p in param_group.parameters
        }
        leaves = (self._bindings.parameters[key] for key in owners.values())
        for leaf in sync.unreduced(leaves):
            shards = self._shards.get(owners[id(leaf)])
            if shards is None:
                sync.looked_at(leaf)
                continue
            with sync.unlooked():
                grad = leaf.grad
            if grad is not None:
                means[owners[id(leaf)]] = shards.mean(grad)
        return means

    def _step(
        self,
        rule: OptimizerUpdate,
        param_group: ParamGroup,
        with_grad: Sequence[nn.Parameter],
        means: Mapping[int, Tensor],
    ) -> None:
        """Step the parameters that have gradients. In each call each of them counts its own
        steps."""
        self.stepped.add(self._request.param_groups.index(param_group))
        if not param_group.taken:
            param_group.active.clear()
        param_group.active.extend(p for p in with_grad if p not in param_group.taken)
        taken = {p: param_group.taken.get(p, 0) for p in with_grad}  # before this step
        before = self.group_of(param_group)
        changed = self.hyper.at_update(param_group.optimizer, param_group.at, before)
        group = changed.values(rule) if changed.set else before
        for nth in sorted({*taken.values()}):
            scalars = {
                name: self.scalar(param_group, name, nth)
                for name in param_group.scalar_names(group)
            }
            if changed.set:
                device = next(iter(scalars.values())).device
                scalars |= changed.scalars(rule, device, self._recorder.inside)
            turn = turn_of(scalars) if self._request.eight_bits else None
            shared = rule.prepare(scalars, group)
            of_group = _GroupUpdate(param_group.optimizer, rule, group, shared, turn)
            some = [p for p in with_grad if taken[p] == nth]
            self._update(
                of_group, some, means, self._recorder.scaling.skips.get(id(param_group.optimizer))
            )
            param_group.taken.update(dict.fromkeys(some, nth + 1))

    def _update(
        self,
        of_group: "_GroupUpdate",
        parameters: Sequence[nn.Parameter],
        means: Mapping[int, Tensor],
        skips: Tensor | None,
    ) -> None:
        """``skips``: whether a scaler skips the update, which is decided in the graph."""
        updates = UpdatesOfGroup() if owner_of(type(of_group.rule)) is CodeOwner.OURS else None
        for parameter in parameters:
            names = of_group.rule.states(parameter, of_group.group)
            state = self._bindings.state_of(of_group.optimizer, parameter, names)
            with self._rows_of(parameter, means) as (leaf, grad):
                update = functools.partial(of_group.update, leaf, grad, state)
                if scales_in(state):
                    update = functools.partial(of_group.update_numbers, leaf, grad, state)
                if skips is not None:
                    update = functools.partial(
                        selected, skips, update, (leaf.detach(), *state.values())
                    )
                if updates is None:
                    update()
                else:
                    parts = (grad.indices, grad.values) if type(grad) is SparseRows else (grad,)
                    updates.run((leaf, *parts, *state.values()), tuple(state), update)

    @contextlib.contextmanager
    def _rows_of(
        self, parameter: nn.Parameter, means: Mapping[int, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor | SparseRows]]:
        """What this rank updates of a parameter, with the mean gradient of it, in ``means`` or
        whole in ``.grad``; afterwards the parameter is whole."""
        leaf, shards = self._leaf(parameter), self._shards.get(id(parameter))
        if shards is None:
            yield self._parts_here(leaf)
            return
        mean = means.get(id(parameter))
        if mean is None:
            with self._recorder.sync.unlooked():
                grad = leaf.grad
            assert grad is not None
            start = traced_nodes()
            mean = shards.own(grad)
            taken = range(start, traced_nodes())
            self.own_rows |= dict.fromkeys(taken, shards.group.ranks)
        own = shards.own(leaf.detach()).clone()
        yield own, mean
        leaf.detach().copy_(shards.whole(own, leaf.shape[0]))

    def _parts_here(self, leaf: Tensor) -> tuple[Tensor, Tensor | SparseRows]:
        """What this rank holds of a parameter and of its gradient. The gradient of a DTensor may be
        placed otherwise, as summands are: then it is brought where the parameter is."""
        assert leaf.grad is not None
        layout = layout_of(leaf)
        if layout is not None:
            return local_of(leaf), local_of(placed_as(leaf.grad, layout))
        return leaf, self._sparse.rows_of(leaf.grad) if is_sparse(leaf.grad) else leaf.grad

    def scalar(self, param_group: ParamGroup, name: str, nth: int) -> Tensor:
        """A scalar of the ``nth`` step of a call. Those of later steps are known when they are
        met: they enter as constants, which become inputs when the trace is finished."""
        first = self._bindings.scalars[id(param_group), name]
        is_same = name in self._bindings.hyper_parameters[id(param_group)]
        if nth == 0 or is_same or self._request.plans:
            return first
        key = (id(param_group), f"{name} {nth}")
        if key not in self._later_scalars:
            source = Scalar(param_group, name, first.device, nth)
            with outside_modes():
                value = source.read([], {})
            self._later_scalars[key] = value
            at = self._request.param_groups.index(param_group)
            label = f"{param_group.label}.{name}.{at} of step {nth + 1}"
            self.constants[id(value)] = Input(Role.SCALAR, label), source
        return self._later_scalars[key]


@final
@dataclass(frozen=True, slots=True)
class _GroupUpdate:
    """An update rule with the options of a group, and what all parameters of the group share;
    ``turn`` of state in 8 bits."""

    optimizer: Optimizer
    rule: OptimizerUpdate
    group: Group
    shared: Values
    turn: Tensor | None

    def update(self, leaf: Tensor, grad: Tensor | SparseRows, state: Values) -> None:
        """Write new values of one parameter and its state."""
        value = leaf.detach()
        if isinstance(grad, SparseRows):
            self.rule.update_rows(value, grad, state, self.shared, self.group)
            return
        if value.is_complex():  # real and imaginary parts are numbers of their own
            value, grad = torch.view_as_real(value), torch.view_as_real(grad)
            state = {key: _real_parts(entry) for key, entry in state.items()}
        self.rule.update(value, grad, state, self.shared, self.group)

    def update_numbers(self, leaf: Tensor, grad: Tensor | SparseRows, state: Values) -> None:
        """The same for state in 8 bits. An update of elements is one of blocks: then their scales
        are found by the kernel that has the new numbers."""
        shape = leaf.shape
        if self.rule.elementwise and isinstance(grad, Tensor):
            shape = state[next(iter(scales_in(state)))].shape
            leaf, grad = leaf.detach().view(shape), grad.reshape(shape)
        with as_numbers(state, shape, leaf.dtype, self.turn) as numbers:
            self.update(leaf, grad, numbers)


def _real_parts(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
