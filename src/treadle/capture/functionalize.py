"""Mutation out of a traced graph: versions instead of writes, one write-back at the end.

before:  v = view(w, [4]);  add_(v, x);  y = mul(w, 2);           return y
after:   v = view(w, [4]);  a = add(v, x);  w' = view(a, [2, 2]);  y = mul(w', 2);  return y, w'

Every storage has a current *base* value. A write to a view creates a new base by inverting the view
on the result; a later read of any alias of that storage is derived from the new base.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from treadle.capture.failures import also
from treadle.capture.functional_forms import (
    base_of,
    functional_call,
    in_place_of,
    item_of,
    place_of,
    reshaping,
)
from treadle.capture.tensors.input_memory import bytes_of, separate, spans_of
from treadle.compat.fake import MISTYPED
from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.rng_operators import DRAWS
from treadle.compat.operators.schemas import (
    OpOverload,
    changes_shape,
    returns_written,
    written_arguments,
)
from treadle.compat.tensors import storage_key
from treadle.compat.tracing import Args, Kwargs
from treadle.graph.core.arguments import A, map_nodes, types_of
from treadle.graph.core.node_info import (
    Value,
    copy_notes,
    info,
    known_value,
    set_value,
    tensor_of,
    value_of,
)
from treadle.graph.core.operators import written_values
from treadle.graph.core.values import compute, refresh
from treadle.util.errors import CaptureError, internal_errors

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_FILLS = frozenset({aten.fill_, aten.zero_})
_WRITE_TWICE = frozenset({
    aten.masked_fill_, aten.index_put_, aten.index_fill_, aten.triu_, aten.tril_,
    aten.fill_diagonal_, aten.baddbmm_,
})  # fmt: skip
"""Other operations that PyTorch allows to write to one place several times."""
_SETS = frozenset(getattr(aten.set_, overload) for overload in aten.set_.overloads())
"""Operations that give a tensor the storage of another one."""


@dataclass
class _Alias:
    """``node`` of the old graph is ``view(source)``, and how to compute the view again."""

    source: fx.Node | None
    current: fx.Node
    version: int


@dataclass
class _Storage:
    """All values that share one storage, by the old nodes."""

    version: int = 0
    aliases: dict[fx.Node, _Alias] = field(default_factory=dict[fx.Node, _Alias])
    roots: list[fx.Node] = field(default_factory=list[fx.Node])  # those that are views of none


class Functionalizer:
    """Rewrites one traced graph; ``run`` returns the new graph and each mutated input's value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._old = graph
        self._new = fx.Graph()
        self._storages: dict[tuple[int, int], _Storage] = {}
        self._spans = spans_of(graph.find_nodes(op="placeholder"))
        self._plain: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}  # an in-place result is what it wrote to
        self._pieces: dict[fx.Node, list[fx.Node]] = {}  # or the several that it wrote to

    def run(
        self, returned: Sequence[fx.Node]
    ) -> tuple[fx.Graph, list[fx.Node], dict[int, fx.Node]]:
        """``returned`` values of the old graph -> (graph without output, new values, writes)."""
        inputs: list[fx.Node] = []
        for node in self._old.nodes:
            match node.op:
                case "placeholder":
                    copy = self._new.placeholder(node.name)
                    copy_notes(copy, node)
                    inputs.append(node)
                    self._define(node, copy, None)
                case "call_function":
                    with internal_errors("capturing", info(node).where, node.target):
                        self._call(node)
                case "output":
                    break
                case _:
                    raise CaptureError(f"{node.op} in a traced step", code="TR-199")
        results = [self._read(node) for node in returned]
        writes: dict[int, fx.Node] = {}
        for at, node in enumerate(inputs):
            if self.is_written(node):
                writes[at] = self._read(node)
        _retype(self._new)
        separate(self._new)
        return self._new, results, writes

    def is_written(self, node: fx.Node) -> bool:
        """Whether an operation wrote to the memory of this value of the old graph."""
        storage = self._storage_of(node)
        return storage is not None and storage.version > 0

    def _memory(self, node: fx.Node) -> tuple[int, int] | None:
        """Equal for values that may share an element."""
        value: Any = known_value(node)
        key = storage_key(value)
        if key is None:
            return None
        spans = self._spans.get(key)
        if spans is None:
            return key, 0
        start, end = bytes_of(value)
        index = max((at for at, (low, _) in enumerate(spans) if low <= start), default=0)
        if end > spans[index][1] and start < end:
            raise _no_form(node, "is a view of several inputs that share memory")
        return key, index

    def _storage_of(self, node: fx.Node) -> _Storage | None:
        key = self._memory(node)
        return None if key is None else self._storages.get(key)

    def _version(self, node: fx.Node) -> int:
        storage = self._storage_of(node)
        return 0 if storage is None else storage.version

    def _define(self, node: fx.Node, copy: fx.Node, source: fx.Node | None) -> None:
        self._plain[node] = copy
        key = self._memory(node)
        if key is None:
            return
        storage = self._storages.setdefault(key, _Storage())
        storage.aliases[node] = _Alias(source, copy, storage.version)
        if source is None:
            storage.roots.append(node)

    def _read(self, node: fx.Node) -> fx.Node:
        """The current value of ``node``: taken from the newest base if someone wrote to it."""
        node = self._same.get(node, node)
        storage = self._storage_of(node)
        if storage is None or node not in storage.aliases:
            return self._plain[node]
        alias = storage.aliases[node]
        if alias.version != storage.version:
            alias.current = self._taken_again(node, alias)
            alias.version = storage.version
        return alias.current

    def _taken_again(self, node: fx.Node, alias: _Alias) -> fx.Node:
        """The view that ``node`` is, of the newest value of its source."""
        assert alias.source is not None, node  # a root is current: writes pass through it
        if node.target is operator.getitem:  # one piece of a split: split the new base
            pieces, at = item_of(node)
            fresh = self._emit(pieces, pieces.target, self._resolve(pieces.args), pieces.kwargs)
            set_value(fresh, _run_fake(fresh))
            return self._typed(self._emit(node, operator.getitem, (fresh, at), {}))
        if node.target is aten.as_strided.default:
            return self._strided(node, alias.source)
        args: Args = self._resolve(node.args)
        base, *rest = args
        target = in_place_of(node.target)
        target = reshaping(base) if target in _VIEWS else target
        return self._typed(self._emit(node, target, (base, *rest), self._resolve(node.kwargs)))

    def _strided(self, node: fx.Node, root: fx.Node) -> fx.Node:
        base = self._laid_out(root, self._read(root), node)
        return self._typed(self._emit(node, node.target, (base, *place_of(node)), {}))

    def _laid_out(self, root: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
        """``value`` in the layout that ``root`` had, for strides that count in the storage."""
        old = value_of(root)
        if not old.is_contiguous() or old.storage_offset():
            raise _no_form(like, "computes strides in memory that is not contiguous")
        if tensor_of(value).is_contiguous():
            return value
        plain = {"memory_format": torch.contiguous_format}
        return self._typed(self._emit(like, aten.clone.default, (value,), plain))

    def _resolve(self, value: A) -> A:
        return map_nodes(self._read, value)

    def _emit(self, like: fx.Node, target: Any, args: Args, kwargs: Kwargs) -> fx.Node:
        node = self._new.call_function(target, tuple(args), dict(kwargs))
        copy_notes(node, like)
        return node

    def _typed(self, node: fx.Node) -> fx.Node:
        set_value(node, _run_fake(node))
        return node

    def _call(self, node: fx.Node) -> None:
        written = [self._same.get(argument, argument) for argument in _written_args(node)]
        if changes_shape(node.target):
            self._reshape_in_place(node, written[0])
        elif written:
            _refuse_overlap(node, written)
            self._write(node, written)
        elif node.target is operator.getitem and item_of(node)[0] in self._pieces:
            pieces, at = item_of(node)
            self._same[node] = self._pieces[pieces][at]
        else:
            source = self._viewed(node)
            if node.target is aten.as_strided.default and source and self._version(source):
                self._define(node, self._strided(node, source), source)
                return
            args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
            self._define(node, self._emit(node, node.target, args, kwargs), source)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """The operand whose storage ``node`` shares, if any."""
        key = self._memory(node)
        if key is None:
            return None
        if node.target is aten.as_strided.default and key in self._storages:
            return self._storages[key].roots[0]  # strides count in the storage, not in a view
        maker = item_of(node)[0] if node.target is operator.getitem else node
        for operand in maker.all_input_nodes:
            if self._memory(operand) == key:
                return self._same.get(operand, operand)
        return None

    def _reshape_in_place(self, node: fx.Node, old: fx.Node) -> None:
        """``t_`` and its like: from here on the tensor is ``node``, a view of what it was."""
        target = in_place_of(node.target)
        if target is None or old.op == "placeholder" or node.target in _SETS:
            raise _no_form(node, "changes the shape or storage of a tensor that outlives the step")
        copy = self._emit(node, target, self._resolve(node.args), self._resolve(node.kwargs))
        self._define(node, copy, old)

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        """An in-place operation: its functional form, then new bases for what it wrote."""
        if node.target in DRAWS and not tensor_of(node.args[0]).is_contiguous():  # type: ignore[union-attr]
            self._draw(node, written[0])
            return
        form = functional_call(node)
        if form is None:
            raise _no_form(node, "has no functional form")
        target, args, kwargs = form[0], self._resolve(form[1]), self._resolve(form[2])
        if node.target is aten.copy_.default and _same_type(args[0], args[1]):
            self._rebase(written[0], args[1], node)
            self._same[node] = written[0]
            return
        result = self._typed(self._emit(node, target, args, kwargs))
        self._note_result(node, result, written)
        for old, value in zip(written, self._values(node, result, written), strict=True):
            self._rebase(old, value, node)

    def _draw(self, node: fx.Node, written: fx.Node) -> None:
        """An in-place draw into memory that is not in row-major order, as a function of that
        order."""
        tensor, *rest = node.args
        assert isinstance(tensor, fx.Node)
        val = value_of(tensor)
        layout = list(val.shape), list(val.stride()), val.dtype, val.device
        args, kwargs = self._resolve(rest), self._resolve(node.kwargs)
        drawn = self._emit(node, DRAWS[node.target], (*layout, *args), kwargs)  # type: ignore[index]
        set_value(drawn, val.new_empty_strided(val.shape, val.stride()))
        self._same[node] = written
        self._rebase(written, drawn, node)

    def _note_result(self, node: fx.Node, result: fx.Node, written: list[fx.Node]) -> None:
        """Note which written tensor the result of an operation that writes is."""
        if not returns_written(node.target):
            one, several = (isinstance(value_of(side), torch.Tensor) for side in (node, result))
            if one and not several:  # what it returns comes before what it wrote
                result = self._typed(self._emit(node, operator.getitem, (result, 0), {}))
            self._define(node, result, None)
        elif len(written) == 1:
            self._same[node] = written[0]
        else:
            self._pieces[node] = written

    def _values(self, node: fx.Node, result: fx.Node, written: list[fx.Node]) -> list[fx.Node]:
        """The new value of each written tensor: the last results of the functional form."""
        val = value_of(result)
        if isinstance(val, torch.Tensor):
            return [self._matched(node, result, written[0])]
        first = len(val) - len(written)
        items = [
            self._typed(self._emit(node, operator.getitem, (result, first + at), {}))
            for at in range(len(written))
        ]
        return [self._matched(node, *pair) for pair in zip(items, written, strict=True)]

    def _matched(self, node: fx.Node, result: fx.Node, old: fx.Node) -> fx.Node:
        """The result with the dtype and shape of what it replaces, as in-place forms keep them."""
        want = value_of(old)
        if tensor_of(result).dtype != want.dtype:
            cast = {"dtype": want.dtype}
            result = self._typed(self._emit(node, aten._to_copy.default, (result,), cast))
        if tensor_of(result).shape != want.shape:
            if _outs(node):
                raise _no_form(node, "gives its out= argument another shape")
            spread = self._emit(node, aten.expand.default, (result, list(want.shape)), {})
            result = self._typed(self._emit(node, aten.clone.default, (self._typed(spread),), {}))
        return result

    def _rebase(self, old: fx.Node, value: fx.Node, like: fx.Node) -> None:
        """``old`` is now ``value``: undo views up to its storage's root."""
        storage = self._storage_of(old)
        if storage is None:
            return
        chain = [(old, value)]
        node = old
        while (source := storage.aliases[node].source) is not None:
            value = self._undo(node, self._read(source), value, like)
            node = source
            chain.append((node, value))
        if len(storage.roots) > 1:
            names = " and ".join((info(root).name or str(root)) for root in storage.roots[:2])
            raise CaptureError(
                f"the step writes to memory that several of its inputs share ({names})",
                code="TR-112",
                where=info(like).where,
                remedy="pass the tensor once, pass the base tensor as well, or pass copies",
            )
        storage.version += 1
        for view, current in chain:
            storage.aliases[view].current = current
            storage.aliases[view].version = storage.version

    def _undo(self, view: fx.Node, base: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
        """The base whose ``view`` is ``value`` and whose other elements are ``base``'s."""

        def call(target: OpOverload, args: Args, kwargs: Kwargs) -> fx.Node:
            args = map_nodes(lambda node: self._plain.get(node, node), args)  # sizes of the view
            return self._typed(self._emit(like, target, args, kwargs))

        if view.target is aten.as_strided.default:
            storage = self._storage_of(view)
            assert storage is not None, view
            base = self._laid_out(storage.roots[0], base, like)
        rebased = base_of(call, view, base, value)
        if rebased is None:
            raise _no_form(like, "writes through a view that cannot be inverted")
        return rebased


def _written_args(node: fx.Node) -> list[fx.Node]:
    """The operands that the operation writes to, in schema order."""
    written: list[fx.Node] = []
    for value in written_values(node):
        values: object = value if isinstance(value, list | tuple) else [value]
        written += [written_node for written_node in values if isinstance(written_node, fx.Node)]
    return written


def _outs(node: fx.Node) -> list[str]:
    """The names of ``out=`` arguments."""
    names = [name for _, name in written_arguments(node.target)]
    return [name for name in names if name in node.kwargs]


def _refuse_overlap(node: fx.Node, written: Sequence[fx.Node]) -> None:
    """TR-132 for writing to an expanded tensor, where eager refuses it; TR-107 where it does not,
    and what is written last counts."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else None
    if packet in _FILLS or not isinstance(node.target, OpOverload):
        return
    for written_node in written:
        value = known_value(written_node)
        if not isinstance(value, Tensor) or not _has_overlap(value):
            continue
        if packet in _WRITE_TWICE or not facts_of(node.target).native:
            raise _no_form(node, "writes to an expanded tensor")
        raise also(RuntimeError)(
            f"{node.target} writes to a tensor {list(value.shape)} whose elements share memory, "
            "as those of expand() do",
            code="TR-132",
            where=info(node).where,
            remedy="this is an error in eager as well: clone() the tensor before writing to it",
        )


def _has_overlap(value: Tensor) -> bool:
    if value.layout is not torch.strided or not all(type(n) is int and n for n in value.shape):
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(n > 1 and type(step) is int and step == 0 for n, step in pairs)


def _no_form(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        f"the step mutates a tensor with {node.target}, which {why}",
        code="TR-107",
        where=info(node).where,
        remedy="use the out-of-place version of this operation",
    )


def _same_type(old: fx.Node, new: fx.Node) -> bool:
    """May ``new`` stand wherever ``old`` stood?"""
    a, b = value_of(old), value_of(new)
    same = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return same and a.device == b.device


def _retype(graph: fx.Graph) -> None:
    """Correct the types that a trace got wrong, and those of their readers."""
    wrong = [node for node in graph.nodes if node.target in MISTYPED]
    for node in wrong:
        set_value(node, compute(node))
    refresh(graph, wrong)


def _run_fake(node: fx.Node) -> Value:
    """The type of a node, by running its operation on the types of its operands."""
    args, kwargs = types_of(node)
    assert callable(node.target)
    return node.target(*args, **kwargs)
