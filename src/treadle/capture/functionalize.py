"""Mutation out of a traced graph: versions instead of writes, one write-back at the end.

before:  v = view(w, [4]);  add_(v, x);  y = mul(w, 2);           return y
after:   v = view(w, [4]);  a = add(v, x);  w' = view(a, [2, 2]);  y = mul(w', 2);  return y, w'

Every storage has a current *base* value. A write to a view makes a new base by undoing the view
on the result; a later read of any alias of that storage is taken from the new base again.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from treadle.capture.torch_private import storage_key
from treadle.util.errors import CaptureError

aten = torch.ops.aten

_KEEP = ("phase", "where", "module")


@dataclass
class _Alias:
    """``node`` of the old graph is ``view(source)``: how to take it from its source again."""

    source: fx.Node | None
    current: fx.Node
    version: int


@dataclass
class _Storage:
    """All values that share one storage. ``root`` is the old node that made it."""

    root: fx.Node
    version: int = 0
    aliases: dict[fx.Node, _Alias] = field(default_factory=dict[fx.Node, _Alias])


_VIEWS_IN_PLACE = {
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}
"""These change how a tensor is seen and no element of it. The trace follows the tensor from then
on by the new node, so the view is all that remains."""


class Functionalizer:
    """Rewrites one traced graph; ``run`` returns the new graph and each mutated input's value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._old = graph
        self._new = fx.Graph()
        self._storages: dict[int, _Storage] = {}
        self._plain: dict[fx.Node, Any] = {}
        self._same: dict[fx.Node, fx.Node] = {}  # an in-place result is what it wrote to

    def run(
        self, returned: Sequence[fx.Node]
    ) -> tuple[fx.Graph, list[fx.Node], dict[int, fx.Node]]:
        """``returned`` values of the old graph -> (graph without output, new values, writes)."""
        inputs: list[fx.Node] = []
        for node in self._old.nodes:
            match node.op:
                case "placeholder":
                    copy = self._new.placeholder(node.name)
                    copy.meta = dict(node.meta)
                    inputs.append(node)
                    self._define(node, copy, None)
                case "call_function":
                    node.target = _VIEWS_IN_PLACE.get(node.target, node.target)
                    self._call(node)
                case "output":
                    break
                case _:
                    raise CaptureError(f"{node.op} in a traced step", code="TR-199")
        results = [self._read(node) for node in returned]
        writes: dict[int, fx.Node] = {}
        for at, node in enumerate(inputs):
            value = self._read(node)
            storage = self._storage_of(node)
            if storage is not None and storage.version:
                writes[at] = value
        return self._new, results, writes

    def _storage_of(self, node: fx.Node) -> _Storage | None:
        key = storage_key(node.meta.get("val"))
        return None if key is None else self._storages.get(key)

    def _define(self, node: fx.Node, copy: fx.Node, source: fx.Node | None) -> None:
        self._plain[node] = copy
        key = storage_key(node.meta.get("val"))
        if key is None:
            return
        storage = self._storages.setdefault(key, _Storage(node))
        storage.aliases[node] = _Alias(source, copy, storage.version)

    def _read(self, node: fx.Node) -> fx.Node:
        """The current value of ``node``: taken from the newest base if someone wrote to it."""
        node = self._same.get(node, node)
        storage = self._storage_of(node)
        if storage is None or node not in storage.aliases:
            return self._plain[node]
        alias = storage.aliases[node]
        if alias.version == storage.version:
            return alias.current
        if alias.source is None:
            raise CaptureError(f"{node} lost its base", code="TR-199")
        if node.target is operator.getitem:  # one piece of a split: split the new base
            pieces, at = _item(node)
            fresh = self._emit(pieces, pieces.target, self._resolve(pieces.args), pieces.kwargs)
            alias.current = self._emit(node, operator.getitem, (fresh, at), {})
        else:
            alias.current = self._emit(node, node.target, self._resolve(node.args), node.kwargs)
        alias.version = storage.version
        return alias.current

    def _resolve(self, value: Any) -> Any:
        return map_arg(value, self._read)

    def _emit(self, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self._new.call_function(target, tuple(args), dict(kwargs))
        node.meta = dict(like.meta)
        return node

    def _call(self, node: fx.Node) -> None:
        written = _written_args(node)
        if written:
            self._write(node, [self._same.get(each, each) for each in written])
            return
        args: Any = node.args
        if node.target is aten.native_batch_norm.default and args[5] and args[3]:
            self._batch_norm(node)
            return
        copy = self._emit(node, node.target, self._resolve(node.args), self._resolve(node.kwargs))
        self._define(node, copy, self._viewed(node))

    def _batch_norm(self, node: fx.Node) -> None:
        """``native_batch_norm`` updates its running statistics without declaring it."""
        copy = self._emit(
            node, aten._native_batch_norm_legit_functional.default, self._resolve(node.args), {}
        )
        args: Any = node.args
        statistics: tuple[fx.Node, fx.Node] = (args[3], args[4])
        copy.meta["val"] = (*node.meta["val"], *(each.meta["val"] for each in statistics))
        self._define(node, copy, None)
        for at, old in enumerate(statistics):
            value = self._new.call_function(operator.getitem, (copy, 3 + at))
            value.meta = {**node.meta, "val": old.meta["val"]}
            self._rebase(self._same.get(old, old), value, node)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """The operand whose storage ``node`` shares, if any."""
        key = storage_key(node.meta.get("val"))
        if key is None:
            return None
        maker = node.args[0] if node.target is operator.getitem else node
        assert isinstance(maker, fx.Node)
        for operand in maker.all_input_nodes:
            if storage_key(operand.meta.get("val")) == key:
                return self._same.get(operand, operand)
        return None

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        """An in-place operation: its functional form, then new bases for what it wrote."""
        functional = functional_form(node.target)
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        if functional is None:
            raise CaptureError(
                f"the step mutates through {node.target}, which has no functional form",
                code="TR-107",
                where=node.meta.get("where", ""),
                remedy="use the out-of-place form of this operation",
            )
        target, extra = functional
        if node.target is aten.copy_.default and _same_type(args[0], args[1]):
            self._rebase(written[0], args[1], node)
            self._same[node] = written[0]
            return
        result = self._emit(node, target, args, {**kwargs, **extra})
        values = self._results(node, result, written, target)
        for old, value in zip(written, values, strict=True):
            self._rebase(old, value, node)
        if len(written) == 1:
            self._same[node] = written[0]

    def _results(
        self, node: fx.Node, result: fx.Node, written: list[fx.Node], target: Any
    ) -> list[fx.Node]:
        schema = target._schema.returns
        first = result.meta.get("val")
        if len(written) == 1 and len(schema) == 1 and "[]" not in str(schema[0].type):
            value = self._matched(node, result, written[0])
            return [value]
        values: list[fx.Node] = []
        for at, old in enumerate(written):
            item = self._new.call_function(operator.getitem, (result, at))
            item.meta = {k: node.meta[k] for k in _KEEP if k in node.meta}
            item.meta["val"] = old.meta["val"]
            values.append(item)
        result.meta["val"] = tuple(old.meta["val"] for old in written) if first is None else first
        return values

    def _matched(self, node: fx.Node, result: fx.Node, old: fx.Node) -> fx.Node:
        """The result with the dtype and shape of what it replaces, as in-place forms keep them."""
        val, want = _run_fake(result), old.meta["val"]
        result.meta["val"] = val
        if val.dtype != want.dtype:
            result = self._emit(node, aten._to_copy.default, (result,), {"dtype": want.dtype})
            result.meta["val"] = torch.empty_like(want)
        if val.shape != want.shape:
            result = self._emit(node, aten.expand.default, (result, list(want.shape)), {})
            result = self._emit(node, aten.clone.default, (result,), {})
            result.meta["val"] = torch.empty_like(want)
        return result

    def _rebase(self, old: fx.Node, value: fx.Node, like: fx.Node) -> None:
        """``old`` is now ``value``: undo views up to its storage's root."""
        storage = self._storage_of(old)
        if storage is None:
            return
        chain = [(old, value)]
        node = old
        while (source := storage.aliases[node].source) is not None:
            base = self._read(source)
            value = self._undo(node, base, value, like)
            node = source
            chain.append((node, value))
        storage.version += 1
        for each, current in chain:
            storage.aliases[each].current = current
            storage.aliases[each].version = storage.version

    def _undo(self, view: fx.Node, base: fx.Node, value: fx.Node, like: fx.Node) -> fx.Node:
        """The base whose ``view`` is ``value`` and whose other elements are ``base``'s."""
        want = base.meta["val"]
        target, args, kwargs = _inverse(view, want)
        if target is None:
            return value
        operands = (base, value, *args) if target in _SCATTERS else (value, *args)
        node = self._emit(like, target, operands, kwargs)
        node.meta["val"] = want
        return node


_SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
)
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


