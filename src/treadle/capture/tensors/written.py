"""Custom operators that write to their arguments, as AOTAutograd hands them over.

::

    before:  r = auto_functionalized_v2(bump, x=..., _all_bases=[b]); y, b2 = r[0], r[1]
    after:   v = view(b); r = bump'(v, ...); y = r[0]; b2 = b with r[1] at the place of v
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from treadle.compat.operators.schemas import OpOverload, schema_of, written_arguments
from treadle.compat.tracing import Args
from treadle.graph.core.node_info import copy_notes, info, set_value
from treadle.graph.core.values import compute
from treadle.runtime.execute.functional import functional_of
from treadle.util.errors import LoweringError

aten = torch.ops.aten


_SCATTERS: dict[object, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


def expand_written(graph: fx.Graph) -> None:
    """Replace each such node by the operator that returns what the user's operator writes."""
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            _expand(graph, node)


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    keywords: dict[str, Any] = dict(node.kwargs)
    op: Any = node.args[0]
    bases = list(keywords.pop("_all_bases"))
    form = functional_of(op)
    if form is None:
        raise LoweringError(
            f"{op} writes to a list, or returns an argument",
            code="TR-301",
            where=info(node).where,
            remedy="let the operator write only to its tensor arguments, and return new tensors",
        )

    def emit(
        target: Callable[..., object], args: tuple[Argument, ...], kwargs: Mapping[str, Argument]
    ) -> fx.Node:
        with graph.inserting_before(node):
            call = graph.call_function(target, args, dict(kwargs))
        copy_notes(call, node)
        set_value(call, compute(call))
        return call

    places: list[tuple[int, Args]] = []
    names = [name for _, name in written_arguments(op)]
    for name in names:
        at, place = _place(keywords, name)
        keywords[name] = emit(place[0], (bases[at], *place[1:]), {}) if place else bases[at]
        places.append((at, place))
    own = len(schema_of(op).returns)
    result = emit(form, (), keywords)
    several = own + len(names) > 1
    parts = [result]
    if several:
        parts = [emit(operator.getitem, (result, k), {}) for k in range(own + len(names))]
    for (at, place), value in zip(places, parts[own:], strict=True):
        if place:
            value = emit(_SCATTERS[place[0]], (bases[at], value, *place[1:]), {})
        bases[at] = value
    results = [*(parts[:own] if own else [None]), *bases]
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        written_result = results[index]
        if written_result is not None:
            user.replace_all_uses_with(written_result)
        graph.erase_node(user)
    graph.erase_node(node)


def _place(kwargs: dict[str, Any], name: str) -> tuple[int, Args]:
    """Which base a written argument is a view of, and how; nothing for the base itself."""
    at = kwargs.pop(f"_{name}_base_index")
    keys = ("slice_dim", "slice_start", "slice_end", "size", "stride", "storage_offset", "alias")
    parts = {key: kwargs.pop(f"_{name}_{key}") for key in keys if f"_{name}_{key}" in kwargs}
    if "slice_dim" in parts:
        return at, (aten.slice.Tensor, parts["slice_dim"], parts["slice_start"], parts["slice_end"])
    if "size" in parts:
        return at, (
            aten.as_strided.default,
            parts["size"],
            parts["stride"],
            parts["storage_offset"],
        )
    return at, ()
