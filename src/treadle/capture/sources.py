"""Where a call finds each input of a step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.row_shards import RowShards
from treadle.capture.optimizers.counters import SharedCounters
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.optimizers.registry import OptimizerUpdate, Start, update_rule
from treadle.capture.python_state.plain_values import is_real, is_whole
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.stored.names import NOT_STORED
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf
from treadle.capture.symbolic.numbers import is_exact
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.sharded_tensors import (
    ShardedLayout,
    is_sharded,
    layout_of,
    local_of,
)
from treadle.compat.hooks import note_stepped
from treadle.guards.watching import Unchanged, Watches, watch_dicts
from treadle.targets.registry import target_for
from treadle.util.expected import NotExpected

Pending = dict[tuple[int, str], Tensor]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Parameters of one group of one optimizer whose step counters agree."""

    optimizer: Optimizer
    at: int  # index of the group
    parameters: tuple[nn.Parameter, ...]
    label: str
    active: list[nn.Parameter]  # those that have gradients, once the step has been traced
    taken: dict[nn.Parameter, int] = field(default_factory=dict[nn.Parameter, int])
    """How many steps a parameter takes in one call."""
    known: list[SharedCounters] = field(default_factory=list[SharedCounters], metadata=NOT_STORED)
    """Where the counters were found last; nothing if that is not worth knowing."""

    @property
    def group(self) -> dict[str, object]:
        """The optimizer's group as it is now."""
        return self.optimizer.param_groups[self.at]

    def scalar_names(self, group: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """The names of its scalars: hyper-parameters, then step counters; ``first`` where the form
        has no counters. ``group``: in the place of the optimizer's."""
        form = update_rule(self.optimizer)
        scalars = form.scalars(self.group if group is None else group)
        return (*scalars, *(form.counters or ("first",)))

    def state_names(self, parameter: nn.Parameter) -> frozenset[str]:
        """Under which names the form keeps state of a parameter."""
        form = update_rule(self.optimizer)
        return frozenset((*form.counters, *form.states(parameter, self.group)))

    def values(self, nth: int = 0, *, found: bool = False) -> dict[str, float]:
        """The scalars now, for the ``nth`` step of a call. ``step`` counts the step to come;
        ``first``: is there no state yet? ``found``: the counters are where they were known to
        be."""
        form = update_rule(self.optimizer)
        group = self.group
        scalars = form.scalars(group)
        if form.counters:
            return scalars | self._counters(form, group, nth, found=found)
        state = self.optimizer.state.get(self.active[0], {})
        return scalars | {"first": float(nth == 0 and state.get("momentum_buffer") is None)}

    def _counters(
        self, form: OptimizerUpdate, group: dict[str, object], nth: int, *, found: bool
    ) -> dict[str, float]:
        """The counters for the ``nth`` step of a call."""
        if found and self.known:
            now = self.known[0].now()
        else:
            state = self.optimizer.state.get(self.active[0], {})
            now = {name: float(state.get(name, start)) for name, start in form.counters.items()}
        now = _stepped(now)
        for _ in range(nth):
            now = _stepped(form.advanced(now, group))
        return now

    def agrees(self) -> bool:
        """Whether the counters of the parameters that step are still one number, as the graph has
        it. Freezing one for some steps, or a checkpoint of another run, parts them."""
        if self.known and self.known[0].hold():
            return self.known[0].agree()
        agrees = self._agree()
        names = tuple(update_rule(self.optimizer).counters)
        counters = SharedCounters.of(self.optimizer, self.active, names) if agrees else None
        self.known[:] = [] if counters is None else [counters]
        return agrees

    def join(self, watches: Watches) -> bool:
        """That counters which agree do so still; whether it is known where they are."""
        for key in self.known:
            key.join(watches)
        return bool(self.known)

    def _agree(self) -> bool:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.active]
        names = tuple(update_rule(self.optimizer).counters)
        for name in names or ("momentum_buffer",):
            entries = [state.get(name) for state in states]
            if len({entry is None for entry in entries}) > 1:
                return False
            values = (
                [torch.as_tensor(entry) for entry in entries if entry is not None] if names else []
            )
            if values and not bool((torch.stack(values) == values[0]).all()):
                return False
        return True

    def advance(self, *, found: bool = False) -> None:
        """The counters of every parameter after a step. ``found``: where they were known to be, at
        the beginning of this call."""
        form = update_rule(self.optimizer)
        note_stepped(self.optimizer)
        if not form.counters:
            return
        group = self.group
        after: dict[int, dict[str, float]] = {}
        for count in set(self.taken.values()):
            counters = self._counters(form, group, count - 1, found=found)
            after[count] = form.advanced(counters, group)
        if len(after) == 1 and self.known and (found or self.known[0].hold()):
            self.known[0].write(*after.values())
            return
        for parameter in self.active:
            state = self.optimizer.state.get(parameter, {})
            for name, value in after[self.taken[parameter]].items():
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(value)
                elif name in state:
                    state[name] = int(value)


