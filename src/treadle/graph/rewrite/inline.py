"""One call as a separate graph, and inlining of such a graph."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treadle.algebra.extents import Size
from treadle.compat.operators.schemas import OpOverload
from treadle.compat.tracing import traced, track_size
from treadle.graph.analysis.dynamic import sample_mode_of, sampled, symbols_of, twin_of
from treadle.graph.core.arguments import Argument, map_argument, map_nodes, without_generator
from treadle.graph.core.node_info import forget, value_of
from treadle.graph.core.values import inherit


def traced_call(
    node: fx.Node,
    function: Callable[..., object],
    table: Mapping[OpOverload, Callable[..., object]] | None = None,
) -> fx.GraphModule:
    """``function`` with the arguments of ``node``, as a graph of the node's tensor operands.
    ``table``: operations to trace as others."""
    return traced_program(function, node.args, node.kwargs, node.all_input_nodes, table)


def traced_program(
    function: Callable[..., object],
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument],
    operands: Sequence[fx.Node],
    table: Mapping[OpOverload, Callable[..., object]] | None = None,
) -> fx.GraphModule:
    """``function`` with these arguments, in which nodes stand for their values, as a graph of the
    ``operands``, the nodes among them."""
    symbols = symbols_of([value_of(operand) for operand in operands])
    numbers: list[int] = []
    map_argument(lambda leaf: numbers.append(leaf) if isinstance(leaf, Size) else None, args)

    def run(*tensors: torch.Tensor) -> object:
        values: dict[fx.Node, object] = dict(zip(operands, tensors, strict=True))

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return values[leaf]
            if symbols is not None and isinstance(leaf, Size):
                return symbols.symint(leaf)
            return without_generator(leaf)

        for size in symbols.symbols_in(numbers) if symbols is not None else ():
            track_size(size)  # which no operand may have
        given = map_argument(plain, (args, kwargs))
        return function(*given[0], **given[1])

    fakes = [value_of(operand) for operand in operands]
    if symbols is None:
        return traced(run, fakes, table)
    twins = [twin_of(each) for each in fakes]
    with symbols.replaying():
        module = traced(run, twins, table, symbolic=True)
    sampled(module.graph, sample_mode_of(fakes))
    for at, node in enumerate(module.graph.nodes):
        if node.op == "call_function":  # as if no symbol had had a node: that depends on samples
            node.name = f"{node.name.rstrip('_0123456789')}_{at}"
    return module


def put_in_place(node: fx.Node, inner: fx.Graph) -> None:
    """The operations of ``inner`` instead of ``node``; its placeholders are the node's operands."""
    values: dict[fx.Node, Any] = {}
    operands = iter(node.all_input_nodes)
    for each in inner.nodes:
        match each.op:
            case "placeholder":
                values[each] = next(operands)
            case "call_function":
                with node.graph.inserting_before(node):
                    values[each] = node.graph.node_copy(each, values.__getitem__)
                forget(values[each])
                inherit(values[each], node)
            case _:
                _read_instead(node, map_nodes(values.__getitem__, each.args[0]))


def _read_instead(node: fx.Node, result: object) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            assert item.target is operator.getitem, item
            item.replace_all_uses_with(result[item.args[1]])  # type: ignore[index]
            node.graph.erase_node(item)
    node.graph.erase_node(node)
