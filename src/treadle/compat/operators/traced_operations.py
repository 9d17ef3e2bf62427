"""Operations of a trace, put into its graph without PyTorch's tracer where the result is known.

A step has thousands of operations, but layers repeat: few have operands of types that no earlier
operation had.

::

    mul(a: f32[4, 8], b: f32[8])     PyTorch runs the operator on fake tensors, and keeps the type
    mul(c: f32[4, 8], d: f32[8])     of the result: a node, and fake memory of that type

Only a type that PyTorch's own memo of fake results gave is kept: PyTorch knows of which operators
the results depend on nothing but the types of the operands.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    extract_val,
    track_tensor_tree,
)

from treadle.compat.fake import STAND_INS
from treadle.compat.operators.schemas import OpOverload, decided_by_values, gives_tensors

aten = torch.ops.aten

Dispatch: TypeAlias = Callable[..., object]
"""``__torch_dispatch__`` of the mode that traces: of the mode, an operator, the classes of its
operands, and the operands."""

_CONSTANTS = frozenset({
    bool, int, float, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
"""Operands that are the same where class and value are."""

_OF_NUMBERS = frozenset({
    aten.is_nonzero.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
})  # fmt: skip
"""What brings tensors of known numbers into a trace, which may then tell them, and asks for one."""


class _NotPlain(Exception):
    """PyTorch's tracer does more with this call than is done here."""


@final
@dataclass(frozen=True, slots=True)
class _Result:
    """The type of a result. ``operand``: the position of the one whose memory it has; negative if
    it has its own. ``is_operand``: it is that operand itself, which was written to."""

    operand: int
    is_operand: bool
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def made(self, mode: FakeTensorMode, operands: Sequence[Any]) -> tuple[Any, Any]:
        """The result, and a tensor for the graph that nothing done to it later changes."""
        if self.is_operand:
            written = operands[self.operand]
            return written, extract_val(written)
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device="meta"
            )  # fmt: skip
            if self.operand >= 0:
                storage = operands[self.operand].untyped_storage()
                memory.set_(storage, self.offset, self.shape, self.strides)
            return FakeTensor(mode, memory, self.device), FakeTensor(mode, memory, self.device)


_Types: TypeAlias = _Result | tuple[_Result | None, ...]


@final
@dataclass(slots=True)
class _Call:
    """A call of an operator. ``key``: the types of its operands. ``nodes``: its arguments with
    nodes in the places of tensors. ``fakes``: who made those tensors, if there are any."""

    op: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    key: list[object]
    nodes: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    fakes: FakeTensorMode | None = None

    def run(self) -> Any:
        """What it gives, in the modes that are on."""
        return self.op(*self.args, **self.kwargs)

    def read(self, tracked: Mapping[Tensor, Any]) -> None:
        """``tracked``: what is known of the trace's tensors. Raises ``_NotPlain``."""
        self.key += self.op, torch.get_default_dtype(), torch.is_inference_mode_enabled()
        args = tuple(self._read(self.args, tracked))
        self.key += self.kwargs
        named = self._read(self.kwargs.values(), tracked)
        self.nodes = args, dict(zip(self.kwargs, named, strict=True))

    def _read(self, operands: Iterable[object], tracked: Mapping[Tensor, Any]) -> list[object]:
        found: list[object] = []
        for operand in operands:
            kind = type(operand)
            if kind in STAND_INS:
                found.append(self._node_of(operand, tracked))
            elif kind in _CONSTANTS:
                self.key += kind, operand
                found.append(operand)
            elif kind is list or kind is tuple:
                self.key += kind, len(operand)  # pyright: ignore[reportArgumentType]
                found.append(kind(self._read(operand, tracked)))  # pyright: ignore
            else:
                raise _NotPlain
        return found

    def _node_of(self, tensor: Any, tracked: Mapping[Tensor, Any]) -> fx.Node:
        known = tracked.get(tensor)
        if known is None or known.constant is not None or tensor.constant is not None:
            raise _NotPlain
        if tensor._has_symbolic_sizes_strides or self.fakes not in (None, tensor.fake_mode):
            raise _NotPlain
        self.fakes = tensor.fake_mode
        self.key += _type_of(tensor)
        return known.proxy.node


