"""The update of each parameter among the nodes of a step, by what it writes and what enters it.

::

    g = all_reduce(mm)                                     ahead of the update
    m' = lerp(m, g, rate);  p' = addcdiv(p, m', d, size)   the block of p: writes p and m, g enters
    size = neg(div(lr, c))                                 shared with the other blocks

Updates are traced parameter by parameter. The nodes before an update (communication, clipping) read
no parameter, state or scalar after the backward pass; the update itself starts after them. Blocks
are found by the roles of inputs and outputs and by the phases of nodes, never by names or classes
of optimizers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from torch import fx

from treadle.graph.analysis.alias import Aliases, analyse
from treadle.graph.analysis.dataflow import ancestors, operands, readers
from treadle.graph.core.node_info import info
from treadle.graph.core.operators import may_recompute
from treadle.graph.core.signature import Role, StepGraph

_MIXES = frozenset({Role.PARAMETER, Role.STATE, Role.SCALAR})


@final
@dataclass(frozen=True, slots=True)
class UpdateBlock:
    """What makes the new value of one parameter and of its state.

    ``name``: the parameter's. ``parameter``, ``states``, ``scalars``: indices of inputs. It
    writes its states and computes with its scalars. ``gradients``: the values that enter: one,
    unless it reads something else that is computed from gradients. ``nodes``: the nodes that only
    its write-backs need, in order. ``shared``: nodes computed from scalars alone that it reads;
    others may read them too. ``writes``: indices of outputs.
    """

    name: str
    parameter: int
    states: tuple[int, ...]
    scalars: tuple[int, ...]
    gradients: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]
    writes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Coupling:
    """The update of ``parameter`` depends on a gradient of ``other``'s; ``node`` is the first after
    the backward pass to read both."""

    parameter: str
    other: str
    node: fx.Node


@final
@dataclass(frozen=True, slots=True)
class UpdateBlocks:
    """All updates of a step, in the order of its parameters, and which of them are coupled.
    ``ahead``: what is computed after the backward pass of gradients alone."""

    blocks: tuple[UpdateBlock, ...]
    couplings: tuple[Coupling, ...]
    ahead: frozenset[fx.Node]

    @property
    def by_name(self) -> Mapping[str, UpdateBlock]:
        """The block of each parameter, by the user's name of it."""
        return {block.name: block for block in self.blocks}


def update_blocks(step: StepGraph) -> UpdateBlocks:
    """The updates of ``step``; none for one that only accumulates or evaluates."""
    analysis = _Analysis(step)
    blocks = tuple(analysis.blocks())
    return UpdateBlocks(blocks, tuple(analysis.couplings(blocks)), analysis.ahead())


