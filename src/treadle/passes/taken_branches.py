"""Of a ``torch.cond`` run the branch that is taken, where computing both costs more.

::

    before:  a = mm(x, w);  b = mm(x, v);  y = where(taken, a, b);  ...
             g = where(taken, dy, 0);  dw = mm(x.t(), g)            -> where(taken, dw, 0)
    after:   y = branch(taken, [x, w, v], "mm(x, w)", "mm(x, v)");  ...
             branch(taken, [x, dy], "mm(x.t(), dy)", "0")

An operation is of a branch if all that read it are of it, or select it where the branch is taken.
So operations of the backward are, and those that only a branch reads the results of. What the
forward makes and the backward of the branch reads is a result as well, zeros where the branch is
not taken. Between both lie operations that every call runs: a condition has one call for each
stage, which is how often something outside comes between its operations.

Both branches stay in the graph, to be fused with their neighbours, unless half of the time that
their products and library calls are estimated to take is more than ``wait`` for each call: what it
takes until the host knows the condition and starts a program.
"""

import heapq
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, fx

from treadle.algebra.strides import is_dense
from treadle.compat.operators.operator_facts import Effect, facts_of
from treadle.graph.analysis.data_dependent import fresh
from treadle.graph.analysis.dynamic import dims_of_graph, symbols_of_graph
from treadle.graph.analysis.index_bounds import index_bounds_in
from treadle.graph.core.arguments import Argument
from treadle.graph.core.node_info import NodeInfo, belong, describe, info, known_value, tensor_of
from treadle.graph.core.operators import OpOverload, effects_of, has_effect, is_in_order
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.custom_ops.branches import branch, taken
from treadle.graph.rewrite.passes import Contract, GraphPass
from treadle.graph.text.printing import show
from treadle.passes.memory.cost import CALLS, Kind, kind_of, seconds_of
from treadle.targets.model import DeviceModel

aten = torch.ops.aten
Stage = int


@dataclass(frozen=True)
class RunTakenBranches(GraphPass):
    """Graphs for the branches of conds whose work is worth a question to the host. ``hardware``:
    what times are estimated with; ``wait``: seconds that one call costs beside its work."""

    contract: ClassVar[Contract] = Contract()

    hardware: DeviceModel = field(repr=False)
    wait: float = 1e-4

    def run(self, step: StepGraph) -> int:
        conditions = step.graph.find_nodes(op="call_function", target=taken)
        if not conditions or symbols_of_graph(step.graph) is not None or dims_of_graph(step.graph):
            return 0
        return sum(self._outlined(step, condition) for condition in conditions)

    def _outlined(self, step: StepGraph, condition: fx.Node) -> int:
        found = _Branches.of(step.graph, condition)
        if not found.selects or not self._is_worth(found):
            return 0
        calls = [_Call(step.graph, found, stage) for stage in found.stages]
        calls = [call for call in calls if call.results]  # others only show what later ones read
        if not all(call.fits for call in calls):
            return 0
        results: dict[fx.Node, fx.Node] = {}
        for call in calls:
            call.emit(results)
        for old, new in results.items():
            old.replace_all_uses_with(new)
        for node in reversed(list(step.graph.nodes)):
            if node in found.members or node in found.selects:
                step.graph.erase_node(node)
        _sort(step.graph)
        return len(calls)

    def _is_worth(self, found: "_Branches") -> bool:
        heavy = [(node, kind_of(node)) for node in found.members]
        seconds = sum(
            seconds_of(node, kind, self.hardware) for node, kind in heavy if kind in CALLS
        )
        return seconds / 2 > self.wait * len(found.stages)