@final
class TracedOperations:
    """Of one trace: the types of the results that are known. ``others``: by operator, what to trace
    in its place; ``NotImplemented`` if it gives that, the operator is traced."""

    def __init__(self, others: Mapping[Any, Callable[..., object]]) -> None:
        self._others = others
        self._results: dict[tuple[object, ...], _Types] = {}
        self._plain: dict[object, bool] = {}
        self._names: dict[OpOverload, str] = {}

    def instead_of(self, original: Dispatch) -> Dispatch:
        """What to put in the place of ``original``."""

        def dispatch(
            mode: Any, op: Any, types: object, args: tuple[object, ...] = (), kwargs: Any = None
        ) -> object:
            call = _Call(op, args, kwargs or {}, [])
            try:
                if not self._is_plain(mode, op):
                    raise _NotPlain
                call.read(mode.tracer.tensor_tracker)
            except _NotPlain:
                return original(mode, op, types, args, call.kwargs)
            other = self._others.get(op)
            if other is not None:
                with mode:
                    result = other(*args, **call.kwargs)
                if result is not NotImplemented:
                    return result
            return self._trace(mode.tracer, call)

        return dispatch

    def _is_plain(self, mode: ProxyTorchDispatchMode, op: Any) -> bool:
        """Whether a call of ``op`` is one node, and nobody knows the values that it gives."""
        plain = self._plain.get(op)
        if plain is None:
            plain = self._plain[op] = (
                isinstance(op, OpOverload)
                and op not in _OF_NUMBERS
                and gives_tensors(op)
                and not decided_by_values(op)
                and not op._can_decompose()
                and not mode.emulate_precision_casts
            )
        return plain

    def _trace(self, tracer: Any, call: _Call) -> object:
        op = call.op
        if op not in self._names:
            self._names[op] = tracer.graph._target_to_str(op.overloadpacket.__name__)
        node = tracer.graph.create_node("call_function", op, *call.nodes, self._names[op])
        proxy = fx.Proxy(node, tracer)
        result, value = self._result(call)
        if value is None:
            return track_tensor_tree(result, proxy, constant=None, tracer=tracer)
        tracer.tensor_tracker[result] = _ProxyTensor(proxy, None)
        node.meta["val"] = value
        return result

    def _result(self, call: _Call) -> tuple[Any, Any]:
        """What the call gives; and of one tensor of a known type another one for the graph."""
        if call.fakes is None:
            return call.run(), None
        key = tuple(call.key)
        known = self._results.get(key)
        if known is None:
            before = _memo_counts()
            result = call.run()
            if _memo_counts() == before._replace(hits=before.hits + 1):
                self._results[key] = _types_of(result, call)
            return result, None
        if isinstance(known, _Result):
            return known.made(call.fakes, call.args)
        return tuple(each and each.made(call.fakes, call.args)[0] for each in known), None


class _MemoCounts(NamedTuple):
    """How often PyTorch's memo of fake results was asked, by what it said. Whoever is not answered
    by it may ask it for parts of an operation."""

    hits: int
    misses: int
    others: int


def _memo_counts() -> _MemoCounts:
    mode = FakeTensorMode
    return _MemoCounts(mode.cache_hits, mode.cache_misses, sum(mode.cache_bypasses.values()))


def _types_of(result: Any, call: _Call) -> _Types:
    """Those of what the memo made: each tensor has memory of its own, or of the one operand that
    the operator gives a view of, or is an operand."""
    if isinstance(result, list | tuple):
        return tuple(None if part is None else _result_of(part, call) for part in result)
    return _result_of(result, call)


def _result_of(tensor: FakeTensor, call: _Call) -> _Result:
    tensors = {at: each for at, each in enumerate(call.args) if isinstance(each, Tensor)}
    written = [at for at, each in tensors.items() if each is tensor]
    operand, *_ = written or (tensors if call.op.is_view else [-1])
    shape, strides = tensor.shape, tensor.stride()
    offset = int(tensor.storage_offset())
    kind = tensor.dtype, tensor.fake_device
    return _Result(operand, bool(written), shape, strides, offset, *kind)


def _type_of(tensor: FakeTensor) -> tuple[object, ...]:
    """All that the result of an operation may depend on, and that PyTorch's memo looks at."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.fake_device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
