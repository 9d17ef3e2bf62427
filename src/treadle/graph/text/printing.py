"""Steps as text: one line per value, named after its operation, fit to compare in a test.

::

    w: f32[8, 2]  # parameter lin.weight
    x: f32[4, 8]  # batch
    mm: f32[4, 2] = mm(x, w)
    return [mm]
    w <- mul

``parse`` (``graph/text/parsing.py``) reads it, unless it contains a graph (``while_loop``), which
is shown between braces. ``exact=True`` adds everything that is needed to recreate the step::

    x: f32[4, 8] strides [1, 4] on cuda:0  # batch
    mm: f32[4, 2] = mm(x, w)  # forward, module lin, at net.py:7: return x @ w
    sum: f64[] = sum(mm, dtype=torch.float64)  # forward, module lin, at net.py:8: y.sum()
    return [mm]  # ['loss']
    w <- mul  # lin.weight
"""

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from treadle.algebra.extents import Size
from treadle.graph.analysis.dynamic import is_sized, layout_of
from treadle.graph.core.node_info import has_value, info, known_value, value_of
from treadle.graph.core.operators import is_item, operation_name
from treadle.graph.core.signature import Input, StepGraph
from treadle.graph.core.types import short_dtype, show_type, tensors_in
from treadle.graph.text.exact import constant_text, name_text, note_text, operation_text, value_text
from treadle.graph.text.exact import type_text as exact_type
from treadle.graph.text.size_text import dim_lines
from treadle.util.nested import leaves

Names = Mapping[fx.Node, str]


def show(step: StepGraph, *, exact: bool = False) -> str:
    """The whole step. ``exact`` adds phase, source line and module to each line, and all else that
    makes a step: ``parse(show(step, exact=True))`` computes the same."""
    if exact:
        return _show_exact(step)
    names = _name_values(step.graph)
    lines = [_input_line(node, role, names) for node, role in step.inputs()]
    lines += [
        _line(node, names) for node in step.graph.nodes if node.op not in ("placeholder", "output")
    ]
    results = [_text(node, names) for node, output in step.outputs() if output.writes is None]
    lines.append(f"return [{', '.join(results)}]")
    placeholders = step.placeholders
    for node, output in step.outputs():
        if output.writes is not None:
            lines.append(f"{names[placeholders[output.writes]]} <- {_text(node, names)}")
    return "\n".join(lines)


def _show_exact(step: StepGraph) -> str:
    dims = dim_lines(_sizes_in(step.graph))
    names = _name_values(step.graph, taken=[line.split()[1] for line in dims])
    lines = dims + [
        f"{names[node]}: {exact_type(value_of(node))}  # {_role_text(role)}"
        + (f" {name_text(role.name)}" if role.name != names[node] else "")
        for node, role in step.inputs()
    ]
    lines += [
        f"{names[node]}: {exact_type(value_of(node))} = {_exact_call(node, names)}"
        f"  # {note_text(info(node))}"
        for node in step.graph.nodes
        if node.op not in ("placeholder", "output")
    ]
    return "\n".join([*lines, *_exact_outputs(step, names)])


def _exact_call(node: fx.Node, names: Names) -> str:
    if node.op == "get_attr":
        return f"constant {constant_text(node.graph.owning_module, str(node.target))}"
    if is_item(node) and isinstance(node.args[0], fx.Node) and type(node.args[1]) is int:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    operands = [value_text(arg, names) for arg in node.args]
    options = [f"{key}={value_text(value, names)}" for key, value in node.kwargs.items()]
    return f"{operation_text(node.target)}({', '.join(operands + options)})"


def _exact_outputs(step: StepGraph, names: Names) -> list[str]:
    """In the signature's order: results that follow each other on one line, with their names."""
    lines: list[str] = []
    placeholders = step.placeholders
    results: list[tuple[str, str]] = []

    def flush() -> None:
        if results:
            values, called = zip(*results, strict=True)
            lines.append(f"return [{', '.join(values)}]  # [{', '.join(called)}]")
            results.clear()

    for node, output in step.outputs():
        text = value_text(node, names)
        if output.writes is None:
            results.append((text, repr(output.name)))
        else:
            flush()
            lines.append(f"{names[placeholders[output.writes]]} <- {text}")
            lines[-1] += f"  # {name_text(output.name)}"
    flush()
    return lines or ["return []"]


def show_around(graph: fx.Graph, fault: fx.Node, lines: int = 3) -> str:
    """``fault`` and the lines near it, marked, for messages about a broken graph."""
    names = _name_values(graph)
    nodes = list(graph.nodes)
    at = nodes.index(fault)
    near = nodes[max(0, at - lines) : at + lines + 1]
    return "\n".join(("> " if node is fault else "  ") + _line(node, names) for node in near)


def _sizes_in(graph: fx.Graph) -> Iterator[int]:
    """Those that each call decides, in types and arguments."""
    for node in graph.nodes:
        for tensor in tensors_in(known_value(node)):
            if is_sized(tensor):
                yield from itertools.chain(*layout_of(tensor))
        for argument in (*node.args, *node.kwargs.values()):
            if type(argument) is not fx.Node:  # most are
                yield from (leaf for leaf in leaves(argument) if isinstance(leaf, Size))


def _name_values(graph: fx.Graph, taken: Sequence[str] = ()) -> Names:
    seen: Counter[str] = Counter(taken)
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
    return f"{_typed(node, names)}  # {_role_text(role)}{user_name}"


def _role_text(step_input: Input) -> str:
    words = ["uneven"] * step_input.uneven + ["sharded"] * step_input.sharded
    return " ".join([*words, str(step_input.role)])


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


def _text(arg: object, names: Names) -> str:
    match arg:
        case fx.Node():
            return names.get(arg, f"<foreign {arg}>")
        case tuple() | list():
            return f"[{', '.join(_text(item, names) for item in arg)}]"
        case torch.dtype():
            return short_dtype(arg)
        case str() if "\n" in arg:  # a graph within the graph
            return "{\n" + textwrap.indent(arg, "    ") + "\n}"
        case _:
            return str(arg)
