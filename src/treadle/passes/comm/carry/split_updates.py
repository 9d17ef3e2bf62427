"""Optimizer updates in two groups that share only inputs."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from treadle.graph.analysis.dataflow import ancestors, is_list_call
from treadle.graph.analysis.update_blocks import (
    UpdateBlock,
    is_late,
    made_of_scalars,
    update_blocks,
)
from treadle.graph.core.arguments import Argument, map_nodes
from treadle.graph.core.node_info import copy_notes, set_value
from treadle.graph.core.operators import may_recompute, operation_name
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.values import compute
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.util.errors import VerifyError, require


@dataclass(frozen=True)
class SplitUpdates(GraphPass):
    """The updates of ``parameters``, and those of all others, without a node between them.

    before:  r = neg(lr); s = _foreach_mul([g, h], r); p' = add(p, s[0]); q' = add(q, s[1])
    after:   r = neg(lr); s = _foreach_mul([g], r); p' = add(p, s[0]);
             r2 = neg(lr); s2 = _foreach_mul([h], r2); q' = add(q, s2[0])        parameters = q

    What is made of scalars is made for each of the two; an operation on lists becomes two with a
    part of each list, and each reader of an element reads it from the one that has it. Numbers are
    those of before, bit for bit. Memory: what is made of scalars, once more.
    Who runs it has made sure that each of ``parameters`` has an update, that others have one too,
    and that no operation reads gradients of both (``VerifyError``).
    """

    contract = Contract()

    parameters: frozenset[str]

    def run(self, step: StepGraph) -> int:
        chosen, rest = _parted(step, self.parameters)
        lists = _shared_lists(step, chosen, rest)
        for call, at in lists.items():
            _split_list(call, at)
        scalars = _shared_scalars(step, self.parameters)
        _made_twice(step, scalars, _nodes_of(step, self.parameters))
        return len(lists) + len(scalars)


def _calls_of_scalars(block: UpdateBlock, scalars: set[fx.Node]) -> set[fx.Node]:
    calls = ancestors(block.shared, scalars.__contains__)
    return {node for node in calls if node.op == "call_function"}


def _parted(
    step: StepGraph, parameters: Iterable[str]
) -> tuple[tuple[UpdateBlock, ...], tuple[UpdateBlock, ...]]:
    """The blocks of ``parameters``, and the others."""
    blocks, wanted = update_blocks(step), set(parameters)
    known = blocks.by_name
    missing = sorted(wanted - known.keys())
    require(not missing, VerifyError, f"the step has no update of {missing} to split off")
    chosen = tuple(block for block in blocks.blocks if block.name in wanted)
    rest = tuple(block for block in blocks.blocks if block.name not in wanted)
    require(bool(chosen), VerifyError, "an empty set of parameters is to be split off")
    require(bool(rest), VerifyError, "all parameters are to be split off: none would be left")
    for coupling in blocks.couplings:
        apart = (coupling.parameter in wanted) != (coupling.other in wanted)
        what = f"{coupling.node} ({operation_name(coupling.node.target)})"
        pair = f"{coupling.parameter} and {coupling.other}"
        require(not apart, VerifyError, f"{what} reads the gradients of both {pair}")
    return chosen, rest


def _shared_lists(
    step: StepGraph, chosen: Iterable[UpdateBlock], rest: Iterable[UpdateBlock]
) -> dict[fx.Node, list[int]]:
    """In order the operations on lists that both sides read, with the elements of the chosen one.
    Elements that neither reads stay with the rest."""
    shared_lists: dict[fx.Node, list[int]] = {}
    mine, others = _elements(chosen), _elements(rest)
    for node in step.graph.nodes:
        if node in mine and node in others:
            shared_lists[node] = sorted(mine[node])
    return shared_lists


def _elements(blocks: Iterable[UpdateBlock]) -> dict[fx.Node, set[int]]:
    """By operation on lists the elements that the updates are made of."""
    elements: dict[fx.Node, set[int]] = {}
    roots = [node for block in blocks for node in (*block.nodes, *block.gradients)]
    for node in ancestors(roots, is_late):
        for operand in node.all_input_nodes:
            if is_list_call(operand) and is_late(operand):
                elements.setdefault(operand, set()).add(_number(node))
    return elements


def _split_list(call: fx.Node, chosen: list[int]) -> None:
    """The elements ``chosen`` by an operation of their own behind ``call``, which keeps the rest.
    An element's number becomes its place among those of its side."""
    items: list[tuple[fx.Node, int]] = [(user, _number(user)) for user in call.users]
    count = next(
        len(argument)
        for argument in (*call.args, *call.kwargs.values())
        if isinstance(argument, list | tuple)
    )
    kept = [at for at in range(count) if at not in chosen]
    with call.graph.inserting_after(call):
        other = call.graph.call_function(call.target, *_some(call, chosen))  # type: ignore[arg-type]
    copy_notes(other, call)
    call.args, call.kwargs = _some(call, kept)
    for node in (call, other):
        set_value(node, compute(node))
    for item, at in items:
        side, places = (other, chosen) if at in chosen else (call, kept)
        item.args = (side, places.index(at))
        if side is other:
            _behind(item, other)


def _number(item: fx.Node) -> int:
    at = item.args[1]
    assert isinstance(at, int), item
    return at


def _behind(item: fx.Node, call: fx.Node) -> None:
    """Items stand where they stood; one directly behind the first call must not precede its own."""
    if item < call:
        call.append(item)


def _some(call: fx.Node, places: list[int]) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """The arguments of ``call`` with these elements of its lists."""

    def part(value: Argument) -> Argument:
        return [value[at] for at in places] if isinstance(value, list | tuple) else value

    return tuple(map(part, call.args)), {
        key: part(argument) for key, argument in call.kwargs.items()
    }


def _nodes_of(step: StepGraph, parameters: Iterable[str]) -> set[fx.Node]:
    """All that the updates of these parameters consist of after the backward pass."""
    wanted = set(parameters)
    blocks = [block for block in update_blocks(step).blocks if block.name in wanted]
    roots = [node for block in blocks for node in (*block.nodes, *block.gradients)]
    nodes = {node for node in ancestors(roots, is_late) if is_late(node)}
    return nodes | {
        operand for node in nodes for operand in node.all_input_nodes if is_list_call(operand)
    }


def _shared_scalars(step: StepGraph, parameters: Iterable[str]) -> list[fx.Node]:
    """In order the nodes made of scalars alone that both sides read."""
    scalars, wanted = made_of_scalars(step), set(parameters)
    sides: tuple[set[fx.Node], set[fx.Node]] = set(), set()
    for block in update_blocks(step).blocks:
        sides[block.name in wanted].update(_calls_of_scalars(block, scalars))
    both = sides[0] & sides[1]
    return [node for node in step.graph.nodes if node in both and may_recompute(node)]


def _made_twice(step: StepGraph, nodes: list[fx.Node], readers: set[fx.Node]) -> None:
    """A copy of each node for those of its readers that are ``readers``, or copies."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        with step.graph.inserting_after(node):
            copies[node] = step.graph.node_copy(node, lambda operand: copies.get(operand, operand))

    def other(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    for node in nodes:
        for user in [reader for reader in node.users if reader in readers and reader not in copies]:
            user.args, user.kwargs = map_nodes(other, user.args), map_nodes(other, user.kwargs)
