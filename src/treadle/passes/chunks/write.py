"""Replacing a region by chunks of rows, one after the other.

before:  x = mm(h, w); g = f(x); d = mm(g, v); e = mm(t(g), h)
after:   x0 = mm(h[:n], w); g0 = f(x0); d0 = mm(g0, v); e0 = mm(t(g0), h[:n])
         x1 = mm(h[n:], w); g1 = f(x1); d1 = mm(g1, v); e1 = addmm(e0, t(g1), h[n:])
         d = cat([d0, d1]); e = e1

Sums of 16-bit values accumulate in 32 bits and are rounded once, as in one product or sum.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from treadle.graph.core.arguments import Argument, map_argument
from treadle.graph.core.node_info import info, tensor_of, with_info
from treadle.graph.core.operators import is_item
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.core.values import emit, refresh
from treadle.graph.rewrite.order import restore_order
from treadle.passes.chunks.batch_region import BatchRegion
from treadle.passes.chunks.region import LossRegion
from treadle.passes.chunks.rows import (
    BatchCount,
    BatchDim,
    BatchMember,
    BatchSlice,
    Box,
    Contraction,
    Exit,
    Filled,
    MadeRows,
    Member,
    Renewed,
    Resliced,
    RowCount,
    RowPart,
    RowSlice,
    Total,
    TotalWeight,
    Unwritten,
)
from treadle.passes.chunks.templates import read_by_kernels, template_of, wide_dtype

aten = torch.ops.aten

ChunkedRegion = LossRegion | BatchRegion
_Slices = dict[tuple[RowSlice | BatchSlice, Box], fx.Node]


def write_chunks(
    step: StepGraph, region: ChunkedRegion, boxes: Sequence[Box], wide_products: bool
) -> None:
    """Put the chunks of ``boxes`` in the place of the region's nodes. ``wide_products``: whether
    there are products of 16-bit factors into 32 bits."""
    _Writer(step, region, wide_products).write(boxes)


@dataclass
class _Writer:
    step: StepGraph
    region: ChunkedRegion
    wide_products: bool
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    renewed: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    outside: dict[RowSlice, fx.Node] = field(default_factory=dict[RowSlice, fx.Node])
    copies: _Slices = field(default_factory=_Slices)
    weights: dict[TotalWeight, fx.Node] = field(default_factory=dict[TotalWeight, fx.Node])

    def __post_init__(self) -> None:
        self.graph = self.step.graph
        members = {member.node for member in self.region.members}
        nodes = [node for node in self.graph.nodes if node in members]
        ends = {exit_.node for exit_ in self.region.exits}
        self.last = [node for node in self.graph.nodes if node in members | ends][-1]
        phases = {info(node).phase for node in (*nodes, *ends)}
        self.phase = "backward" if "backward" in phases else "forward"
        self.keeps_phases = isinstance(self.region, BatchRegion)  # of values that a plan may drop
        chunks = (info(node).chunk for node in self.graph.nodes)
        self.numbers = itertools.count(1 + max((n for n in chunks if n is not None), default=-1))
        self.chunk: int | None = None  # that of what it is written for

    def write(self, boxes: Sequence[Box]) -> None:
        self._renew()
        wholes: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(self.last):
            rows: dict[fx.Node, list[fx.Node]] = {m.node: [] for m in self.region.collected}
            sums: dict[fx.Node, fx.Node] = {}
            self._copy_narrow(boxes)
            for box in boxes:
                self._chunk(box, rows, sums)
            self.chunk = None
            for member in self.region.collected:
                wholes[member.node] = self._joined(member, rows[member.node])
            for exit_ in self.region.exits:
                wholes[exit_.node] = self._finished(exit_, sums[exit_.node])
        for old, new in wholes.items():
            old.replace_all_uses_with(new)
        self._erase()
        restore_order(self.graph)
        self._follow()
        refresh(self.graph, [*wholes.values(), *self.renewed.values()])

    def _copy_narrow(self, boxes: Sequence[Box]) -> None:
        """Targets and similar operands of each chunk get memory of their own, before all chunks. A
        kernel that reads them at another offset would be another kernel."""
        templates = [(member.node, member.form) for member in self.region.members]
        templates += [(e.node, e.partial) for e in self.region.exits if isinstance(e, Total)]
        for root, template in templates:
            for kernel in read_by_kernels(template):
                for box in boxes if self.region.is_narrow(kernel.trailing) else ():
                    if (kernel, box) not in self.copies:
                        rows = self._sliced(root, kernel, box)
                        named = {"memory_format": torch.contiguous_format}
                        copy = self._call(root, aten.clone.default, rows, **named)
                        self.copies[kernel, box] = copy

    def _chunk(
        self, box: Box, rows: dict[fx.Node, list[fx.Node]], sums: dict[fx.Node, fx.Node]
    ) -> None:
        """The members in one chunk, and what it adds to the sums."""
        self.parts.clear()
        self.chunk = next(self.numbers)
        for each in self.region.in_order:
            if isinstance(each, Member | BatchMember):
                self.parts[each.node] = self._form(each, box)
            else:
                sums[each.node] = self._added(each, box, sums.get(each.node))
        for node, row in rows.items():
            row.append(self.parts[node])

    # The nodes of one chunk.

    def _form(self, member: Member | BatchMember, box: Box) -> fx.Node:
        match member.form:
            case Resliced() as form:
                return self._resliced(member.node, form, box)
            case form:
                return self._value(member.node, form, box)

    def _value(self, root: fx.Node, template: Any, box: Box) -> Any:
        """A template with the values of the chunk."""

        def leaf(value: object) -> Any:
            match value:
                case RowPart(node=node):
                    return self.parts[node]
                case RowSlice():
                    return self.copies.get((value, box)) or self._sliced(root, value, box)
                case RowCount(rows=rows):
                    start, stop = box.of(rows, self.region.grid)
                    return stop - start
                case BatchSlice():
                    return self._rows_of_batch(root, value, box)
                case BatchCount(per_row=per_row):
                    return (box.last - box.first) * per_row
                case MadeRows(target=target, args=args, kwargs=kwargs):
                    filled = map_argument(leaf, args)
                    named = map_argument(leaf, dict(kwargs))
                    if target is aten.view.default and not self._is_view(args[0], filled[0]):
                        return self._flat(root, filled[0], filled[1])
                    return self._call(root, target, *filled, **named)
                case fx.Node():
                    return self.renewed.get(value, value)
                case _:
                    return value

        return map_argument(leaf, template)

    def _is_view(self, source: object, value: fx.Node) -> bool:
        """Whether there is a view of the value, whose source in the template is ``source``. In a
        micro-batch if it lies in memory as that of the whole batch does, of which there is one:
        then no stride depends on the number of rows."""
        if type_of(value).is_contiguous:
            return True
        if not (isinstance(source, RowPart) and isinstance(self.region, BatchRegion)):
            return False
        return type_of(value).strides == type_of(source.node).strides

    def _rows_of_batch(self, root: fx.Node, rows: BatchSlice, box: Box) -> fx.Node:
        """The rows of a micro-batch of a value that is there before, once for all readers."""
        if (rows, box) not in self.copies:
            whole, inner = self.renewed.get(rows.node, rows.node), rows.at.inner
            start, stop = box.first * inner, box.last * inner
            sliced = self._call(root, aten.slice.Tensor, whole, rows.at.dim, start, stop)
            self.copies[rows, box] = sliced
        return self.copies[rows, box]

    def _sliced(self, root: fx.Node, row_slice: RowSlice, box: Box) -> fx.Node:
        """The chunk's rows of a value that is there before."""
        if row_slice not in self.outside:
            self.outside[row_slice] = self._one_row_dim(root, row_slice)
        whole = self.outside[row_slice]
        start, stop = box.of(row_slice.rows, self.region.grid)
        return self._call(root, aten.slice.Tensor, whole, row_slice.dim, start, stop)

    def _one_row_dim(self, root: fx.Node, row_slice: RowSlice) -> fx.Node:
        """The whole value, its rows in one dim."""
        node, shape = (
            self.renewed.get(row_slice.node, row_slice.node),
            tuple(tensor_of(row_slice.node).shape),
        )
        if len(row_slice.row_dims) == 1 and shape[row_slice.dim] == row_slice.row_dims[0]:
            return node
        whole = (*row_slice.row_dims, *row_slice.trailing)
        if shape != whole:
            padded = [*(1,) * (len(whole) - len(shape)), *shape]
            if len(padded) != len(shape):
                node = self._flat(root, node, padded)
            node = self._call(root, aten.expand.default, node, list(whole))
        return self._flat(root, node, [prod(row_slice.row_dims), *row_slice.trailing])

    def _flat(self, root: fx.Node, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The elements in another shape, copied if they do not lie in order."""
        if tuple(tensor_of(node).shape) == tuple(shape):
            return node
        if not type_of(node).is_contiguous:
            contiguous = {"memory_format": torch.contiguous_format}
            node = self._call(root, aten.clone.default, node, **contiguous)
        return self._call(root, aten.view.default, node, list(shape))

    def _resliced(self, root: fx.Node, form: Resliced, box: Box) -> fx.Node:
        """Fewer rows of each outer, or zeros around them."""
        inner, count = self.region.grid.inner, box.last - box.first
        source = self.parts[form.node]
        trailing = list(tensor_of(source).shape[1:])
        low, high = box.inside(form.source)
        new_low, new_high = box.inside(form.rows)
        old, new = (high - low) * inner, (new_high - new_low) * inner
        if (low, high) == (new_low, new_high):
            return source
        start = (new_low - low) * inner
        value = self._flat(root, source, [count, old, *trailing])
        if new < old:
            value = self._call(root, aten.slice.Tensor, value, 1, start, start + new)
        else:
            sizes = [count, new, *trailing]
            value = self._call(
                root, aten.slice_backward.default, value, sizes, 1, -start, old - start, 1
            )
        return self._flat(root, value, [count * new, *trailing])

    # The results of all chunks.

    def _added(self, exit_: Exit, box: Box, before: fx.Node | None) -> fx.Node:
        """The sums so far, with what this chunk adds."""
        match exit_:
            case Total(node=node, partial=partial):
                value = self._value(node, partial, box)
                return value if before is None else self._call(node, aten.add.Tensor, before, value)
            case Contraction(node=node):
                left, right, start = self._value(node, template_of(exit_), box)
                return self._multiplied(node, left, right, start if before is None else before)

    def _multiplied(
        self, root: fx.Node, left: fx.Node, right: fx.Node, before: fx.Node | None
    ) -> fx.Node:
        """``before + left @ right``; factors of 16 bits give products of 32."""
        dtype, kept = type_of(left).dtype, wide_dtype(type_of(left).dtype)
        named: dict[str, torch.dtype] = {}
        one, more = aten.mm.default, aten.addmm.default
        if kept != dtype and self.wide_products:
            one, more, named = aten.mm.dtype, aten.addmm.dtype, {"out_dtype": kept}
        elif kept != dtype:
            left, right = (
                self._call(root, aten._to_copy.default, node, dtype=kept) for node in (left, right)
            )
        if before is None:
            return self._call(root, one, left, right, **named)
        if type_of(before).dtype != kept:
            before = self._call(root, aten._to_copy.default, before, dtype=kept)
        return self._call(root, more, before, left, right, **named)

    def _joined(self, member: Member | BatchMember, pieces: Sequence[fx.Node]) -> fx.Node:
        """The rows of all chunks in the shape of the whole."""
        if isinstance(member, BatchMember):
            assert isinstance(member.at, BatchDim)
            return self._call(member.node, aten.cat.default, list(pieces), member.at.dim)
        whole = self._call(member.node, aten.cat.default, list(pieces))
        return self._flat(member.node, whole, list(tensor_of(member.node).shape))

    def _finished(self, exit_: Exit, total: fx.Node) -> fx.Node:
        """A finished sum, in the dtype and shape of the node that it replaces."""
        root = exit_.node
        match exit_:
            case Total(divisor=int(count)):
                total = self._call(root, aten.div.Tensor, total, count)
            case Total(divisor=TotalWeight() as weight):
                total = self._call(root, aten.div.Tensor, total, self._weight(weight))
            case Contraction(added=fx.Node() as added):
                total = self._call(root, aten.add.Tensor, total, added)
            case _:
                pass
        dtype = type_of(root).dtype
        if type_of(total).dtype != dtype:
            total = self._call(root, aten._to_copy.default, total, dtype=dtype)
        return self._flat(root, total, list(tensor_of(root).shape))

    # Nodes that need no numbers of the region, and nodes that nothing reads any more.

    def _renew(self) -> None:
        for node, renewal in self.region.renewed:
            with self.graph.inserting_before(node):
                self.renewed[node] = self._made_anew(node, renewal)
            node.replace_all_uses_with(self.renewed[node])

    def _made_anew(self, node: fx.Node, renewal: Renewed) -> fx.Node:
        match renewal:
            case Filled(number=number):
                like = type_of(node)
                value = bool(number) if like.dtype is torch.bool else number
                named = {"dtype": like.dtype, "device": like.device}
                return emit(node, aten.full.default, list(like.shape), value, **named)
            case TotalWeight():
                return self._weight(renewal)
            case Unwritten():
                like = type_of(node)
                layout = list(like.shape), list(tensor_of(node).stride())
                named = {"dtype": like.dtype, "device": like.device}
                return emit(node, aten.empty_strided.default, *layout, **named)

    def _weight(self, weight: TotalWeight) -> fx.Node:
        """``sum(target != ignored)``, or of the weights of those targets."""
        if weight in self.weights:
            return self.weights[weight]
        root = weight.loss
        like = type_of(next(iter(user for user in root.users if is_item(user))))
        dtype = wide_dtype(like.dtype)
        with self.graph.inserting_before(root):
            counts = emit(root, aten.ne.Scalar, weight.target, weight.ignore_index)
            seen = emit(root, aten._to_copy.default, counts, dtype=dtype)
            if weight.weight is not None:
                place = emit(root, aten.mul.Tensor, weight.target, counts)
                row_weight = emit(root, aten.gather.default, weight.weight, 0, place)
                seen = emit(root, aten.where.ScalarOther, counts, row_weight, 0)
            total = emit(root, aten.sum.default, seen)
            if like.dtype != dtype:
                total = emit(root, aten._to_copy.default, total, dtype=like.dtype)
        self.weights[weight] = total
        return total

    def _erase(self) -> None:
        """The nodes that the chunks stand for, and what nobody reads without them."""
        gone = {node for node, _ in self.region.renewed}
        gone |= {member.node for member in (*self.region.members, *self.region.exits)}
        gone |= set(self.region.losses)
        for node in reversed(list(self.graph.nodes)):
            if node in gone and not node.users:
                self.graph.erase_node(node)

    def _follow(self) -> None:
        """Nodes of the forward pass that read what is made in the backward pass are of that."""
        for node in self.graph.nodes:
            if node.op != "call_function" or info(node).phase != "forward":
                continue
            if any(info(operand).phase == "backward" for operand in node.all_input_nodes):
                with_info(node, phase="backward")

    def _call(self, root: fx.Node, target: Any, *args: Argument, **kwargs: Argument) -> fx.Node:
        node = emit(root, target, *args, **kwargs)
        phase = info(root).phase if self.keeps_phases else self.phase
        with_info(node, phase=phase, chunk=info(root).chunk if self.chunk is None else self.chunk)
        return node