def _inverse(view: fx.Node, base: torch.Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """How to undo ``view``: (operation or None, arguments after the operands, options)."""
    target: Any = view.target
    args: Any = view.args
    if target in _SAME:
        return None, (), {}
    if target in _RESHAPES:
        return aten.view.default, (list(base.shape),), {}
    if target is aten.t.default:
        return aten.t.default, (), {}
    if target is aten.transpose.int:
        return aten.transpose.int, tuple(args[1:]), {}
    if target is aten.permute.default:
        order = [d % base.dim() for d in args[1]]
        return aten.permute.default, ([order.index(d) for d in range(len(order))],), {}
    if target is aten.slice.Tensor:
        return aten.slice_scatter.default, tuple(args[1:]), dict(view.kwargs)
    if target is aten.select.int:
        return aten.select_scatter.default, tuple(args[1:]), {}
    if target is aten.diagonal.default:
        return aten.diagonal_scatter.default, tuple(args[1:]), dict(view.kwargs)
    val = view.meta["val"]
    return (
        aten.as_strided_scatter.default,
        (list(val.shape), list(val.stride()), val.storage_offset()),
        {},
    )


def _written_args(node: fx.Node) -> list[fx.Node]:
    """The operands that the operation writes to, in schema order."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    schema: Any = node.target._schema
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(argument.name, node.args[at] if at < len(node.args) else None)
        values = value if isinstance(value, list | tuple) else [value]
        written += [each for each in values if isinstance(each, fx.Node)]
    return written


def _item(node: fx.Node) -> tuple[fx.Node, int]:
    """What ``getitem`` takes, and from what."""
    args: Any = node.args
    return args[0], args[1]


def _same_type(old: fx.Node, new: fx.Node) -> bool:
    """May ``new`` stand wherever ``old`` stood?"""
    a, b = old.meta["val"], new.meta["val"]
    same = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return same and a.device == b.device


def _run_fake(node: fx.Node) -> Any:
    """The type of a node, by running its operation on the types of its operands."""
    args: Any = map_arg(node.args, lambda each: each.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda each: each.meta["val"])
    target: Any = node.target
    return target(*args, **kwargs)


_FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "aten::bernoulli_.float": (aten.bernoulli.p, {}),
    "aten::normal_": (aten.normal_functional.default, {}),
    "aten::zero_": (aten.zeros_like.default, {}),
    "aten::pow_.Scalar": (aten.pow.Tensor_Scalar, {}),
    "aten::pow_.Tensor": (aten.pow.Tensor_Tensor, {}),
}


def functional_form(target: Any) -> tuple[Any, dict[str, Any]] | None:
    """``aten.add_.Tensor`` -> ``aten.add.Tensor``; ``None`` where there is no such form."""
    schema = target._schema
    known = f"{schema.name}.{schema.overload_name}".rstrip(".")
    if known in _FORMS:
        return _FORMS[known]
    name = schema.name.split("::")[1]
    if not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = schema.overload_name or "default"
    if packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload), {}
