"""Moves of nodes into the next call, and whether they are legal.

A moved set is legal if it is closed, writes only values that persist between calls, and if the next
call reads none of these before the node in front of which the set is placed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from torch import fx

from treadle.compat.operators.operator_facts import Effect
from treadle.graph.analysis.alias import Aliases, analyse
from treadle.graph.analysis.dataflow import ancestors, list_call, operands
from treadle.graph.analysis.update_blocks import (
    UpdateBlock,
    UpdateBlocks,
    is_late,
    made_of_scalars,
    update_blocks,
)
from treadle.graph.core.collectives import collective_of, is_wait
from treadle.graph.core.dim_maps import dim_map
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import effects_of, is_item, operation_name
from treadle.graph.core.signature import Output, Role, StepGraph
from treadle.graph.rewrite.matching import NoMatch
from treadle.util.errors import TreadleError, VerifyError
from treadle.util.reach import reached

_STAYS = frozenset({Role.PARAMETER, Role.STATE, Role.BUFFER})
"""Inputs that are the same tensors at the next call."""


@final
@dataclass(frozen=True, slots=True)
class Move:
    """``nodes`` run in the next call, in front of ``before``; without one in front of the first
    node that reads what they write. ``name``: what the user calls it."""

    nodes: frozenset[fx.Node]
    before: fx.Node | None = None
    name: str = ""

    @property
    def words(self) -> str:
        """What to call it in a message."""
        return self.name or min((node.name for node in self.nodes), default="nothing")


@final
@dataclass(frozen=True, slots=True)
class MovedSet:
    """A move that was found to be legal.

    ``nodes``: in order. ``writes``: by input the value that it gets. ``before``: the output node
    for a set whose results the rest of a call does not read.
    """

    nodes: tuple[fx.Node, ...]
    writes: dict[int, fx.Node]
    before: fx.Node


def moved_sets(step: StepGraph, moves: Sequence[Move]) -> tuple[MovedSet, ...]:
    """The moves of a step. ``TreadleError`` TR-530 to TR-537, which names what is in the way."""
    check = _Check(step, moves)
    return tuple(check.legal(move) for move in moves)


def update_moves(
    step: StepGraph, parameters: Iterable[str], before: fx.Node | None = None
) -> tuple[Move, ...]:
    """The updates of ``parameters`` with the communication ahead of each: one move per group of
    updates that share any of it; with ``before`` one for all. TR-530 for a parameter without an
    update, TR-534 for one whose update depends on other gradients than its own."""
    blocks = update_blocks(step)
    names = tuple(parameters)
    chosen = [_known(blocks, parameter) for parameter in names]
    _refuse_coupled(blocks, names)
    scalars = made_of_scalars(step)
    ahead = [_ahead(block, blocks.ahead) for block in chosen]
    needed = [{*block.nodes, *more} for block, more in zip(chosen, ahead, strict=True)]
    nodes = _with_communication(step, set[fx.Node]().union(*needed), scalars)
    if before is not None:
        return (Move(frozenset(nodes), before, _joined(names)),)
    groups: list[tuple[set[fx.Node], list[str]]] = []
    for block, start in zip(chosen, needed, strict=True):
        own, mine = _connected(nodes, start), [block.name]
        for other in [group for group in groups if group[0] & own]:
            groups.remove(other)
            own, mine = own | other[0], [*other[1], *mine]
        groups.append((own, mine))
    return tuple(Move(frozenset(own), None, _joined(mine)) for own, mine in groups)


def _joined(names: Sequence[str]) -> str:
    return f"the update of {', '.join(names)}"


def _known(blocks: UpdateBlocks, name: str) -> UpdateBlock:
    block = blocks.by_name.get(name)
    if block is None:
        raise TreadleError(
            f"the step has no update of {name!r} that could be moved",
            code="TR-530",
            remedy=f"one of {', '.join(blocks.by_name) or 'none: it updates nothing'}",
        )
    return block


def _refuse_coupled(blocks: UpdateBlocks, names: Sequence[str]) -> None:
    for coupling in blocks.couplings:
        if coupling.parameter in names:
            raise TreadleError(
                f"the update of {coupling.parameter} depends on the gradient of "
                f"{coupling.other}: {_called(coupling.node)} reads both",
                code="TR-534",
                where=info(coupling.node).where,
                remedy="clip or scale each gradient separately, or carry nothing",
            )


def _ahead(block: UpdateBlock, known: frozenset[fx.Node]) -> set[fx.Node]:
    """What a gradient goes through between its backward pass and the update: all that comes after
    the pass, and within it the collective that it is the result of."""
    late = {node for node in ancestors(block.gradients, known.__contains__) if node in known}
    nodes = late | {call for node in late if (call := list_call(node)) is not None}
    for node in block.gradients:
        nodes |= _reduction_of(node)
    for node in late:
        for operand in operands(node):
            nodes |= _reduction_of(operand)
    return nodes


def _reduction_of(gradient: fx.Node) -> set[fx.Node]:
    """The nodes from the start of a collective to ``gradient``, if nothing but waiting, choosing a
    result, views and scaling is between them; else none."""
    path: list[fx.Node] = []
    node = gradient
    while node.op == "call_function" and not is_late(node):
        path.append(node)
        if collective_of(node) is not None:
            return set(path)
        call = list_call(node)
        if call is not None and collective_of(call) is not None:
            return {*path, call}
        if len(node.all_input_nodes) != 1 or not _keeps_elements(node):
            return set()
        node = node.all_input_nodes[0]
    return set()


def _keeps_elements(node: fx.Node) -> bool:
    """Whether each element of the result is made of one of the operand."""
    if is_wait(node) or is_item(node):
        return True
    try:
        known = dim_map(node)
    except NoMatch:
        return False
    dims = [*known.results, *(dims_of_one for _, dims_of_one in known.operands)]
    return len({frozenset(known.table.factors(dim)) for dim in dims}) == 1


def _with_communication(
    step: StepGraph, nodes: set[fx.Node], scalars: set[fx.Node]
) -> set[fx.Node]:
    """``nodes``, and what is computed for them alone: all after the backward pass, and within it
    from the start of a collective on. What is made of scalars alone is cheaper made again."""
    moved = set(nodes)
    for node in reversed(step.graph.nodes):
        users = list(node.users)
        serves = node.op == "call_function" and node not in scalars and users
        if serves and all(user in moved and not _starts_early(user) for user in users):
            moved.add(node)
    started: set[fx.Node] = set()
    for node in step.graph.nodes:
        if node in moved and (_starts_early(node) or not started.isdisjoint(node.all_input_nodes)):
            started.add(node)
    return {node for node in moved if node in nodes or is_late(node) or node in started}


def _connected(nodes: set[fx.Node], start: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of ``nodes`` that ``start`` is made of, and ``start``."""
    return {*reached(start, lambda node: (o for o in node.all_input_nodes if o in nodes))}


