"""Changes of a step to the user's own tensors other than writes to their memory: another memory by
``.data =``, ``requires_grad``, ``.grad`` and other attributes.

::

    x.data = v   ->  from here on x is v: the tensor that is traced becomes an alias of v's node
    at the end   ->  a parameter or buffer: v is written to its memory, which stays
                     an argument, a tensor outside: x.data = v again at every call

Whatever had the old memory (a view, ``x.detach()``) keeps it, as it does in eager.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast, final

import torch
from torch import Tensor

from treadle.capture.explain_errors import here
from treadle.capture.optimizers.optimizer_state import StateLocation
from treadle.capture.python_state.changes import refused
from treadle.capture.python_state.parts import MISSING
from treadle.capture.python_state.reads.object_graph import Location
from treadle.capture.python_state.reads.reads_walk import ReadsWalk
from treadle.capture.stored.names import NOT_STORED
from treadle.capture.tensors.tensor_uses import TensorUses
from treadle.compat.distributed.sharded_tensors import layout_of
from treadle.compat.fake import MEMOS
from treadle.compat.hooks import tensor_hooks
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import TraceInProgress, held_input
from treadle.util.errors import CaptureError

SET_DATA = cast(Any, Tensor.data).__set__


class Aspect(Enum):
    """The aspect of a tensor that a step changed."""

    DATA = auto()
    GRADIENT = auto()
    ADDED_GRADIENT = auto()  # to the one that is there at a call, if any
    FLAG = auto()
    ATTRIBUTE = auto()


@final
class MadeGradient:
    """The ``.grad`` of a tensor that a step makes and returns or leaves, as a place: what is put
    there is the tensor of this call and its gradient."""

    label = "the gradient of a tensor that the step made"

    def get(self) -> None:
        """Before the call there is no tensor of it."""

    def put(self, value: tuple[Tensor, Tensor]) -> None:
        """The tensor has its gradient."""
        _give_gradient(*value)


def _give_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Also to a tensor that has had other sizes since then, by ``.data =``."""
    if gradient is None or (tensor.shape, tensor.dtype) == (gradient.shape, gradient.dtype):
        tensor.grad = gradient
        return
    data = tensor.detach()
    SET_DATA(tensor, torch.empty_like(gradient))
    tensor.grad = gradient
    SET_DATA(tensor, data)


def made_gradient(tensor: Tensor) -> Tensor | None:
    """What a traced tensor has in ``.grad``, a dense one."""
    keeps = tensor.is_leaf or tensor.retains_grad
    grad = tensor.grad if keeps and layout_of(tensor) is None else None
    return None if grad is None or grad.layout is not torch.strided else grad


@final
@dataclass(frozen=True, slots=True)
class TensorLocation:
    """An aspect of a tensor of the user's, as a place that a call finds anew. ``find``: gives the
    tensor, or ``MISSING`` between two calls; ``name``: of an attribute."""

    label: str
    find: Callable[[], object]
    aspect: Aspect
    name: str = ""

    def get(self) -> object:
        """The tensor that is there now."""
        tensor = self.find()
        if not isinstance(tensor, Tensor):
            return MISSING
        match self.aspect:
            case Aspect.DATA:
                return tensor.detach()
            case Aspect.GRADIENT | Aspect.ADDED_GRADIENT:
                return tensor.grad
            case Aspect.FLAG:
                return tensor.requires_grad
            case Aspect.ATTRIBUTE:
                return vars(tensor).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """From now on ``value`` is there."""
        tensor = self.find()
        assert isinstance(tensor, Tensor), self.label
        match self.aspect:
            case Aspect.DATA:
                SET_DATA(tensor, value)
            case Aspect.ADDED_GRADIENT if tensor.grad is not None:
                tensor.grad += value
            case Aspect.GRADIENT | Aspect.ADDED_GRADIENT:
                _give_gradient(tensor, value)
            case Aspect.FLAG:
                tensor.requires_grad_(value)
            case Aspect.ATTRIBUTE if value is MISSING:
                vars(tensor).pop(self.name, None)
            case Aspect.ATTRIBUTE:
                setattr(tensor, self.name, value)


