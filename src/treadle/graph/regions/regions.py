"""Parts of a graph for one compiler: as large as possible, and no path leaves a region and returns
to it.

::

    before:  a = exp(x); b = mine(a); c = neg(a); d = add(b, c)       mine: PyTorch's kernel
    after:   native {a, c} -> eager {b} -> native {d}

Regions consist of nodes of one compiler. The dependency graph of regions has no cycle, so each
region can run as a whole. Joining any two regions of a compiler would create a cycle: that is the
meaning of "as large as possible". If only the order of calls determines what comes first (random
numbers, custom operations), it counts as a path.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import fx

from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.core.node_info import copy_notes, info
from treadle.graph.core.operators import is_in_order, is_item
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.verify import require_unpacked
from treadle.graph.text.printing import show
from treadle.util.errors import VerifyError, counted

NATIVE = "native"
"""The compiler of a region that becomes generated kernels and library calls."""
EAGER = "eager"
"""The compiler of a region that runs as PyTorch's kernels, one by one."""


@final
@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that one compiler handles, in the order of the graph; ``number`` counts regions in an
    order in which they can run. ``reasons``: why nodes cannot be lowered, by name. ``handle``: what
    ``Regions.show`` returned for its text; it is shown in profiles. ``inside``: the node of the
    loop that runs it in each iteration; it then belongs to that loop's own graph."""

    number: int
    compiler: str
    nodes: tuple[fx.Node, ...]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    handle: str = ""
    inside: str = ""

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The inputs, in the order of first use: results of other regions, inputs of the step, and
        constants of the graph."""
        own = set(self.nodes)
        operands = (
            operand for node in self.nodes for operand in node.all_input_nodes if operand not in own
        )
        return tuple(dict.fromkeys(operands))

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The values that anything outside reads."""
        own = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in own for user in node.users))

    @property
    def operations(self) -> int:
        """How many of its nodes compute: no views, no items."""
        return sum(map(computes, self.nodes))

    def step(self, outputs: Sequence[fx.Node] | None = None) -> StepGraph:
        """The region as a separate graph that returns ``outputs``: by default all values that are
        read outside.

        Constants become inputs as well. The inputs and nodes keep all facts about the values that
        they stand for.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copy_notes(copies[node], node)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        results = self.outputs if outputs is None else outputs
        graph.output(tuple(copies[node] for node in results))
        signature = Signature(
            tuple(Input(Role.BATCH, node.name) for node in self.inputs),
            tuple(Output(node.name) for node in results),
        )
        return StepGraph(graph, signature)

    @property
    def text(self) -> str:
        """The separate graph as text, with a heading."""
        head = f"# region {self.number}: {self.compiler}, {counted(self.operations, 'operation')}"
        head += f", in each round of {self.inside}" if self.inside else ""
        reasons = [f"# {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([head, *reasons, show(self.step())])


def computes(node: fx.Node) -> bool:
    """Whether the node makes memory of its own: it is neither an item nor a view."""
    if node.op != "call_function" or is_item(node):
        return False
    return not isinstance(node.target, OpOverload) or facts_of(node.target).allocates


def regions_of(
    graph: fx.Graph,
    reasons: Mapping[fx.Node, str],
    compilers: Mapping[fx.Node, str] | None = None,
) -> tuple[Region, ...]:
    """The regions of all operations of ``graph``; ``reasons``: why a node cannot be lowered, for
    those of which that is so; ``compilers``: of the nodes that another compiler takes, whose
    regions have one phase each. ``VerifyError`` where a container is used as a whole."""
    units = _units(graph)
    numbers = {node: at for at, unit in enumerate(units) for node in unit}
    operands = [sorted(_operands(unit, at, numbers)) for at, unit in enumerate(units)]
    for before, after in itertools.pairwise(
        at for at, unit in enumerate(units) if any(map(is_in_order, unit))
    ):
        operands[after].append(before)
    taken = [_compiler(unit, reasons, compilers or {}) for unit in units]
    phases = [
        info(unit[0]).phase if _is_other(unit_kind) else ""
        for unit, unit_kind in zip(units, taken, strict=True)
    ]
    kinds = [f"{unit_kind} {phase}" for unit_kind, phase in zip(taken, phases, strict=True)]
    places = {node: at for at, node in enumerate(graph.nodes)}
    regions: list[Region] = []
    for number, group in enumerate(grow(kinds, operands)):
        nodes = sorted((node for at in group for node in units[at]), key=places.__getitem__)
        why = {node.name: reasons[node] for node in nodes if node in reasons}
        regions.append(Region(number, taken[group[0]], tuple(nodes), why))
    return tuple(regions)


def _compiler(
    unit: Sequence[fx.Node], reasons: Mapping[fx.Node, str], compilers: Mapping[fx.Node, str]
) -> str:
    other = next((compilers[node] for node in unit if node in compilers), "")
    return other or (EAGER if any(node in reasons for node in unit) else NATIVE)


def _is_other(compiler: str) -> bool:
    return compiler not in (NATIVE, EAGER)


def _units(graph: fx.Graph) -> list[list[fx.Node]]:
    """Nodes that stand together: an operation with several results, and the nodes that pick them.
    So what crosses a border is never a container."""
    owner: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_item(node):
            source = node.args[0]
            assert isinstance(source, fx.Node), node
            if source in owner:
                owner[node] = owner[source]
                owner[node].append(node)
                continue
        require_unpacked(node)
        owner[node] = [node]
    return [unit for node, unit in owner.items() if unit[0] is node]


def _operands(unit: Sequence[fx.Node], at: int, numbers: Mapping[fx.Node, int]) -> set[int]:
    known = {
        numbers[operand] for node in unit for operand in node.all_input_nodes if operand in numbers
    }
    return known - {at}


def grow(kinds: Sequence[str], operands: Sequence[Sequence[int]]) -> list[list[int]]:
    """Groups of numbers of one kind, in an order in which they can run.

    ``operands[n]``: what ``n`` depends on, all smaller. Groups are convex, what they depend on has
    no circle, and no two of one kind can be joined without one.
    """
    groups = _merged(_by_level(kinds, operands), kinds, operands)
    return _ordered(groups, operands)


def _by_level(kinds: Sequence[str], operands: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of one kind before which the kind changes equally often, at most: a path between two
    of them has no other kind on it, since the level never falls, and rises at each change."""
    levels: list[int] = []
    groups: dict[tuple[int, str], list[int]] = {}
    for at, kind in enumerate(kinds):
        before = (levels[operand] + (kinds[operand] != kind) for operand in operands[at])
        levels.append(max(before, default=0))
        groups.setdefault((levels[at], kind), []).append(at)
    return list(groups.values())