@dataclass(frozen=True, slots=True)
class _Branches:
    """The operations of the branches of a condition. ``sides``: by whether they are of the branch
    that is taken; ``selects``: what chooses between both; ``stages``: members of each."""

    condition: fx.Node
    sides: Mapping[bool, AbstractSet[fx.Node]]
    selects: Mapping[fx.Node, bool]
    stages: Mapping[Stage, Sequence[fx.Node]]
    stage_of: Mapping[fx.Node, Stage]

    @staticmethod
    def of(graph: fx.Graph, condition: fx.Node) -> "_Branches":
        selects = _selects_of(condition)
        fixed = {lookup.user for lookup in index_bounds_in(graph)}
        nodes = list(graph.nodes)
        sides = {side: _exclusive(nodes, selects, side, fixed) for side in (True, False)}
        members = sides[True] | sides[False]
        used = {
            select: direct
            for select, direct in selects.items()
            if not members.isdisjoint(select.all_input_nodes)
        }
        stage_of = _stages(nodes, members | used.keys())
        stages: dict[Stage, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if node in stage_of:
                stages[stage_of[node]].append(node)
        return _Branches(condition, sides, used, stages, stage_of)

    @property
    def members(self) -> AbstractSet[fx.Node]:
        """Those of both branches."""
        return self.sides[True] | self.sides[False]

    def arm(self, select: fx.Node, side: bool) -> fx.Node:
        """What ``select`` gives if the branch of this side is taken."""
        _, yes, no = select.args
        chosen = yes if self.selects[select] == side else no
        assert isinstance(chosen, fx.Node)
        return chosen


def _selects_of(condition: fx.Node) -> dict[fx.Node, bool]:
    """What chooses by a condition between values of its own type; whether the first of the two
    stands for the condition that holds."""
    inverted = [user for user in condition.users if user.target is aten.logical_not.default]
    pairs = [(user, True) for user in condition.users]
    pairs += [(user, False) for each in inverted for user in each.users]
    return {
        user: direct
        for user, direct in pairs
        if user.target is aten.where.self and _is_plain_choice(user)
    }


def _is_plain_choice(select: fx.Node) -> bool:
    _, *arms = select.args
    value = tensor_of(select)
    return value.is_contiguous() and all(
        isinstance(arm, fx.Node)
        and tensor_of(arm).shape == value.shape
        and tensor_of(arm).dtype is value.dtype
        and tensor_of(arm).device == value.device
        for arm in arms
    )


def _exclusive(
    nodes: Sequence[fx.Node],
    selects: Mapping[fx.Node, bool],
    side: bool,
    fixed: AbstractSet[fx.Node],
) -> set[fx.Node]:
    """What is read only where the branch of this side is taken."""
    found: set[fx.Node] = set()

    def reads(user: fx.Node, node: fx.Node) -> bool:
        if user in found:
            return True
        if user not in selects:
            return False
        condition, yes, no = user.args
        wanted, other = (yes, no) if selects[user] == side else (no, yes)
        return node is wanted and node is not other and node is not condition

    for node in reversed(nodes):
        if (
            node.users
            and _is_movable(node, fixed)
            and all(reads(user, node) for user in node.users)
        ):
            found.add(node)
    return {node for node in found if node.target is not operator.getitem or node.args[0] in found}


def _is_movable(node: fx.Node, fixed: AbstractSet[fx.Node]) -> bool:
    """Whether nothing but its value is missed in calls that do not run it."""
    if node.op != "call_function" or node in fixed or info(node).eager:
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target is taken:
        return False
    effects = effects_of(node) & ~Effect.READS_OUTSIDE
    return not effects and not facts_of(node.target).refuses and known_value(node) is not None


def _stages(nodes: Sequence[fx.Node], inside: AbstractSet[fx.Node]) -> dict[fx.Node, Stage]:
    """Of each node inside how often what it needs left and came back in."""
    depth: dict[fx.Node, Stage] = {}
    for node in nodes:
        before = [
            depth[operand] + (operand in inside and node not in inside)
            for operand in node.all_input_nodes
        ]
        depth[node] = max(before, default=0)
    return {node: depth[node] for node in nodes if node in inside}


@dataclass(slots=True)
class _Call:
    """One stage of the branches of a condition as one call."""

    graph: fx.Graph
    found: _Branches
    stage: Stage
    nodes: list[fx.Node] = field(init=False)
    results: list[fx.Node] = field(init=False)
    operands: list[fx.Node] = field(init=False)
    views: list[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        found = self.found
        self.nodes = list(found.stages[self.stage])
        self.results = [node for node in self.nodes if node in found.selects or self._is_kept(node)]
        self.operands, self.views = self._read()

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether a later stage of the same branch reads it."""
        if _is_view(node):
            return False
        return any(self._is_later(user) for user in _readers(node))

    def _is_later(self, user: fx.Node) -> bool:
        return self.found.stage_of.get(user, self.stage) > self.stage

    def _read(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """What comes from outside, and views of it that are made again inside, in their order."""
        own = set(self.nodes)
        operands: dict[fx.Node, None] = {}
        views: dict[fx.Node, None] = {}

        def read(node: fx.Node) -> None:
            if node in own or node in views or node in operands:
                return
            if _is_view(node) and node.op == "call_function":
                for operand in node.all_input_nodes:
                    read(operand)
                views[node] = None
            else:
                operands[node] = None

        for node in self.nodes:
            for operand in self._arms(node):
                read(operand)
        return list(operands), list(views)

    def _arms(self, node: fx.Node) -> list[fx.Node]:
        if node in self.found.selects:
            return [self.found.arm(node, side) for side in (True, False)]
        return node.all_input_nodes

    @property
    def fits(self) -> bool:
        """Whether all that it is given and gives is dense tensors of one device."""
        place = tensor_of(self.found.condition).device
        values = [known_value(node) for node in (*self.operands, *self.results)]
        given = all(_is_fit(value, place) for value in values)
        return given and all(tensor_of(node).is_contiguous() for node in self.results)

    def emit(self, results: dict[fx.Node, fx.Node]) -> None:
        """Add the call; ``results``: gets what stands for the nodes that are read outside."""
        first = self.results[0]
        texts = [self._text(side) for side in (True, False)]
        with self.graph.inserting_before(first):
            arguments = (self.found.condition, list(self.operands), *texts)
            call = self.graph.call_function(branch, arguments)
            values = [fresh(known_value(node)) for node in self.results]
            describe(call, list(values), NodeInfo())
            belong(call, first)
            for at, (node, value) in enumerate(zip(self.results, values, strict=True)):
                item = self.graph.call_function(operator.getitem, (call, at))
                describe(item, value, NodeInfo())
                belong(item, node)
                results[node] = item

    def _text(self, side: bool) -> str:
        """The graph of one side as text; it has what the other one makes as zeros."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        names = [f"operand_{at}" for at in range(len(self.operands))]
        for node, name in zip(self.operands, names, strict=True):
            copies[node] = graph.placeholder(name)
            describe(copies[node], fresh(known_value(node)), NodeInfo())
        own = self.found.sides[side]
        for node in (*self.views, *self.nodes):
            if node in self.found.selects:
                copies[node] = copies[self.found.arm(node, side)]
            elif node in own or node not in self.found.members:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                describe(copies[node], known_value(node), NodeInfo(phase="forward"))
        returned = [copies.get(node) or _zeros(graph, tensor_of(node)) for node in self.results]
        graph.output(tuple(returned))
        _drop_unread(graph)
        inputs = tuple(Input(Role.BATCH, name) for name in names)
        outputs = tuple(Output(f"result {at}") for at in range(len(returned)))
        return show(StepGraph(graph, Signature(inputs, outputs)), exact=True)


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, through views."""
    found: list[fx.Node] = []
    for user in node.users:
        found += [user, *(_readers(user) if _is_view(user) else [])]
    return found


def _is_view(node: fx.Node) -> bool:
    return node.target is not operator.getitem and kind_of(node) is Kind.VIEW


def _is_fit(value: object, place: torch.device) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    sizes = all(type(size) is int for size in (*value.shape, *value.stride()))
    return sizes and value.device == place and is_dense(value.shape, value.stride())


def _zeros(graph: fx.Graph, like: Tensor) -> fx.Node:
    options: dict[str, Argument] = {"dtype": like.dtype, "device": like.device}
    node = graph.call_function(aten.full.default, (list(like.shape), 0), options)
    describe(node, like.new_empty(like.shape), NodeInfo(phase="forward"))
    return node


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _sort(graph: fx.Graph) -> None:
    """Operands before their readers, otherwise as it was; what keeps an order keeps it."""
    nodes = list(graph.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    waits = {node: len(node.all_input_nodes) for node in nodes}
    after: dict[fx.Node, list[fx.Node]] = {node: list(node.users) for node in nodes}
    ordered = [node for node in nodes if node.op != "call_function" or _keeps_place(node)]
    for one, other in itertools.pairwise(ordered):
        after[one].append(other)
        waits[other] += 1
    ready = [place[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    sequence: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        sequence.append(node)
        for reader in after[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, place[reader])
    assert len(sequence) == len(nodes), "a cycle"
    _put(sequence)


def _keeps_place(node: fx.Node) -> bool:
    return is_in_order(node) or has_effect(node)


def _put(sequence: Iterable[fx.Node]) -> None:
    last: fx.Node | None = None
    for node in sequence:
        if last is not None and last.next is not node:
            last.append(node)
        last = node
