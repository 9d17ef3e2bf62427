"""What the step computes only from constants: its values are known during capture.

::

    mask = torch.eye(n, dtype=torch.bool)
    x[~mask]    ->    x.flatten(0, 1)[i]      i: where the mask is true, a constant
    ends = torch.unique_consecutive(torch.tensor([8, 8, 4]), return_counts=True)[1].cumsum(0)
    crops[: ends[0]]                          int(ends[0]) is 2

The sizes are then numbers, and the following code is compiled as usual. The operations that compute
such a tensor run once, on the CPU: none of them reads an input or draws random numbers.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, fx

from treadle.capture.python_state.flatten import flatten, unflatten
from treadle.capture.symbolic.literals import is_copied
from treadle.compat.operators.operator_facts import Effect, facts_of
from treadle.compat.operators.schemas import OpOverload, written_arguments
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import TraceInProgress, held_input, outside_modes
from treadle.graph.core.node_info import has_value, known_value
from treadle.graph.core.types import tensors_in

T = TypeVar("T")

_MOST_ELEMENTS = 1 << 20
"""Of what is run at the capture; indices of all of them have 8 MiB for each dim."""
_MOST_NODES = 512
_CPU = torch.device("cpu")
_MASKS = (torch.bool, torch.uint8)
_SELECT = frozenset({torch.masked_select, Tensor.masked_select})
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere})
_COUNT = frozenset(
    {
        *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
        *(torch.bincount, Tensor.bincount),
    }
)
"""Functions of one tensor whose values decide how many elements the results have."""
_ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class KnownConstants:
    """Selects by such masks, and reads such values. ``inputs``: by their ids, tensors that the
    trace holds and that are others at a later call; all else that it holds is what the step's code
    says."""

    def __init__(self) -> None:
        self.inputs: Sequence[Mapping[int, object]] = ()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # of constants that were made here

    def instead_of(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Callable[..., object] | None:
        """What to call in place of ``func``; ``None``: ``func`` itself."""
        if func in (Tensor.__getitem__, Tensor.__setitem__) and not kwargs:
            return self._by_index(func, *args)
        if func in _SELECT and len(args) == 2 and not kwargs:
            x, mask = args
            same = isinstance(x, Tensor) and isinstance(mask, Tensor) and x.shape == mask.shape
            return self._picked if same and self._know((mask,)) else None
        if func in _NONZERO and len(args) == 1 and kwargs.keys() <= {"as_tuple"}:
            return self._nonzero if self.values(args[0]) is not None else None
        if func is torch.where and len(args) == 1 and not kwargs:
            return self._places if self.values(args[0]) is not None else None
        others = (*args[1:], *kwargs.values())
        if func in _COUNT and args and not any(isinstance(other, Tensor) for other in others):
            return self._counted(func) if self.values(args[0]) is not None else None
        return None

    def _by_index(
        self, func: Callable[..., object], x: object, index: object, *value: object
    ) -> Callable[..., object] | None:
        entries = index if isinstance(index, tuple) else (index,)
        if any(map(_is_bounded, entries)):
            return self._bounded(func, entries)
        if not any(map(_is_mask, entries)) or not self._know(entries):
            return None
        if func is Tensor.__getitem__:
            return self._picked
        is_filled = not isinstance(value[0], Tensor) or not value[0].ndim
        return None if is_filled else self._put  # a mask says where it is filled

    def _bounded(
        self, func: Callable[..., object], entries: Iterable[object]
    ) -> Callable[..., object] | None:
        """``func`` with numbers in the places of tensors that are bounds of slices."""
        bounds = [b for entry in entries if _is_bounded(entry) for b in _bounds(entry)]
        read = {
            id(bound): self.read(Tensor.__index__, bound)
            for bound in bounds
            if isinstance(bound, Tensor)
        }
        numbers = {key: known[0] for key, known in read.items() if known}
        if len(numbers) < len(read):
            return None

        def plain(entry: object) -> object:
            if not _is_bounded(entry):
                return entry
            return slice(*(numbers.get(id(bound), bound) for bound in _bounds(entry)))

        def call(x: Tensor, index: object, *value: object) -> object:
            is_tuple = isinstance(index, tuple)
            return func(x, tuple(map(plain, index)) if is_tuple else plain(index), *value)

        return call

    def _know(self, entries: Iterable[object]) -> bool:
        masks = [entry for entry in entries if _is_mask(entry)]
        return bool(masks) and all(self.values(mask) is not None for mask in masks)

    def _picked(self, x: Tensor, index: object) -> Tensor:
        entries = index if isinstance(index, tuple) else (index,)
        mask = entries[0]
        if len(entries) == 1 and _is_mask(mask) and mask.shape == x.shape[: mask.ndim]:
            (at,) = self._found(mask, x.device, lambda mask: (mask.flatten().nonzero()[:, 0],))
            return x.flatten(0, mask.ndim - 1)[at]
        return x[self._numbered(x, entries)]

    def _put(self, x: Tensor, index: object, value: Tensor) -> None:
        x[self._numbered(x, index if isinstance(index, tuple) else (index,))] = value

    def _numbered(self, x: Tensor, entries: Iterable[object]) -> tuple[Any, ...]:
        """An index without masks."""
        plain_entries: list[object] = []
        for entry in entries:
            plain_entries += self._places(entry, x.device) if _is_mask(entry) else [entry]
        return tuple(plain_entries)

    def _places(self, mask: Tensor, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Where it is true, in each of its dims."""
        return self._found(mask, device or mask.device, lambda known: known.nonzero(as_tuple=True))

    def _nonzero(self, mask: Tensor, *, as_tuple: bool = False) -> Tensor | tuple[Tensor, ...]:
        if as_tuple:
            return self._places(mask)
        return self._found(mask, mask.device, lambda known: (known.nonzero(),))[0]

    def _counted(self, func: Callable[..., Any]) -> Callable[..., object]:
        """``func`` of values that are known, as constants."""

        def call(x: Tensor, *args: object, **kwargs: object) -> object:
            is_tuple = False

            def of(known: Tensor) -> tuple[Tensor, ...]:
                nonlocal is_tuple
                results = func(known, *args, **kwargs)
                is_tuple = isinstance(results, tuple)
                return results if is_tuple else (results,)

            results = self._found(x, x.device, of)
            return results if is_tuple else results[0]

        return call

    def _found(
        self,
        mask: Tensor,
        device: torch.device,
        of: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """``of`` its values, as constants of the graph."""
        values = self.values(mask)
        assert values is not None
        with outside_modes():
            known = of(values)
            held = [value.to(device) for value in known]
        traced = tuple(map(held_input, held))
        self._known |= {id(one): (one, value) for one, value in zip(traced, known, strict=True)}
        return traced

    def read(self, function: Callable[..., T], tensor: Tensor, *args: object) -> tuple[T] | None:
        """What a function gives that reads what is in a traced tensor; ``None`` where that is not
        known."""
        values = self.values(tensor)
        if values is None:
            return None
        with outside_modes():
            return (function(values, *args),)

    def answers(self) -> dict[OpOverload, Callable[..., object]]:
        """By operator what asks for a value in the course of a function of PyTorch's: what answers
        of constants (``torch.cov`` looks at its number of observations)."""
        return {op: functools.partial(self._answer, op) for op in _ASKS}

    def _answer(self, op: OpOverload, *tensors: Tensor) -> object:
        known = [self.values(tensor) for tensor in tensors]
        if any(values is None for values in known):
            return NotImplemented
        with outside_modes():
            return op(*known)

    def values(self, tensor: object) -> Tensor | None:
        """What is in a traced tensor at this point of the step, on the CPU; ``None`` if that is not
        made of constants alone, or is large."""
        trace = TraceInProgress()
        node = trace.find(tensor) if isinstance(tensor, Tensor) else None
        known = {trace.find(traced): values for traced, values in self._known.values()}
        if node is None:
            return None
        nodes = self._needed(trace, node, known)
        if nodes is None:
            return None
        with outside_modes():
            results: dict[fx.Node, Any] = {}
            for step in nodes:
                if step in known:
                    results[step] = known[step].clone()
                elif step.op == "get_attr":
                    results[step] = trace.held(step)
                else:
                    results[step] = _run(step, results)
        return results[node]

    def _needed(
        self, trace: TraceInProgress, node: fx.Node, known: Mapping[fx.Node | None, Tensor]
    ) -> list[fx.Node] | None:
        """The nodes that decide what is in ``node``, in their order: those it is computed from, and
        those that wrote to the memory of one of them."""
        needed: set[fx.Node] = set()
        waiting, memory = [node], set[int | None]()
        while waiting:
            source = waiting.pop()
            if source in needed:
                continue
            if len(needed) > _MOST_NODES or not (
                source in known or self._is_constant(trace, source)
            ):
                return None
            needed.add(source)
            waiting += source.all_input_nodes
            memory |= _memory(source)
            if not waiting:
                waiting += [w for w in _writers(trace.graph, memory) if w not in needed]
        return [candidate for candidate in trace.graph.nodes if candidate in needed]

    def _is_constant(self, trace: TraceInProgress, node: fx.Node) -> bool:
        if node.op == "get_attr":
            held = trace.held(node)
            is_input = any(id(held) in input_ for input_ in self.inputs)
            return is_copied(held, node) and not is_input
        if node.target is operator.getitem:
            return True  # one of several results
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return False
        facts = facts_of(node.target)
        if not facts.native or facts.effects & ~Effect.WRITES or not has_value(node):
            return False
        sizes = [tensor.numel() for tensor in tensors_in(known_value(node))]
        return all(type(size) is int and size <= _MOST_ELEMENTS for size in sizes)


def _is_mask(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in _MASKS and bool(value.ndim)


def _is_bounded(value: object) -> TypeGuard[slice]:
    return isinstance(value, slice) and any(isinstance(b, Tensor) for b in _bounds(value))


def _bounds(of: slice) -> tuple[object, object, object]:
    return of.start, of.stop, of.step


def _memory(node: fx.Node) -> set[int | None]:
    return {storage_key(tensor) for tensor in tensors_in(known_value(node))}


def _writers(graph: fx.Graph, memory: set[int | None]) -> list[fx.Node]:
    writers: list[fx.Node] = []
    for node in graph.nodes:
        for at, name in written_arguments(node.target) if node.op == "call_function" else ():
            target = node.args[at] if at < len(node.args) else node.kwargs.get(name)
            if isinstance(target, fx.Node) and _memory(target) & memory:
                writers.append(node)
    return writers


def _run(node: fx.Node, results: dict[fx.Node, object]) -> object:
    """A node's operation on the CPU."""
    leaves, spec = flatten((node.args, node.kwargs))
    leaves = [results[arg] if isinstance(arg, fx.Node) else arg for arg in leaves]
    leaves = [_CPU if isinstance(arg, torch.device) else arg for arg in leaves]
    args, kwargs = unflatten(leaves, spec)
    assert callable(node.target)
    return node.target(*args, **kwargs)