def _starts_early(node: fx.Node) -> bool:
    """Whether it starts a collective within the backward pass."""
    return collective_of(node) is not None and not is_late(node)


class _Check:
    """The conditions of a move, each with its words."""

    def __init__(self, step: StepGraph, moves: Sequence[Move]) -> None:
        self._step = step
        self._aliases: Aliases = analyse(step)
        self._position = {node: at for at, node in enumerate(step.graph.nodes)}
        self._outputs: dict[fx.Node, list[Output]] = {}
        for node, output in step.outputs():
            if node is not None:
                self._outputs.setdefault(node, []).append(output)
        self._moved: dict[fx.Node, Move] = {}
        self._coupled = {coupling.parameter: coupling for coupling in update_blocks(step).couplings}
        for move in moves:
            self._claim(move)

    def _claim(self, move: Move) -> None:
        for node in move.nodes:
            if node not in self._position or node.op != "call_function":
                _refuse("TR-530", move, f"{node} is not an operation of the step")
            if node in self._moved:
                _refuse("TR-535", move, f"{_called(node)} is in another moved set as well", node)
            self._moved[node] = move

    def legal(self, move: Move) -> MovedSet:
        """The set of one move, after every condition."""
        trimmed = {node for node in move.nodes if not self._is_item_of_others(node, move)}
        nodes = tuple(sorted(trimmed, key=self._position.__getitem__))
        for node in nodes:
            self._require_movable(node, move)
        for node in nodes:
            self._require_closed(node, move, trimmed)
        writes = self._writes(nodes, move)
        self._require_uncoupled(writes, move)
        self._require_alone(writes, move)
        read = self._readers(writes)
        before = self._before(move, trimmed, read)
        for node in read:
            if self._position[node] < self._position[before]:
                self._refuse_reader(move, node, writes, before)
        return MovedSet(nodes, writes, before)

    def _is_item_of_others(self, node: fx.Node, move: Move) -> bool:
        return is_item(node) and node.all_input_nodes[0] not in move.nodes

    def _require_movable(self, node: fx.Node, move: Move) -> None:
        effects = effects_of(node) & ~Effect.COMMUNICATES
        if effects:
            _refuse(
                "TR-536",
                move,
                f"{_called(node)} has a side effect ({effects.name or effects}), whose order "
                "would change",
                node,
                "leave that operation out of the update",
            )

    def _require_closed(self, node: fx.Node, move: Move, nodes: set[fx.Node]) -> None:
        for user in node.users:
            if user.op != "output" and user not in nodes:
                _refuse(
                    "TR-531",
                    move,
                    f"{_called(user)} reads {node.name}, which would not exist before the next "
                    "call",
                    user,
                    "move it too, or carry another parameter",
                )
        for output in self._outputs.get(node, ()):
            if output.writes is None:
                _refuse(
                    "TR-532",
                    move,
                    f"the call returns {output.name!r}, which would not exist before the next call",
                    node,
                    "return it from another function, clear gradients at the end of the step, "
                    "or carry another parameter",
                )

    def _writes(self, nodes: tuple[fx.Node, ...], move: Move) -> dict[int, fx.Node]:
        writes: dict[int, fx.Node] = {}
        for node in nodes:
            for output in self._outputs.get(node, ()):
                assert output.writes is not None, output
                input_ = self._step.signature.inputs[output.writes]
                if input_.role not in _STAYS:
                    _refuse(
                        "TR-532",
                        move,
                        f"it writes to {input_.name!r}, which may be another tensor at the next "
                        "call",
                        node,
                        "write to a buffer of the model",
                    )
                writes[output.writes] = node
        if not writes:
            _refuse("TR-530", move, "it writes to no parameter, state or buffer")
        return writes

    def _require_uncoupled(self, writes: dict[int, fx.Node], move: Move) -> None:
        for at in writes:
            coupled = self._coupled.get(self._step.signature.inputs[at].name)
            if coupled is not None:
                _refuse(
                    "TR-534",
                    move,
                    f"the update of {coupled.parameter} depends on the gradient of "
                    f"{coupled.other}: {_called(coupled.node)} reads both",
                    coupled.node,
                    "clip or scale each gradient separately, or carry nothing",
                )

    def _require_alone(self, writes: dict[int, fx.Node], move: Move) -> None:
        """No other input shows the memory that is written."""
        places = self._step.placeholders
        for at in writes:
            for other, (node, step_input) in enumerate(self._step.inputs()):
                if other != at and self._aliases.share(places[at], node):
                    raise VerifyError(
                        f"{step_input.name!r} shares memory with "
                        f"{self._step.signature.inputs[at].name!r}, which {move.words} writes to"
                    )

    def _readers(self, writes: dict[int, fx.Node]) -> list[fx.Node]:
        """The nodes that stay in the call and see what the set writes to, or a view of it. What
        other sets read is carried to them as it was in their own call."""
        places = self._step.placeholders
        bases = [places[at] for at in writes]
        seen = [
            node
            for node in self._position
            if node.op == "call_function"
            and node not in self._moved
            and any(
                self._aliases.share(base, operand)
                for base in bases
                for operand in (node, *node.all_input_nodes)
            )
        ]
        return sorted(seen, key=self._position.__getitem__)

    def _before(self, move: Move, nodes: set[fx.Node], read: Sequence[fx.Node]) -> fx.Node:
        if move.before is None:
            (output,) = self._step.graph.find_nodes(op="output")
            return read[0] if read else output
        before = move.before
        if before not in self._position or before.op != "call_function":
            _refuse(
                "TR-535",
                move,
                f"{before} is not an operation of the step, so nothing can be moved in front",
            )
        if before in nodes or before in self._moved:
            _refuse(
                "TR-535",
                move,
                f"{_called(before)} is moved itself, so nothing can be put in front of it",
                before,
                "choose an operation that stays in the call",
            )
        return before

    def _refuse_reader(
        self, move: Move, node: fx.Node, writes: dict[int, fx.Node], before: fx.Node
    ) -> NoReturn:
        places = self._step.placeholders
        input_ = next(
            self._step.signature.inputs[at]
            for at in writes
            if any(
                self._aliases.share(places[at], operand)
                for operand in (node, *node.all_input_nodes)
            )
        )
        _refuse(
            "TR-533",
            move,
            f"{_called(node)} reads {input_.name!r} before {_called(before)}, but the moved "
            "update would write it only in front of the latter",
            node,
            "choose an operation that is not later than that one",
        )


def _called(node: fx.Node) -> str:
    """``mm_2 (mm in module fc.2)``"""
    module = info(node).module
    return f"{node.name} ({operation_name(node.target)}{f' in module {module}' if module else ''})"


def _refuse(
    code: str, move: Move, why: str, node: fx.Node | None = None, remedy: str = ""
) -> NoReturn:
    raise TreadleError(
        f"{move.words} cannot run in the next call: {why}",
        code=code,
        where="" if node is None else info(node).where,
        remedy=remedy or "docs/howto/carry.md describes what can be moved",
    )