@final
class DataAssignments:
    """``t.data = value`` of the tensors of a trace."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor, and what it was

    def assign(self, target: Tensor, value: Tensor) -> None:
        """Make ``target`` an alias of ``value``; for a DTensor the values are copied."""
        with torch.no_grad():
            if layout_of(target) is not None:
                if (target.shape, target.dtype) != (value.shape, value.dtype):
                    raise refused_storage(target, here())
                target.detach().copy_(value)
                return
            before, alias = target.detach(), value.detach()
        SET_DATA(target, alias)
        self._before.setdefault(id(target), (target, before))
        trace = TraceInProgress()
        trace.track(target, trace.node_of(alias))

    def before(self, target: Tensor) -> Tensor | None:
        """The earlier ``target``, if its memory or its layout in the memory has changed."""
        _, before = self._before.get(id(target), (None, None))
        if before is None or _is_same_memory(target, before):
            return None
        return before

    def refuse_shared(
        self, targets: Iterable[Tensor], memory: Iterable[int | None], uses: TensorUses
    ) -> None:
        """TR-117 where one of ``targets``, which the user has, would share elements with another
        one, or memory with an input, of which ``memory`` are the keys."""
        inputs = set(memory)
        taken: dict[int | None, list[tuple[int, int]]] = {}
        for target in targets:
            if self.before(target) is None:
                continue
            key, (start, end) = storage_key(target), _span(target)
            spans = taken.setdefault(key, [])
            if key in inputs or any(low < end and start < high for low, high in spans):
                raise refused_storage(target, uses.line_of(target))
            spans.append((start, end))


@final
@dataclass(slots=True, eq=False)
class HeldTensor:
    """A tensor that something outside the step holds. A call takes the tensor at ``place``, once
    that is known."""

    tensor: Tensor | None = field(default=None, metadata=NOT_STORED)
    place: Location | StateLocation | None = None

    def __call__(self) -> object:
        return self.tensor if self.place is None else self.place.get()

    def found_at(self, place: Location | StateLocation) -> None:
        """Set the place where calls find it."""
        self.tensor, self.place = None, place


@final
@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A user's tensor that is not a parameter or buffer: ``traced`` in its place, and its state
    before the step."""

    label: str
    find: Callable[[], object]
    traced: Tensor
    flag: bool
    grad: Tensor | None  # as it is traced
    version: int  # of that
    attributes: dict[str, object]
    is_argument: bool
    memory: int | None  # the key of what ``traced`` was in

    @staticmethod
    def of(
        label: str, find: Callable[[], object], tensor: Tensor, traced: Tensor, *, is_argument: bool
    ) -> "GivenTensor":
        """``tensor`` as it is now; ``traced`` gets its gradient and its attributes."""
        vars(traced).update({k: v for k, v in vars(tensor).items() if k not in vars(traced)})
        grad = None
        if traced.is_leaf:
            there = tensor.grad if tensor.is_leaf else None
            traced.grad = grad = None if there is None or layout_of(there) else held_input(there)
        version = 0 if grad is None else grad._version
        held = dict(vars(traced))
        flag, memory = traced.requires_grad, storage_key(traced)
        return GivenTensor(label, find, traced, flag, grad, version, held, is_argument, memory)

    def changes(
        self, assignments: DataAssignments, uses: TensorUses
    ) -> Iterator[tuple[TensorLocation, object]]:
        """Its aspects that the step changed, with what is there now. TR-117 for all but ``.data``
        of a tensor that is not an argument."""
        if assignments.before(self.traced) is not None:
            yield self._place("data", Aspect.DATA), self.traced.detach()
        if self.traced.is_leaf:
            yield from self._of_gradient(uses)
            if self.traced.requires_grad != self.flag:
                flag = self._place("requires_grad", Aspect.FLAG), self.traced.requires_grad
                yield from self._allowed([flag], uses)
        yield from self._allowed(self._of_attributes(), uses)
        if tensor_hooks(self.traced):
            raise refused(f"the hooks of {self.label}", "tensor", uses.line_of(self.traced))

    def read(
        self, walk: ReadsWalk, uses: TensorUses, is_named_in_code: Callable[[str], bool]
    ) -> None:
        """The properties that the run read besides its values. ``is_named_in_code``: whether it may
        have read an attribute of that name."""
        tensor = self.find()
        for name in filter(is_named_in_code, vars(tensor) if isinstance(tensor, Tensor) else ()):
            walk.add_found(f"{self.label}.{name}", functools.partial(_attribute, self.find, name))
        if self._reads_gradient(uses):
            walk.add_found(f"{self.label}.grad", functools.partial(_gradient_of, self.find))

    def _reads_gradient(self, uses: TensorUses) -> bool:
        """Whether the run depends on whether ``.grad`` was there, and on its value."""
        if not self.traced.is_leaf or uses.is_replaced_first(self.traced):
            return False
        return uses.is_looked_at(self.traced) or self._is_accumulated()

    def _is_accumulated(self) -> bool:
        if self.grad is None:
            return False
        return self.traced.grad is not self.grad or self.grad._version != self.version

    def _of_gradient(self, uses: TensorUses) -> Iterator[tuple[TensorLocation, object]]:
        now, replaced = self.traced.grad, uses.is_replaced_first(self.traced)
        if now is self.grad and not replaced:
            return
        if now is not None and now.shape != self.traced.shape:  # it was made for another shape
            raise refused_storage(self.traced, uses.line_of(self.traced))
        known = replaced or self.grad is not None or uses.is_looked_at(self.traced)
        yield self._place("grad", Aspect.GRADIENT if known else Aspect.ADDED_GRADIENT), now

    def _of_attributes(self) -> Iterator[tuple[TensorLocation, object]]:
        before, now = self.attributes, vars(self.traced)
        for name in {**before, **now}:
            value = now.get(name, MISSING)
            if value is not before.get(name, MISSING) and name not in MEMOS:
                yield self._place(name, Aspect.ATTRIBUTE), value

    def _allowed(
        self, changes: Iterable[tuple[TensorLocation, object]], uses: TensorUses
    ) -> Iterator[tuple[TensorLocation, object]]:
        for place, value in changes:
            if not self.is_argument:
                raise refused(place.label, "tensor", uses.line_of(self.traced))
            yield place, value

    def _place(self, name: str, aspect: Aspect) -> TensorLocation:
        return TensorLocation(f"{self.label}.{name}", self.find, aspect, name)


