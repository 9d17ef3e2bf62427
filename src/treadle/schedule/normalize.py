"""Steps in the two forms the scheduler knows: pointwise, and one reduction at the root.

::

    before:  y[i, k] <- x[i, k] / sum{j} x[i, j]
    after:   t[i]    <- sum{j} x[i, j]
             y[i, k] <- x[i, k] / t[i]

The new temporaries cost nothing: fusion keeps them inside the kernel where they are read.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch

from treadle.algebra.extents import same
from treadle.algebra.index import Axis, linear
from treadle.algebra.strides import contiguous_strides
from treadle.loop.expr import Apply, Array, Const, Expr, Load, Reduce, ReduceKind, identity
from treadle.loop.program import Buffer, BufferKind, Call, Compute, Program, Step, TensorRef
from treadle.loop.traverse import axes_of
from treadle.util.errors import VerifyError, require


@final
@dataclass(frozen=True, slots=True)
class Split:
    """What a step became, and the buffers of its parts."""

    compute: Compute
    made: tuple[Compute, ...]
    parts: tuple[Buffer, ...]


def normalize(
    program: Program, known: dict[Hashable, Split] | None = None
) -> tuple[tuple[Step, ...], Mapping[str, Buffer]]:
    """The steps, each compute in one of the two forms, and the buffers they need. ``known``: of
    programs of the same step."""
    splitter = _Splitter(program, {} if known is None else known)
    for step in program.steps:
        if isinstance(step, Call):
            splitter.steps.append(step)
        elif step.output.numel:
            splitter.split(step)
    return tuple(splitter.steps), splitter.buffers


class _Splitter:
    """Splits steps; those of one template once, and for the others the names are changed."""

    def __init__(self, program: Program, known: dict[Hashable, Split]) -> None:
        self.buffers: dict[str, Buffer] = dict(program.buffers)
        self.steps: list[Step] = []
        self._known = known

    def split(self, compute: Compute) -> None:
        """Append ``compute`` in the two forms."""
        output = compute.output
        device = self.buffers[output.buffer].device
        place = compute.reads.index(output.buffer) if output.buffer in compute.reads else None
        key = compute.template, output.shape, output.strides, output.offset, device, place
        if key in self._known and self._again(compute, self._known[key]):
            return
        before = len(self.steps)
        self._split(compute)
        made = tuple(step for step in self.steps[before:] if isinstance(step, Compute))
        names = _part_names(output.buffer, len(made) - 1)
        if [step.output.buffer for step in made] == [*names, output.buffer]:
            self._known[key] = Split(compute, made, tuple([self.buffers[name] for name in names]))

    def _again(self, compute: Compute, like: Split) -> bool:
        """Append what ``like`` became, on the buffers of ``compute``; not if a name is taken."""
        if like.made == (like.compute,):
            self.steps.append(compute)
            return True
        old, new = like.compute.output.buffer, compute.output.buffer
        parts = _part_names(new, len(like.parts))
        if any(name in self.buffers for name in parts):
            return False
        names = dict(zip((*like.compute.reads, old), (*compute.reads, new), strict=True))
        for part, name in zip(like.parts, parts, strict=True):
            names[part.name] = name
            self.buffers[name] = replace(part, name=name)
        self.steps.extend([step.renamed(names, compute.origin) for step in like.made])
        return True

    def _split(self, compute: Compute) -> None:
        array = compute.array
        memo: dict[Expr, Expr] = {}
        if isinstance(array.body, Reduce) and self._is_plain(array.body, array.axes):
            reduce = array.body
            inner = self._extract(reduce.body, (*array.axes, *reduce.axes), compute, memo)
            body: Expr = Reduce(reduce.kind, _wide(reduce.axes), inner)
        else:
            body = self._extract(array.body, array.axes, compute, memo)
        if body != array.body:
            compute = Compute(compute.output, Array(array.axes, body), compute.origin)
        self.steps.append(compute)

    def _is_plain(self, reduce: Reduce, axes: tuple[Axis, ...]) -> bool:
        """Nothing to simplify, and no output axis repeats the same sum."""
        wide = _wide(reduce.axes)
        return bool(wide) and all(a.extent for a in wide) and set(_wide(axes)) <= axes_of(reduce)

    def _extract(
        self, expr: Expr, scope: tuple[Axis, ...], compute: Compute, memo: dict[Expr, Expr]
    ) -> Expr:
        found = memo.get(expr)
        if found is None:
            found = self._extract_new(expr, scope, compute, memo)
            memo[expr] = found
        return found

    def _extract_new(
        self, expr: Expr, scope: tuple[Axis, ...], compute: Compute, memo: dict[Expr, Expr]
    ) -> Expr:
        match expr:
            case Apply(fn, operands, dtype):
                new = tuple(self._extract(operand, scope, compute, memo) for operand in operands)
                return expr if new == operands else Apply(fn, new, dtype)
            case Load(buffer, index, dtype, mask):
                new_mask = None if mask is None else self._extract(mask, scope, compute, memo)
                return expr if new_mask is mask else Load(buffer, index, dtype, new_mask)
            case Reduce(kind, axes, body):
                inner = self._extract(body, (*scope, *axes), compute, memo)
                return self._reduced(kind, axes, inner, scope, compute)
            case _:
                return expr

    def _reduced(
        self,
        kind: ReduceKind,
        axes: tuple[Axis, ...],
        body: Expr,
        scope: tuple[Axis, ...],
        compute: Compute,
    ) -> Expr:
        wide = _wide(axes)
        if not wide:
            is_position = kind in (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
            return Const(0, torch.int64) if is_position else body
        if any(axis.extent == 0 for axis in wide):
            has_one = kind in (ReduceKind.SUM, ReduceKind.PROD, ReduceKind.ANY)
            require(has_one, VerifyError, f"{kind} of no elements has no value")
            return identity(kind, body.dtype)
        used = axes_of(body)
        free = tuple(axis for axis in _wide(scope) if axis in used and axis not in axes)
        total = Reduce(kind, wide, body)
        shape = tuple(axis.extent for axis in free)
        strides = contiguous_strides(shape)
        ref = self._temporary(total.dtype, shape, strides, compute)
        self.steps.append(Compute(ref, Array(free, total), compute.origin))
        return Load(ref.buffer, linear(free, strides), total.dtype)

    def _temporary(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        compute: Compute,
    ) -> TensorRef:
        name = f"{compute.output.buffer}_part"
        while name in self.buffers:
            name += "_"
        device = self.buffers[compute.output.buffer].device
        kind = BufferKind.TEMPORARY
        self.buffers[name] = Buffer(name, dtype, shape, strides, kind, device)
        return TensorRef(name, dtype, shape, strides)


def _part_names(output: str, count: int) -> list[str]:
    """The names of the first parts of a step, where nobody else has them."""
    return [f"{output}_part{'_' * number}" for number in range(count)]


def _wide(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(axis for axis in axes if not same(axis.extent, 1))
