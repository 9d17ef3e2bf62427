"""Steps as text: one line per value, named after its operation, fit to compare in a test.

::

    w: f32[8, 2]  # parameter lin.weight
    x: f32[4, 8]  # batch
    mm: f32[4, 2] = mm(x, w)
    return [mm]
    w <- mul
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

from treadle.graph.node_info import has_value, info, value_of
from treadle.graph.operators import is_item, operation_name
from treadle.graph.signature import Input, StepGraph
from treadle.graph.types import short_dtype, show_type

Names = Mapping[fx.Node, str]


def show(step: StepGraph, *, details: bool = False) -> str:
    """The whole step. ``details`` adds phase, source line and module to each line."""
    names = _name_values(step.graph)
    lines = [_input_line(node, role, names) for node, role in step.inputs()]
    lines += [
        _line(node, names) + (_details(node) if details else "")
        for node in step.graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    results = [_text(node, names) for node, output in step.outputs() if output.writes is None]
    lines.append(f"return [{', '.join(results)}]")
    placeholders = step.placeholders
    for node, output in step.outputs():
        if output.writes is not None:
            lines.append(f"{names[placeholders[output.writes]]} <- {_text(node, names)}")
    return "\n".join(lines)


def show_around(graph: fx.Graph, fault: fx.Node, lines: int = 3) -> str:
    """``fault`` and the lines near it, marked, for messages about a broken graph."""
    names = _name_values(graph)
    nodes = list(graph.nodes)
    at = nodes.index(fault)
    near = nodes[max(0, at - lines) : at + lines + 1]
    return "\n".join(("> " if node is fault else "  ") + _line(node, names) for node in near)


def _name_values(graph: fx.Graph) -> Names:
    seen: Counter[str] = Counter()
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        base = node.name
        if node.op == "call_function":
            base = operation_name(node.target).partition(".")[0]
        names[node] = f"{base}.{seen[base]}" if seen[base] else base
        seen[base] += 1
    return names


def _input_line(node: fx.Node, role: Input, names: Names) -> str:
    user_name = f" {role.name}" if role.name != names[node] else ""
    return f"{_typed(node, names)}  # {role.role}{user_name}"


def _line(node: fx.Node, names: Names) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0], names)}"
    if node.op == "placeholder":
        return _typed(node, names)
    if node.op == "get_attr":
        return f"{_typed(node, names)} = constant {node.target}"
    if is_item(node):
        return f"{_typed(node, names)} = {_text(node.args[0], names)}[{node.args[1]}]"
    operands = [_text(arg, names) for arg in node.args]
    options = [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    inside = ", ".join(operands + options)
    return f"{_typed(node, names)} = {operation_name(node.target)}({inside})"


def _typed(node: fx.Node, names: Names) -> str:
    return f"{names[node]}: {show_type(value_of(node)) if has_value(node) else '?'}"


def _details(node: fx.Node) -> str:
    known = info(node)
    region = "" if known.region is None else str(known.region)
    text = ", ".join(filter(None, (known.phase, known.where, known.module, region)))
    return f"  # {text}" if text else ""


def _text(arg: object, names: Names) -> str:
    match arg:
        case fx.Node():
            return names.get(arg, f"<foreign {arg}>")
        case tuple() | list():
            return f"[{', '.join(_text(each, names) for each in arg)}]"
        case torch.dtype():
            return short_dtype(arg)
        case _:
            return str(arg)
