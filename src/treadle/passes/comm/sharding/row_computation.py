"""Rows instead of whole values: the changes that ``scatter_reductions.py`` has decided."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, final

import torch
from torch import fx

from treadle.compat.distributed.collectives import collective_op
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.analysis.dataflow import is_list_call
from treadle.graph.core.arguments import map_nodes
from treadle.graph.core.collectives import Collective
from treadle.graph.core.operators import may_recompute
from treadle.graph.core.types import is_tensor, type_of
from treadle.graph.core.values import emit, refresh
from treadle.passes.comm.overlap.kept_order import is_fence
from treadle.passes.comm.sharding.row_parts import Combined, Emit
from treadle.passes.comm.sharding.row_rules import OwnRows, use_of
from treadle.passes.memory.cost import Kind, kind_of

aten = torch.ops.aten

_Key: TypeAlias = tuple[OpOverload, torch.dtype, torch.device, str, int]
"""What parts agree in that are gathered together: how they are combined, their type, and the group
of ranks with its size."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """This rank's part of the number that ``reader`` gives."""

    reader: fx.Node
    how: Combined
    node: fx.Node


@final
@dataclass(slots=True, eq=False)
class RowComputation:
    """``rows``: which rows of each value this rank computes, in the order of the graph.
    ``collectives``: the collectives that scatter, by their waits."""

    graph: fx.Graph
    rows: Mapping[fx.Node, OwnRows]
    collectives: Mapping[fx.Node, Collective]
    _own: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    _group: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    _pending: dict[_Key, list[_Part]] = field(default_factory=dict[_Key, list[_Part]])
    _gone: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    _changed: list[fx.Node] = field(default_factory=list[fx.Node])
    _position: dict[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    _behind: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    _fences: list[fx.Node] = field(default_factory=list[fx.Node])

    def run(self) -> None:
        """Put rows in the place of values, and erase what nobody reads any more."""
        nodes = list(self.graph.nodes)
        self._position.update({node: at for at, node in enumerate(nodes)})
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._fences += [inputs[-1], *filter(is_fence, nodes)]
        for node in nodes:
            self._combine_for(node)
            if node in self.collectives:
                self._scatter(node, self.collectives[node])
            elif is_list_call(node):
                self._compute_list(node)
            elif node in self.rows:
                self._compute(node)
            else:
                self._read(node, node.all_input_nodes)
        for node in reversed(list(self.graph.nodes)):
            if node in self._gone and not node.users:
                self.graph.erase_node(node)
        refresh(self.graph, self._changed)

    @contextmanager
    def _ahead_of(self, place: fx.Node, root: fx.Node) -> Iterator[Emit]:
        """A builder of nodes ahead of ``place`` that get the phase and module of ``root``."""
        with self.graph.inserting_before(place):
            yield partial(emit, root)

    def _put(self, node: fx.Node, value: fx.Node) -> None:
        """Let all readers of ``node`` read ``value``."""
        node.replace_all_uses_with(value)
        self._changed.append(value)
        self._gone[node] = None

    def _is_own(self, node: fx.Node, own: fx.Node, group: str) -> None:
        self._own[node], self._group[node] = own, group
        self._gone[node] = None

    # values in rows

    def _scatter(self, wait: fx.Node, reduction: Collective) -> None:
        """``a = all_reduce(g); w = wait(a)`` -> ``a = reduce_scatter(pad(g)); w = wait(a)[:n]``"""
        rows, (source,) = self.rows[wait], reduction.inputs
        start, stop = collective_op("reduce_scatter_tensor"), collective_op("wait_tensor")
        place = self._moved_to_where_ready(reduction)
        with self._ahead_of(place.next, reduction.node) as emit:
            padded = _padded(emit, source, rows.ranks)
            started = emit(start, padded, reduction.reduce, rows.ranks, reduction.group)
        self._position[started] = self._position[place]
        self._behind[place] = started
        with self._ahead_of(wait, wait) as emit:
            own = emit(aten.slice.Tensor, emit(stop, started), 0, 0, rows.count)
        self._gone[reduction.node] = None
        self._is_own(wait, own, reduction.group)

    def _moved_to_where_ready(self, reduction: Collective) -> fx.Node:
        """What is computed element by element for the collective alone stands right behind what it
        is computed of; the last of all that. Never before the last fence. A step reads gradients in
        the order of its parameters, and they are ready in another."""
        (source,) = reduction.inputs
        chain: list[fx.Node] = []
        while _serves_one(source):
            chain.append(source)
            source = max(source.all_input_nodes, key=self._position.__getitem__)
        place = max(source, self._fence_of(reduction.node), key=self._position.__getitem__)
        while place in self._behind:
            place = self._behind[place]
        for node in reversed(chain):
            if self._position[node] > self._position[place]:
                place.append(node)
                self._position[node] = self._position[place]
                place = node
        return place

    def _fence_of(self, node: fx.Node) -> fx.Node:
        """The last node ahead of ``node`` that it may not pass."""
        at = bisect.bisect(self._fences, self._position[node], key=self._position.__getitem__)
        return self._fences[at - 1]

    def _compute(self, node: fx.Node) -> None:
        """``s = mul(w, c)``  ->  ``own rows of s = mul(own rows of w, c)``"""
        if node in self._own:
            return  # of an operation on lists
        fit = partial(self._fitted, node, node)
        with self.graph.inserting_before(node):
            args, kwargs = map_nodes(fit, node.args), map_nodes(fit, node.kwargs)
        with self._ahead_of(node, node) as emit:
            own = emit(node.target, *args, **kwargs)
        self._is_own(node, own, self._group_of(node.all_input_nodes))

    def _group_of(self, nodes: Iterable[fx.Node]) -> str:
        return next(self._group[node] for node in nodes if node in self._group)

    def _fitted(self, node: fx.Node, place: fx.Node, fitted: fx.Node) -> fx.Node:
        """What stands for an operand of ``node``, which is computed in rows at ``place``: its rows,
        if it has some."""
        if fitted in self._own:
            return self._own[fitted]
        shape = type_of(node).shape
        if not is_tensor(fitted) or type_of(fitted).ndim < len(shape):
            return fitted
        if shape[0] == 1 or type_of(fitted).shape[0] != shape[0]:
            return fitted
        rows = self.rows[node]
        with self._ahead_of(place, place) as emit:
            return emit(aten.slice.Tensor, fitted, 0, rows.begin, rows.end)

    # operations on lists

    def _compute_list(self, call: fx.Node) -> None:
        """``s = _foreach_mul([w, v], c)``  ->  ``s = _foreach_mul([own rows of w, v], c)``; a call
        that returns numbers computes those of whole values in a call of their own."""
        items = {int(str(item.args[1])): item for item in call.users}
        in_rows = {at: item for at, item in items.items() if item in self.rows}
        if in_rows:
            self._in_rows(call, items, in_rows)
            return
        values = call.args[0]
        assert isinstance(values, Sequence), call
        if self._own.keys().isdisjoint(call.all_input_nodes):
            return
        for at, item in items.items():
            if not self._read(item, [values[at]], call):  # type: ignore[list-item]
                self._put(item, self._single(call, values[at], item))
        self._gone[call] = None

    def _in_rows(
        self, call: fx.Node, items: Mapping[int, fx.Node], in_rows: Mapping[int, fx.Node]
    ) -> None:
        def listed(argument: object) -> object:
            if not isinstance(argument, list | tuple):
                return argument
            return [
                self._fitted(in_rows[at], call, value) if at in in_rows else value
                for at, value in enumerate(argument)
            ]

        args = [listed(argument) for argument in call.args]
        kwargs = {name: listed(argument) for name, argument in call.kwargs.items()}
        with self._ahead_of(call, call) as emit:
            node = emit(call.target, *args, **kwargs)
        self._gone[call] = None
        group = self._group_of(call.all_input_nodes)
        for at, item in items.items():
            with self._ahead_of(item, item) as emit:
                own = emit(item.target, node, at)
            if at in in_rows:
                self._is_own(item, own, group)
            else:
                self._put(item, own)

    def _single(self, call: fx.Node, value: object, item: fx.Node) -> fx.Node:
        """The result of an operation on lists for one element of its list."""
        with self._ahead_of(call, item) as emit:
            node = emit(call.target, [value], *call.args[1:], **call.kwargs)
            return emit(item.target, node, 0)

    # what reads rows

    def _read(
        self, reader: fx.Node, nodes: Iterable[fx.Node], place: fx.Node | None = None
    ) -> bool:
        """What ``reader`` takes or makes of rows, ahead of ``place``; whether it reads any."""
        for node in nodes:
            if node not in self._own:
                continue
            match use_of(reader, node):
                case OwnRows():
                    self._put(reader, self._own[node])
                case Combined() as how:
                    self._note_part(reader, node, how, place or reader)
                case _:
                    raise AssertionError(f"{reader} is computed in rows itself")
            return True
        return False

    def _note_part(self, reader: fx.Node, operand: fx.Node, how: Combined, place: fx.Node) -> None:
        with self._ahead_of(place, reader) as emit:
            node = how.part(emit, self._own[operand])
        ranks, device = self.rows[operand].ranks, type_of(node).device
        key = how.combine, how.dtype, device, self._group[operand], ranks
        self._pending.setdefault(key, []).append(_Part(reader, how, node))

    def _combine_for(self, node: fx.Node) -> None:
        """Numbers that ``node`` reads are made of the parts that there are."""
        operands = {*node.all_input_nodes}
        for key, parts in list(self._pending.items()):
            if any(part.reader in operands for part in parts):
                self._combine(key, parts, node)
                del self._pending[key]

    def _combine(self, key: _Key, parts: Sequence[_Part], place: fx.Node) -> None:
        """``q = wait(all_gather(stack(parts)))``, ``[ranks, parts]`` in the end; each column is
        combined to a number, by every rank in the same order."""
        combine, _, _, group, ranks = key
        start, stop = collective_op("all_gather_into_tensor"), collective_op("wait_tensor")
        with self._ahead_of(place, parts[0].reader) as emit:
            stacked = emit(aten.stack.default, [part.node for part in parts])
            combined = emit(stop, emit(start, stacked, ranks, group))
            totals = emit(combine, emit(aten.view.default, combined, [ranks, len(parts)]), [0])
        for at, part in enumerate(parts):
            with self._ahead_of(place, part.reader) as emit:
                number = part.how.finish(emit, emit(aten.select.int, totals, 0, at))
            self._put(part.reader, number)


def _serves_one(node: fx.Node) -> bool:
    """Whether it is computed element by element, or a view, for one reader alone."""
    if node.op != "call_function" or len(node.users) != 1 or not may_recompute(node):
        return False
    return kind_of(node) in (Kind.POINTWISE, Kind.VIEW) and bool(node.all_input_nodes)


def _padded(emit: Emit, node: fx.Node, ranks: int) -> fx.Node:
    """``node`` with rows of zeros behind, so many that ``ranks`` divide all."""
    tensor_type = type_of(node)
    missing = -tensor_type.shape[0] % ranks
    if missing:
        zeros = emit(aten.new_zeros.default, node, [missing, *tensor_type.shape[1:]])
        return emit(aten.cat.default, [node, zeros])
    if tensor_type.is_contiguous:
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)
