"""``map`` and ``scan`` while a step is traced: as a batch, as a loop, or as copies of the body.

::

    map(f, xs)               vmap(f)(xs)                          a batch, where vmap can
    map(f, xs), scan(f, h)   treadle::scan([h], [xs], ...,        a loop, several slices a round
                                 body = "carried_0, slice_0, other_0 -> ...")
    few slices               as many copies of f as there are slices

A body that can be neither batched nor in a loop (it draws random numbers, or writes to tensors from
outside) is copied as well, up to ``MOST_COPIES`` slices.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from treadle.capture.control_flow.bodies import MOST_COPIES, Pure, unfit
from treadle.capture.control_flow.loop_functions import (
    LoopFunctions,
    TracedFunction,
    in_graph,
    require_dense,
    require_same,
)
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.compat.pytree import TreeSpec, tree_leaves
from treadle.compat.tracing import Args, Kwargs
from treadle.compat.transforms import in_transform, is_wrapped, without_vmap_fallback
from treadle.graph.custom_ops.scans import scan as scan_operation
from treadle.util.errors import CaptureError

FEW = 8
"""The most slices of a ``scan`` whose body is always copied: kernels of several slices may be
fused."""

OPERATIONS = 256
"""The most operations of all copies of a body, in an iteration or in the step's own graph. Kernels
of several slices may be fused; with more operations the copies take longer to compile than they
save."""

_ROUND = 16
"""The most slices per iteration; with more, the host's cost of an iteration no longer matters."""


def map_over(body: Callable[..., object], xs: object, *args: object) -> object:
    """The results of ``body(x, *args)`` for each slice ``x`` of ``xs``, stacked."""
    leaves, spec = flatten_containers(xs)
    tensors = _of_one_length("map", leaves, 0)

    def of_slice(values: Sequence[Tensor]) -> object:
        return [], body(unflatten(list(values), spec), *args)

    loop = _Loop("map", of_slice, [], tensors, reverse=False)
    _, rows = loop.as_copies() if in_transform() else loop.result(batch=True)
    return rows


def scan(
    body: Callable[..., tuple[object, object]],
    init: object,
    xs: object,
    *,
    dim: int = 0,
    reverse: bool = False,
) -> object:
    """The last carry, and the stacked results of each step."""
    leaves, spec = flatten_containers(xs)
    if not leaves:
        return init, []
    tensors = _of_one_length("scan", leaves, dim)
    dim %= tensors[0].ndim
    carried, carry_spec = flatten_containers(init)

    def of_slice(values: Sequence[Tensor]) -> object:
        count = len(carried)
        given = unflatten(list(values[:count]), carry_spec), unflatten(list(values[count:]), spec)
        carry, row = body(*given)
        found, structure = flatten_containers(carry)
        if str(structure) != str(carry_spec):
            raise unfit("scan", "its body does not return the containers that it receives")
        return found, row

    moved = [tensor.movedim(dim, 0) for tensor in tensors]
    loop = _Loop("scan", of_slice, carried, moved, reverse=bool(reverse))
    few = type(loop.count) is int and loop.count <= FEW
    carry, rows = loop.as_copies() if few or in_transform() else loop.result()
    leaves, structure = flatten_containers(rows)
    placed = [
        row.movedim(0, dim) if isinstance(row, Tensor) and dim < row.ndim else row for row in leaves
    ]
    return unflatten(list(carry), carry_spec), unflatten(placed, structure)