def _stepped(counters: dict[str, float]) -> dict[str, float]:
    if "step" in counters:
        counters["step"] += 1.0
    return counters


ParamGroups = list[ParamGroup]


def param_groups_of(optimizers: Mapping[str, Optimizer]) -> ParamGroups:
    """Every group, split where its parameters' counters differ."""
    groups: ParamGroups = []
    for name, optimizer in optimizers.items():
        for at, group in enumerate(optimizer.param_groups):
            by_count: dict[tuple[float, bool], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                count = float(state.get("step", 0.0))
                first = state.get("momentum_buffer") is None
                by_count.setdefault((count, first), []).append(parameter)
            label = f"{name}.{type(optimizer).__name__.lower()}".lstrip(".")
            groups += [
                ParamGroup(optimizer, at, tuple(members), label, members)
                for members in by_count.values()
            ]
    return groups


@final
@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model: the user's own tensor."""

    parameter: nn.Parameter

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The parameter itself; of a DTensor what this rank holds."""
        return local_of(self.parameter)


@final
@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Whatever tensor a module has under the name of a buffer at a call."""

    owner: nn.Module
    key: str

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The tensor that is there now."""
        buffer = self.owner._buffers[self.key]
        assert buffer is not None
        return local_of(buffer)


@final
@dataclass(frozen=True, slots=True)
class State:
    """Optimizer state; where there is none, as it starts, kept aside until the step succeeded."""

    optimizer: Optimizer
    parameter: nn.Parameter
    key: str
    start: Start
    shards: RowShards | None = None  # where ranks divide it

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """What the optimizer has for the parameter; else its start, kept in ``pending``. Of what
        ranks divide, this rank's rows."""
        value = self.now()
        if value is not None and (self.shards is None or is_sharded(value)):
            return local_of(value)
        place = (id(self.parameter), self.key)
        if place not in pending:
            pending[place] = self._fresh() if value is None else self._divided(value)
        return local_of(pending[place])

    def now(self) -> Tensor | None:
        """What the optimizer has for the parameter."""
        return self.optimizer.state.get(self.parameter, {}).get(self.key)

    def like(self) -> Tensor:
        """A tensor without memory of the type that it starts with."""
        parameter = self.parameter.detach().to("meta")
        if self.start.shape is not None:
            return parameter.new_empty(self.start.shape)
        return torch.empty_like(parameter, memory_format=torch.preserve_format)

    def _divided(self, value: Tensor) -> Tensor:
        """Of a checkpoint of ranks that did not divide it."""
        assert self.shards is not None
        return self.shards.placed(self.shards.own(value).clone(), value)

    def _fresh(self) -> Tensor:
        if self.shards is not None:
            own = self.shards.own(self.parameter.detach())
            return self.shards.placed(torch.full_like(own, self.start.value), self.parameter)
        if self.start.shape is not None:
            return self.parameter.detach().new_full(self.start.shape, self.start.value)
        return torch.full_like(
            self.parameter, self.start.value, memory_format=torch.preserve_format
        ).detach()


@final
@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of an optimizer's group, or of its step counters: a 0-dim float64."""

    param_group: ParamGroup
    key: str
    device: torch.device
    nth: int = 0  # of the steps in one call

    def value(self) -> float:
        """The scalar now."""
        return self.param_group.values(self.nth)[self.key]

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The number now, as a tensor without dims."""
        return torch.tensor(self.value(), dtype=torch.float64, device=self.device)


@final
@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient that a parameter has before the step. ``layout``: of one that is a DTensor."""

    parameter: nn.Parameter
    layout: ShardedLayout | None = None

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The gradient that is there now. ``NotExpected`` if it is placed otherwise than that which
        the graph was made for: summands look like sums."""
        assert self.parameter.grad is not None
        if layout_of(self.parameter.grad) != self.layout or is_sparse(self.parameter.grad):
            raise NotExpected("a gradient has other placements than during capture")
        return local_of(self.parameter.grad)


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The leaf number ``at`` of the arguments."""

    at: int

    def read(self, leaves: list[Any], pending: Pending) -> Tensor:
        """The tensor at that place among the leaves of the call."""
        leaf = leaves[self.at]
        return leaf if type(leaf) is Tensor else local_of(leaf)


@final
@dataclass(frozen=True, slots=True)
class ClosedOverTensor:
    """A tensor from outside the model that the step closes over."""

    tensor: Tensor

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """That tensor, at every call."""
        return local_of(self.tensor)


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that an object, a container or a variable outside the step holds. A call takes
    the tensor that is there."""

    place: Location | StateLocation

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The tensor that is there now."""
        return local_of(self.place.get())


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunTimeNumber:
    """A Python number that scales tensors: what ``compute`` gives at a call. ``is_whole``: it was a
    whole number."""

    compute: Callable[[], object]
    is_whole: bool
    device: torch.device

    def value(self) -> float:
        """The number now. ``NotExpected`` for one of another kind than the graph was made for (a
        whole number to a negative power is a float), or that no float64 is equal to."""
        computed = self.compute()
        if not is_real(computed) or (self.is_whole and not is_whole(computed)):
            raise NotExpected("a value computed from a number changed its type")
        if not is_exact(computed):
            raise NotExpected("an integer became larger than 2**53")
        return float(computed)

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """A tensor without dims."""
        return torch.tensor(self.value(), dtype=torch.float64, device=self.device)


@final
@dataclass(frozen=True, slots=True, eq=False)
class RunTimeArray:
    """An array of NumPy's among the arguments, or what is computed of it: that of the call."""

    array: ArrayLeaf

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """A tensor of the memory of the array of this call. ``NotExpected`` for one of another
        kind than the graph was made for."""
        computed, before = self.array.compute(), self.array.value
        if computed.dtype != before.dtype or computed.shape != before.shape:
            raise NotExpected(
                "a value computed from numbers became an array of another dtype or shape"
            )
        return torch.from_numpy(computed)


class Scalars:
    """All scalars of a step in one block. On the host each call writes to it, on a device one copy
    does that waits for nothing; there they are 16 bytes apart: what is compiled ahead of a launch
    is the code for aligned addresses."""

    def __init__(self, sources: Sequence["Source"]) -> None:
        scalars = [source for source in sources if isinstance(source, Scalar | RunTimeNumber)]
        device = scalars[0].device if scalars else torch.device("cpu")
        self._asked = [
            (key, [scalar.key for scalar in group if isinstance(scalar, Scalar)])
            for key, group in groupby(scalars, _asked_of)
        ]
        on_host = target_for(device).on_host
        shape = (len(scalars), 1 if on_host else 2)
        self._block = torch.zeros(shape, dtype=torch.float64, device=device)
        self._views = self._block[:, 0].unbind()
        self._numbers = self._block[:, 0].numpy() if on_host else None

    def read(self, *, found: bool = False) -> Sequence[Tensor]:
        """The scalars of this call, in the order of the sources: 0-dim float64 tensors. ``found``:
        counters of steps are where they were known to be."""
        values: list[float] = []
        for asked, keys in self._asked:
            if isinstance(asked, RunTimeNumber):
                values.append(asked.value())
            else:
                group, nth = asked
                values += map(group.values(nth, found=found).__getitem__, keys)
        if self._numbers is not None:
            self._numbers[:] = values
        else:
            staged = torch.empty(self._block.shape, dtype=torch.float64, pin_memory=True)
            staged.numpy()[:, 0] = values
            self._block.copy_(staged, non_blocking=True)
        return self._views


def _asked_of(source: "Scalar | RunTimeNumber") -> "RunTimeNumber | tuple[ParamGroup, int]":
    """What says the number: one question for those of a group that stand together."""
    return source if isinstance(source, RunTimeNumber) else (source.param_group, source.nth)


Source = (
    Parameter
    | BufferSlot
    | State
    | Scalar
    | RunTimeNumber
    | RunTimeArray
    | Grad
    | Batch
    | ClosedOverTensor
    | Held
)


@final
class Inputs:
    """The inputs of calls. Those that parameters, modules and optimizers hold are looked up again
    only when somebody has written to what holds them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        scalars = Scalar | RunTimeNumber
        self._given = [at for at, source in enumerate(sources) if _changes(source)]
        self._scalars = [at for at, source in enumerate(sources) if isinstance(source, scalars)]
        others = {*self._given, *self._scalars}
        self._steady = [at for at in range(len(self._sources)) if at not in others]
        self._known: list[Any] = [None] * len(self._sources)
        self._holders: Unchanged | None = None

    @property
    def holders(self) -> Unchanged | None:
        """What says that what holds inputs which are known is as it was."""
        return self._holders

    def read(
        self,
        leaves: list[object],
        pending: Pending,
        scalars: Sequence[Tensor],
        vouched: Collection[object] = (),
    ) -> list[Tensor]:
        """In the order of the sources. ``scalars``: those of this call; ``vouched``: watches that
        were asked for it already."""
        holders = self._holders
        if pending or holders is None or not (holders in vouched or holders.is_same()):
            self._look(leaves, pending)
        tensors = list(self._known)
        for at in self._given:
            tensors[at] = self._sources[at].read(leaves, pending)
        for at, value in zip(self._scalars, scalars, strict=True):
            tensors[at] = value
        return tensors

    def _look(self, leaves: list[object], pending: Pending) -> None:
        self._holders = None  # of inputs that are known no longer, should there be an error
        for at in self._steady:
            self._known[at] = self._sources[at].read(leaves, pending)
        holders: dict[int, Any] = {}
        for at in () if pending else self._steady:
            holders |= {id(holder): holder for holder in _holders(self._sources[at])}
        dicts = list(holders.values())
        known = not pending and all(isinstance(mapping, dict) for mapping in dicts)
        self._holders = watch_dicts(dicts) if known else None


def _changes(source: Source) -> bool:
    """Whether it is looked up at every call: nothing tells of a DTensor that gets another part."""
    match source:
        case Parameter(parameter) | State(_, parameter):
            return is_sharded(parameter)
        case BufferSlot(owner, key):
            return is_sharded(owner._buffers[key])
        case Grad() | Batch() | Held() | RunTimeArray():
            return True
        case _:
            return False


def _holders(source: Source) -> tuple[object, ...]:
    """The dicts through which an input is found."""
    match source:
        case BufferSlot(owner):
            return vars(owner), owner._buffers
        case State(optimizer, parameter):
            state = optimizer.state
            return vars(optimizer), state, state.get(parameter)
        case _:
            return ()
