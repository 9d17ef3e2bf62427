"""Where a call finds each input of a step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from treadle.capture.distributed.row_shards import RowShards
from treadle.capture.optimizers.eight_bits import SCALE, EightBitState, StateBlocks
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.optimizers.param_groups import ParamGroup
from treadle.capture.optimizers.registry import Start
from treadle.capture.python_state.plain_values import is_real, is_whole
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.symbolic.arrays.arrays import ArrayLeaf
from treadle.capture.symbolic.numbers import is_exact
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.sharded_tensors import (
    ShardedLayout,
    is_sharded,
    layout_of,
    local_of,
)
from treadle.guards.watching import Unchanged, watch_dicts
from treadle.targets.registry import target_for
from treadle.util.expected import NotExpected

StateKey = tuple[int, int, str]
"""An entry of optimizer state, by the ids of the optimizer and of the parameter, and its name."""
Pending = dict[StateKey, Tensor]


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
    """Optimizer state. If there is none, its initial value, which is kept aside until the step has
    succeeded. ``blocks``: of state in 8 bits, which is two inputs: codes, and scales if
    ``is_scales``."""

    optimizer: Optimizer
    parameter: nn.Parameter
    key: str
    start: Start
    shards: RowShards | None = None  # where ranks divide it
    blocks: StateBlocks | None = None
    is_scales: bool = False

    def read(self, leaves: list[object], pending: Pending) -> Tensor:
        """The optimizer's state of the parameter, or its initial value, kept in ``pending``. If
        ranks divide it, this rank's rows; if it is kept in blocks, its codes or scales."""
        value = self.now()
        if value is not None and self._is_kept(value):
            return self._part(value)
        if self.place not in pending:
            pending[self.place] = self._fresh() if value is None else self._kept(value)
        return self._part(pending[self.place])

    def _is_kept(self, value: Tensor) -> bool:
        """Whether it has the form in which the step keeps it."""
        if self.shards is not None:
            return is_sharded(value)
        return isinstance(value, EightBitState) == (self.blocks is not None)

    def _part(self, value: Tensor) -> Tensor:
        """The part of the state that is this input."""
        if isinstance(value, EightBitState):
            return value.scales if self.is_scales else value.codes
        return local_of(value)

    @property
    def place(self) -> StateKey:
        """Several optimizers may have state of one parameter."""
        return id(self.optimizer), id(self.parameter), self.key

    @property
    def slot(self) -> StateKey:
        """The place of this input: scales are one of their own."""
        return (*self.place[:2], self.key + SCALE * self.is_scales)

    def now(self) -> Tensor | None:
        """The optimizer's state of the parameter."""
        return self.optimizer.state.get(self.parameter, {}).get(self.key)

    def typed(self) -> Tensor:
        """A tensor of the type that ``read`` gives."""
        value = self.now()
        if value is None or self.blocks is not None:
            return self._like()
        return value

    def _like(self) -> Tensor:
        """A tensor without memory of the type that it starts with."""
        if self.blocks is not None:
            return self.blocks.like(scales=self.is_scales)
        parameter = self.parameter.detach().to("meta")
        if self.start.shape is not None:
            return parameter.new_empty(self.start.shape)
        return torch.empty_like(parameter, memory_format=torch.preserve_format)

    def _kept(self, value: Tensor) -> Tensor:
        """``value``, which a checkpoint or a step with other options left in another form, in the
        form in which the step keeps it."""
        whole = value.decoded() if isinstance(value, EightBitState) else value
        if self.shards is not None:  # ranks did not divide it
            return self.shards.placed(self.shards.own(whole).clone(), whole)
        return whole if self.blocks is None else self.blocks.encoded(whole)

    def _fresh(self) -> Tensor:
        if self.blocks is not None:
            return self.blocks.zeros(self.parameter)
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
    """The question that gives the number: consecutive numbers of a group share one."""
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
        """The watch which tells that the objects that hold known inputs are unchanged."""
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
    """Whether it is looked up at every call: a new local part of a DTensor cannot be watched."""
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