def _merged(
    groups: list[list[int]], kinds: Sequence[str], operands: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Join groups of one kind until any two that are left have a path through a third."""
    while True:
        after = _after(groups, operands)
        pair = next((pair for pair in _pairs(groups, kinds) if _may_join(*pair, after)), None)
        if pair is None:
            return groups
        first, second = pair
        joined = sorted((*groups[first], *groups[second]))
        groups = [group for at, group in enumerate(groups) if at not in pair]
        groups.insert(first, joined)


def _pairs(groups: Sequence[Sequence[int]], kinds: Sequence[str]) -> Iterator[tuple[int, int]]:
    for pair in itertools.combinations(range(len(groups)), 2):
        if kinds[groups[pair[0]][0]] == kinds[groups[pair[1]][0]]:
            yield pair


@dataclass(frozen=True, slots=True)
class _After:
    """The groups that depend on each group, as bits: directly, and by any path."""

    direct: list[int]
    any_path: list[int]


def _after(groups: Sequence[Sequence[int]], operands: Sequence[Sequence[int]]) -> _After:
    direct = [0] * len(groups)
    for before, group in enumerate(_dependencies(groups, operands)):
        for index in group:
            direct[index] |= 1 << before
    after = list(direct)
    for at in reversed(_order(_dependencies(groups, operands))):
        for other in _bits(direct[at]):
            after[at] |= after[other]
    return _After(direct, after)


def _may_join(first: int, second: int, after: _After) -> bool:
    """Whether no path leads from one to the other through a third."""
    return not any(
        after.any_path[third] >> end & 1
        for begin, end in ((first, second), (second, first))
        for third in _bits(after.direct[begin] & ~(1 << end))
    )


def _bits(word: int) -> Iterator[int]:
    while word:
        low = word & -word
        yield low.bit_length() - 1
        word ^= low


def _dependencies(
    groups: Sequence[Sequence[int]], operands: Sequence[Sequence[int]]
) -> list[set[int]]:
    """The groups that each group depends on."""
    owner = {node: at for at, group in enumerate(groups) for node in group}
    return [
        {owner[operand] for number in group for operand in operands[number]} - {at}
        for at, group in enumerate(groups)
    ]


def _order(needs: Sequence[Iterable[int]]) -> list[int]:
    """An order in which each group comes after those that it needs; ties by the smallest number."""
    left = dict(enumerate(map(set, needs)))
    order: list[int] = []
    while left:
        ready = [at for at, missing in left.items() if not missing]
        if not ready:
            raise VerifyError(f"regions depend on each other in a circle: {sorted(left)}")
        order += ready
        for at in ready:
            del left[at]
        for missing in left.values():
            missing.difference_update(ready)
    return order


def _ordered(groups: list[list[int]], operands: Sequence[Sequence[int]]) -> list[list[int]]:
    groups = sorted(groups)
    return [groups[at] for at in _order(_dependencies(groups, operands))]


def refused(
    regions: Sequence[Region], smallest: int, accepts: Callable[[Region], bool] | None
) -> list[Region]:
    """The native regions that are not worth a compile: of fewer than ``smallest`` operations that
    compute, or not accepted."""
    native = [region for region in regions if region.compiler == NATIVE and region.operations]
    return [
        region
        for region in native
        if region.operations < smallest or (accepts is not None and not accepts(region))
    ]