def _attribute(find: Callable[[], object], name: str) -> object:
    tensor = find()
    return vars(tensor).get(name, MISSING) if isinstance(tensor, Tensor) else MISSING


_ASK = ("hasattr", "getattr", "vars", "__dict__", "AttributeError", "Exception")
"""Names in code that tolerates missing attributes."""


def read_attributes(
    finds: Sequence[Callable[[], object]], walk: ReadsWalk, is_named_in_code: Callable[[str], bool]
) -> None:
    """Which attributes tensors have, for a run that may have asked for one that is not there.
    ``finds``: each gives one of them, or ``MISSING`` between two calls."""
    if not any(map(is_named_in_code, _ASK)):
        return

    def read() -> dict[int, frozenset[str]]:
        reads_of: dict[int, frozenset[str]] = {}
        for at, find in enumerate(finds):
            tensor = find()
            if isinstance(tensor, Tensor) and (names := vars(tensor)):
                reads_of[at] = frozenset(filter(is_named_in_code, names))
        return {at: names for at, names in reads_of.items() if names} if reads_of else reads_of

    walk.add_computed("which attributes the tensors of the step have", read)


def _gradient_of(find: Callable[[], object]) -> object:
    tensor = find()
    return tensor.grad if isinstance(tensor, Tensor) and tensor.is_leaf else MISSING


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return storage_key(one) == storage_key(other) and _geometry(one) == _geometry(other)


def _span(tensor: Tensor) -> tuple[int, int]:
    """From where to where in its storage its elements are; everywhere, if its sizes are symbols."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if not all(type(number) is int for number in numbers):
        return 0, sys.maxsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    first, reach = int(tensor.storage_offset()), sum((int(n) - 1) * step for n, step in pairs)
    return first, first + reach + 1 if tensor.numel() else first


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def refused_storage(target: Tensor, where: str) -> CaptureError:
    """TR-117 for a tensor that is left in memory which is not its own, or of another type."""
    return CaptureError(
        f"the step leaves a tensor {list(target.shape)} of {target.dtype} with the storage of "
        "another one (.data =), or a parameter or buffer with another shape or dtype",
        code="TR-117",
        where=where,
        remedy="copy the values: p.data.copy_(value), or p.data = value.clone()",
    )
