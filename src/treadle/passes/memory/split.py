"""A planned joint graph split in two: the results and saved values of the forward, and the inputs
of the backward.

::

    joint:     p, x, dy  ->  y, dp      planned: some forward nodes stand again in the backward
    forward:   p, x      ->  y, kept...
    backward:  kept..., dy  ->  dp

A value is kept if the backward reads it and the forward computes it, or if it is an input that the
backward reads. For an operation with several results, the results are kept, never the operation;
views are recreated from their bases, which costs nothing.

This is not a pass: it makes two graphs with other inputs. ``joint = backward after forward``.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from treadle.graph.analysis.alias import storages
from treadle.graph.core.node_info import copy_notes, info, set_value, value_of, with_info
from treadle.graph.core.operators import has_effect
from treadle.graph.core.values import compute
from treadle.util.errors import PlanError
from treadle.util.reach import reached

Result = fx.Node | None


@dataclass(frozen=True, slots=True)
class Halves:
    """Two graphs. ``kept``: the joint graph's nodes that the forward returns after its results and
    the backward takes before its tangents."""

    forward: fx.Graph
    backward: fx.Graph
    kept: tuple[fx.Node, ...]


def split(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
    results: int,
    saved: Sequence[fx.Node] = (),
) -> Halves:
    """Cut ``graph``, whose first ``results`` outputs are the forward's.

    ``inputs`` and ``tangents`` are its placeholders by their role. ``PlanError`` TR-210 names the
    first output that cannot be computed from what its half is given. ``saved``: what the forward
    computes for the backward alone.
    """
    (output,) = graph.find_nodes(op="output")
    returned: Sequence[Result] = output.args[0]  # type: ignore[assignment]
    late = _after(graph, tangents)
    effects = [node for node in graph.nodes if node.op == "call_function" and has_effect(node)]
    second = [n for n in effects if n in late or info(n).phase == "backward"]
    first = [n for n in effects if n not in second]
    ahead = _needed([*filter(None, returned[:results]), *first, *saved])
    late |= {n for n in graph.nodes if info(n).recomputed}
    late |= _needed([*filter(None, returned[results:]), *second]) - ahead - set(inputs)
    late -= {n for n in late if n.target is operator.getitem and n.args[0] in ahead}
    kept = _kept(graph, late, [*returned[results:]], set(tangents))
    forward = extract(graph, inputs, [*returned[:results], *kept], first)
    backward = extract(graph, [*kept, *tangents], returned[results:], second)
    return Halves(forward, backward, tuple(kept))


def copy_overwritten(
    graph: fx.Graph, written: Sequence[fx.Node], tangents: Sequence[fx.Node]
) -> list[fx.Node]:
    """Copies of inputs that are written after the forward, for a backward that reads what they
    were: a batch norm that is computed again takes the running statistics of before.

    ::

        before:  y = norm(x, mean); ...; y' = norm(x, mean); dx = f(y', dy)     | mean is written
        after:   m = clone(mean); y = norm(x, mean); ...; y' = norm(x, m); dx = f(y', dy)
    """
    late = set(tangents)
    for node in graph.nodes:
        again = info(node).recomputed or info(node).phase == "backward"
        if node.op != "output" and (again or not late.isdisjoint(node.all_input_nodes)):
            late.add(node)
    copies: list[fx.Node] = []
    for place in written:
        readers = [user for user in place.users if user in late]
        if readers:
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                copy = graph.call_function(torch.ops.aten.clone.default, (place,))
            copy_notes(copy, place)
            with_info(copy, phase="forward")
            set_value(copy, compute(copy))
            for reader in readers:
                reader.replace_input_with(place, copy)
            copies.append(copy)
    return copies


def reordered(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
    results: int,
    order: Sequence[fx.Node],
    sizes: Sequence[fx.Node],
) -> Halves:
    """The halves with sizes after the tensors that are kept, and before them in the backward."""
    (output,) = graph.find_nodes(op="output")
    returned: Sequence[Result] = output.args[0]  # type: ignore[assignment]
    tensors = [node for node in order if node not in sizes]
    return Halves(
        extract(graph, inputs, [*returned[:results], *order]),
        extract(graph, [*sizes, *tensors, *tangents], returned[results:]),
        tuple(order),
    )


def _needed(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes and everything that they are computed from."""
    return {*reached(nodes, lambda node: node.all_input_nodes)}


def _after(graph: fx.Graph, tangents: Collection[fx.Node]) -> set[fx.Node]:
    """Everything that depends on a tangent."""
    later: set[fx.Node] = set(tangents)
    for node in graph.nodes:
        if node.op != "output" and not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    return later


def _kept(
    graph: fx.Graph, late: set[fx.Node], returned: Sequence[Result], tangents: set[fx.Node]
) -> list[fx.Node]:
    """What the backward reads of the forward, views followed to what they show; in order."""
    wanted = [node for node in returned if node is not None and node not in late]
    wanted += [operand for node in late for operand in node.all_input_nodes if operand not in late]
    kept: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node in kept or node in tangents or node in late:
            continue
        base = _shown(node)
        if base is None:
            kept.add(node)
        else:  # a view: taken again in the backward
            late.add(node)
            wanted.append(base)
    return [node for node in graph.nodes if node in kept]


def _shown(node: fx.Node) -> fx.Node | None:
    """The operand that ``node`` is a view of."""
    if node.op != "call_function" or node.target is operator.getitem or not node.args:
        return None
    held = storages(value_of(node))
    operands = node.all_input_nodes
    if len(operands) == 1 and held and held <= storages(value_of(operands[0])):
        return operands[0]
    return None


def extract(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Result],
    effects: Sequence[fx.Node] = (),
) -> fx.Graph:
    """The part of ``graph`` between ``inputs``, any of its nodes, and ``outputs`` and ``effects``.

    Each input becomes a placeholder; dead code is left out; metadata stays. ``PlanError`` TR-210
    if an output depends on an input of the graph that is not among ``inputs``.
    """
    extracted = fx.Graph(graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = extracted.placeholder(node.name)
        copy_notes(copies[node], node)
    aims = [*filter(None, outputs), *effects]
    wanted = reached(aims, lambda node: () if node in copies else node.all_input_nodes)
    for node in graph.nodes:
        if node in copies or node not in wanted or node.op == "output":
            continue
        if node.op == "placeholder":
            continue
        if all(operand in copies for operand in node.all_input_nodes):
            copies[node] = extracted.node_copy(node, copies.__getitem__)
    for at, node in enumerate(outputs):
        if node is not None and node not in copies:
            raise PlanError(
                f"output {at} ({node.name}) depends on an input that its half does not receive",
                code="TR-210",
                remedy="this is a bug in treadle: report it with the model",
            )
    extracted.output(tuple(None if node is None else copies[node] for node in outputs))
    return extracted