def _of_one_length(name: str, leaves: Sequence[object], dim: int) -> list[Tensor]:
    """The inputs, if they are tensors with equally many slices, and at least one."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) != len(leaves) or not tensors:
        raise unfit(name, "its inputs are not tensors")
    dims = tensors[0].ndim
    if not all(-dims <= dim < tensor.ndim for tensor in tensors):
        raise unfit(name, f"an input has no dim {dim}")
    counts = [tensor.shape[dim % dims if dim < 0 else dim] for tensor in tensors]
    if any(count != counts[0] for count in counts[1:]):
        raise unfit(name, "its inputs are not tensors of one length")
    if counts[0] == 0:
        raise unfit(name, "its inputs have 0 slices, which PyTorch refuses as well")
    return tensors


Results = tuple[Sequence[Any], Any]
"""The values after the last slice, and the containers of the stacked rows."""


@dataclass(frozen=True, slots=True)
class _Loop:
    """``function`` takes the carried values and one slice of each tensor, along the first dim, and
    returns the carried values and a row in containers."""

    name: str
    function: Callable[[Sequence[Tensor]], Any]
    carried: Sequence[Any]
    tensors: Sequence[Tensor]
    reverse: bool

    @property
    def count(self) -> int:
        """How many slices there are; not an ``int`` where sizes are declared."""
        return self.tensors[0].shape[0]

    def result(self, *, batch: bool = False) -> Results:
        """The results: as a batch if that is asked for and possible, as copies if they are short,
        or as a loop. A body that can be neither batched nor in a loop is copied if there are not
        too many slices, and refused otherwise."""
        known = type(self.count) is int
        try:
            functions, body = self._traced()
            if batch and (batched := self._as_batch(body)) is not None:
                return batched
            if not known:
                return self._as_loop(functions, body)
            copies = min(OPERATIONS // max(body.end - body.first, 1), MOST_COPIES)
            if self.count > copies:
                slices = _slices_of_round(self.count, min(copies, _ROUND))
                if slices == 1:
                    return self._as_loop(functions, body)
                return self._in_rounds(slices)
        except CaptureError as refusal:
            if refusal.code != "TR-151" or not known or self.count > MOST_COPIES:
                raise
        return self.as_copies()

    def as_copies(self) -> Results:
        """The function, copied for each slice."""
        if self.count > MOST_COPIES:
            where = " inside a torch.func transform" if in_transform() else ""
            words = f"it has {self.count} slices{where}, and treadle copies at most {MOST_COPIES}"
            raise unfit(self.name, words)
        carry, rows = self.carried, list[object]()
        for at in range(self.count)[:: -1 if self.reverse else 1]:
            slices = [tensor.select(0, at) for tensor in self.tensors]
            carry, row = self.function([*carry, *slices])
            rows.append(row)
        flat = [flatten_containers(row) for row in (rows[::-1] if self.reverse else rows)]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        stacked: list[Tensor] = [torch.stack(list(column)) for column in columns]
        return carry, unflatten(stacked, flat[0][1])

    def _in_rounds(self, slices: int) -> Results:
        """A loop with ``slices`` in each iteration; the function is copied after it for the
        remaining slices."""
        rest = self.count % slices
        looped, left = (rest, 0) if self.reverse else (0, self.count - rest)
        length = self.count - rest
        chunks = [
            tensor.narrow(0, looped, length).unflatten(0, (-1, slices)) for tensor in self.tensors
        ]
        rounds = replace(self, function=self._of_several, tensors=chunks)
        carry, rows = rounds._as_loop(*rounds._traced())
        leaves, spec = flatten_containers(rows)
        stacked = [leaf.flatten(0, 1) for leaf in leaves if isinstance(leaf, Tensor)]
        if rest:
            tensors = [tensor.narrow(0, left, rest) for tensor in self.tensors]
            carry, rows = replace(self, carried=carry, tensors=tensors).as_copies()
            after = [leaf for leaf in flatten_containers(rows)[0] if isinstance(leaf, Tensor)]
            pairs = (after, stacked) if self.reverse else (stacked, after)
            stacked = [torch.cat(pair) for pair in zip(*pairs, strict=True)]
        return carry, unflatten(stacked, spec)

    def _of_several(self, values: Sequence[Tensor]) -> Results:
        """The function, copied for each slice of an iteration."""
        count = len(self.carried)
        return replace(self, carried=values[:count], tensors=values[count:]).as_copies()

    def _traced(self) -> tuple[LoopFunctions, TracedFunction]:
        """Trace the function on values of any slice, repeatedly until the same carried values need
        a gradient before and after it."""
        name, carried = self.name, self.carried
        for value in carried:
            if not isinstance(value, Tensor):
                raise unfit(name, f"it carries {value!r}, which is not a tensor")
        firsts = [tensor.select(0, 0) for tensor in self.tensors]
        like = [*carried, *firsts]
        names = [f"carried_{at}" for at in range(len(carried))]
        names += [f"slice_{at}" for at in range(len(firsts))]
        for value in like:
            require_dense(name, value, "it is given")
        flags = [value.requires_grad and torch.is_grad_enabled() for value in like]
        while True:
            functions = LoopFunctions(name, like, names, flags)
            body = functions.traced("its body", self.function)
            require_same(name, carried, body.leaves[: len(carried)])
            after = [
                flag or leaf.requires_grad
                for flag, leaf in zip(flags[: len(carried)], body.leaves, strict=False)
            ]
            if after == flags[: len(carried)]:
                break
            flags[: len(carried)] = after
        for leaf in body.leaves:
            if not isinstance(leaf, Tensor):
                raise unfit(name, f"its body returns {leaf!r}, which is not a tensor")
        return functions, body

    def _as_batch(self, body: TracedFunction) -> Results | None:
        """All slices at once, if ``vmap`` has a rule for each operation and gives the types that
        ``body`` gave. ``body`` ran without an error before, so any error comes from ``vmap``."""
        made = _TensorsInside()
        try:
            with Pure(self.name, "its body", always=True), without_vmap_fallback(), made:
                results = torch.vmap(self._leaves_of_slice)(list(self.tensors))
        except (RuntimeError, ValueError, TypeError, CaptureError):
            return None
        if made.escaped():
            raise unfit(self.name, "its body leaves a tensor outside")
        types = [(leaf.dtype, leaf.shape, leaf.device) for leaf in body.leaves]
        if [(each.dtype, each.shape[1:], each.device) for each in results] != types:
            return None
        stacked = [each.clone(memory_format=torch.contiguous_format) for each in results]
        return _split(0, stacked, body.spec)

    def _leaves_of_slice(self, slices: Sequence[Tensor]) -> list[Any]:
        return flatten_containers(self.function(slices))[0]

    def _as_loop(self, functions: LoopFunctions, body: TracedFunction) -> Results:
        """The scan as one operation of the step's graph."""
        count = len(self.carried)
        after, rows = body.leaves[:count], body.leaves[count:]
        row_flags = [row.requires_grad for row in rows]
        outputs = [*compress(after, functions.flags), *compress(rows, row_flags)]
        runs: list[tuple[TracedFunction, Sequence[Tensor]]] = [(body, [])]
        if outputs:
            runs.append(functions.backward(body, outputs))
        others, texts = functions.texts(runs)
        slices = [_with_dense_slices(tensor) for tensor in self.tensors]
        given = len(self.carried) + len(slices) + len(others)
        flags = [*functions.flags, *[False] * (given - len(functions.flags))]
        if not outputs:
            flags, texts = [False] * given, [*texts, ""]
        results = in_graph(
            scan_operation,
            *(list(self.carried), slices, others, flags, row_flags, self.reverse),
            *texts,
        )
        return _split(count, results[: count + len(rows)], body.spec)


class _TensorsInside(TorchFunctionMode):
    """Notes which tensors the functions called within it return."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        self._made += [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return result

    def escaped(self) -> bool:
        """Whether a tensor of a transform that has ended is still referenced."""
        return any(is_wrapped(tensor) for made in self._made if (tensor := made()) is not None)


def _slices_of_round(count: int, most: int) -> int:
    """The number of slices per iteration: above half of ``most``, such that the fewest of ``count``
    slices remain."""
    sizes = range(max(most, 1), most // 2, -1)
    return min(sizes, key=lambda size: count % size)


def _split(count: int, results: Sequence[Tensor], spec: TreeSpec | None) -> Results:
    """Results split into the ``count`` values after the last slice, and the rows."""
    assert spec is not None
    made: Any = unflatten(list(results), spec)
    carry, rows = made
    assert len(carry) == count, made
    return carry, rows


def _with_dense_slices(tensor: Tensor) -> Tensor:
    return tensor if tensor.select(0, 0).is_contiguous() else tensor.contiguous()