class _Analysis:
    """What the blocks of one step are found by."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._aliases: Aliases = analyse(step)
        self._position = {node: at for at, node in enumerate(step.graph.nodes)}
        self._inputs = {node: at for at, node in enumerate(step.placeholders)}
        self._roles = [input_.role for input_ in step.signature.inputs]
        self._written = {
            output.writes: (at, node)
            for at, (node, output) in enumerate(step.outputs())
            if output.writes is not None and node is not None
        }
        self._mixed: set[fx.Node] = set()
        self._of_scalars = made_of_scalars(step)
        for node in step.graph.nodes:
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        if not is_late(node):
            return
        sources = operands(node)
        if any(
            operand in self._mixed or self._input_of(operand, _MIXES) is not None
            for operand in sources
        ):
            self._mixed.add(node)

    def _input_of(self, node: fx.Node, roles: Iterable[Role]) -> int | None:
        """The index of the input of one of these roles that ``node`` is, or is a view of."""
        base = self._aliases.base(node) if not is_late(node) else None
        at = None if base is None else self._inputs.get(base)
        return at if at is not None and self._roles[at] in roles else None

    def ahead(self) -> frozenset[fx.Node]:
        """What comes after the backward pass and reads no parameter, state or scalar there."""
        return frozenset(filter(is_late, self._position)) - self._mixed - self._of_scalars

    def blocks(self) -> Iterable[UpdateBlock]:
        """In the order of the parameters."""
        cones = {
            at: ancestors([value], is_late)
            for at, (_, value) in self._written.items()
            if self._roles[at] in (Role.PARAMETER, Role.STATE) and is_late(value)
        }
        owners = self._owners(cones)
        for at in sorted(cones):
            if self._roles[at] is Role.PARAMETER:
                states = tuple(sorted(s for s, owner in owners.items() if owner == at))
                cone = {node for state in (at, *states) for node in cones[state]}
                yield self._block(at, states, cone)

    def _owners(self, cones: Mapping[int, Mapping[fx.Node, None]]) -> dict[int, int]:
        """The parameter that each state belongs to: the parameter with the smallest cone that reads
        the state, that the state reads, or that is computed from the same gradients."""
        parameters = [at for at in cones if self._roles[at] is Role.PARAMETER]
        parameters.sort(key=lambda at: len(cones[at]))
        reads = {at: self._inputs_in(cone) for at, cone in cones.items()}
        raw = {at: frozenset(self._raw(cone)) for at, cone in cones.items()}
        owners: dict[int, int] = {}
        for state in cones:
            if self._roles[state] is not Role.STATE:
                continue
            reading = [at for at in parameters if state in reads[at]]
            made_of = [at for at in parameters if at in reads[state]]
            alike = [at for at in parameters if raw[at] == raw[state]]
            chosen = reading or made_of or alike
            if chosen:
                owners[state] = chosen[0]
        return owners

    def _inputs_in(self, nodes: Iterable[fx.Node]) -> set[int]:
        inputs = {self._input_of(node, _MIXES) for node in nodes}
        return {at for at in inputs if at is not None}

    def _raw(self, cone: Iterable[fx.Node]) -> list[fx.Node]:
        """Where values of the backward pass enter: its nodes, and gradients that were there."""
        return [
            node
            for node in cone
            if (node.op == "call_function" and info(node).phase == "backward")
            or self._input_of(node, {Role.GRADIENT}) is not None
        ]

    def _block(self, at: int, states: tuple[int, ...], cone: set[fx.Node]) -> UpdateBlock:
        writes = tuple(self._written[state][0] for state in (at, *states))
        values = {self._written[state][1] for state in (at, *states)}
        own = self._own(cone, values, set(writes))
        mine = {at, *states}
        gradients = self._entering(own, mine)
        while len(gradients) > 1 and self._serves(gradients[-1], own):
            own.add(gradients[-1])
            gradients = self._entering(own, mine)
        entering = {
            node: None for own_node in own for node in operands(own_node) if node not in own
        }
        shared = [node for node in entering if node in self._of_scalars and node.op != "get_attr"]
        scalars = self._inputs_in(ancestors(shared)) | self._inputs_in(
            node for node in entering if self._input_of(node, {Role.SCALAR}) is not None
        )
        return UpdateBlock(
            self._step.signature.inputs[at].name,
            at,
            states,
            tuple(sorted(scalars)),
            gradients,
            self._sorted(own),
            self._sorted(node for node in shared if node.op == "call_function"),
            writes,
        )

    def _entering(self, own: set[fx.Node], mine: set[int]) -> tuple[fx.Node, ...]:
        """What the update is made of besides its own inputs and scalars, in order."""
        entering = {node for own_node in own for node in operands(own_node) if node not in own}
        return self._sorted(
            node
            for node in entering
            if node not in self._of_scalars and self._input_of(node, _MIXES) not in mine
        )

    def _serves(self, node: fx.Node, own: set[fx.Node]) -> bool:
        """Whether nothing but ``own`` reads what is computed after the backward pass: of a gradient
        that enters as itself and as its magnitude the magnitude is a part of the update."""
        return is_late(node) and all(reader in own for reader in readers(node))

    def _own(self, cone: set[fx.Node], values: set[fx.Node], writes: set[int]) -> set[fx.Node]:
        """The nodes of the update that lead to these write-backs and nowhere else."""
        returned = self._step.returned
        elsewhere = {
            node for at, node in enumerate(returned) if node is not None and at not in writes
        }
        own: set[fx.Node] = set()
        for node in sorted(cone, key=self._position.__getitem__, reverse=True):
            if node not in self._mixed or (node in elsewhere and node not in values):
                continue
            others = (reader for reader in readers(node) if reader.op != "output")
            if node in values or all(other in own for other in others):
                own.add(node)
        return own

    def _sorted(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=self._position.__getitem__))

    def couplings(self, blocks: Iterable[UpdateBlock]) -> Iterable[Coupling]:
        """Updates that read a gradient that another update reads as well, besides their own. Equal
        gradients that were merged are one and the same, and couple nothing."""
        blocks = tuple(blocks)
        raw = {block.name: self._raw(ancestors(block.gradients, is_late)) for block in blocks}
        users: dict[fx.Node, list[str]] = {}
        for name, nodes in raw.items():
            for node in nodes:
                users.setdefault(node, []).append(name)
        for block in blocks:
            others = [name for node in raw[block.name] for name in users[node]]
            other = next((name for name in others if name != block.name), None)
            if len(raw[block.name]) > 1 and other is not None:
                yield Coupling(block.name, other, self._meeting(block))

    def _meeting(self, block: UpdateBlock) -> fx.Node:
        """The first node that reads several gradients."""
        cone = self._sorted(ancestors(block.gradients, is_late))
        late = [node for node in cone if is_late(node)]
        return next(
            (node for node in late if len(self._raw(ancestors([node], is_late))) > 1),
            block.nodes[0],
        )


def made_of_scalars(step: StepGraph) -> set[fx.Node]:
    """What is computed of hyper-parameters and constants alone, these among it."""
    nodes = {node for node, step_input in step.inputs() if step_input.role is Role.SCALAR}
    for node in step.graph.nodes:
        computed = node.op == "call_function" and may_recompute(node)
        if node.op == "get_attr" or (computed and nodes.issuperset(node.all_input_nodes)):
            nodes.add(node)
    return nodes


def is_late(node: fx.Node) -> bool:
    """Whether it comes after the backward pass."""
    return node.op == "call_function" and info(node).phase == "optimizer"
