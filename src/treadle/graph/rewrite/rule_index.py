"""Which rules can end at a node, found by the operations around it instead of one by one.

Rules are indexed by the operation that they end in, then by those of its operands, and so on: a
decision tree, which needs only a few lookups per node, for any number of rules. The tree returns
candidates; the matcher decides.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, final

from torch import fx

from treadle.graph.core.operators import arguments
from treadle.graph.rewrite.filled import FILLED
from treadle.graph.rewrite.pattern import (
    Constant,
    ListPattern,
    Pattern,
    PatternCall,
    Roots,
    inner_of,
)

Path: TypeAlias = tuple[str | int, ...]
"""From a node to one that it reads: names of arguments, and places in lists."""
Entry = TypeVar("Entry")

_PLAIN = "plain"
"""What stands where a node reads no value of the graph, among operations."""


@final
@dataclass(frozen=True, slots=True)
class _Leaf(Generic[Entry]):
    entries: Sequence[tuple[int, Entry]]


@final
@dataclass(frozen=True, slots=True)
class _Test(Generic[Entry]):
    """What stands at ``path``? ``others``: the entries that do not ask."""

    path: Path
    branches: Mapping[object, "_Tree[Entry]"]
    others: "_Tree[Entry]"


_Tree: TypeAlias = _Leaf[Entry] | _Test[Entry]


@final
@dataclass(frozen=True, slots=True)
class _Requirement(Generic[Entry]):
    """An entry in its order, and what it wants at the paths it names."""

    order: int
    entry: Entry
    wanted: Mapping[Path, tuple[object, ...]]


class RuleIndex(Generic[Entry]):
    """Entries by what their patterns, one or several each, need around the node where they end."""

    def __init__(self, entries: Sequence[tuple[Entry, Sequence[Roots]]]) -> None:
        by_root: defaultdict[object, list[_Requirement[Entry]]] = defaultdict(list)
        for order, (entry, patterns) in enumerate(entries):
            for call in [call for roots in patterns for call in roots.calls]:
                for target in call.arguments:
                    wanted = {} if call.exchanged else dict(_wanted(call, target, ()))
                    by_root[target].append(_Requirement(order, entry, wanted))
        self._trees: dict[object, _Tree[Entry]] = {
            target: _tree(asked, frozenset()) for target, asked in by_root.items()
        }

    def at(self, node: fx.Node) -> list[Entry]:
        """The entries that may end at ``node``, in their order."""
        tree = self._trees.get(node.target)
        if tree is None:
            return []
        if isinstance(tree, _Leaf) and len(tree.entries) == 1:
            return [tree.entries[0][1]]
        found = dict(_answers(tree, node, {}))
        return [found[order] for order in sorted(found)]


def _wanted(
    call: PatternCall, target: object, above: Path
) -> Iterator[tuple[Path, tuple[object, ...]]]:
    """The operations below a call of ``target``. Below one of several nothing is asked, as their
    arguments have other names."""
    for name, pattern in call.arguments[target].items():
        yield from _wanted_at(pattern, (*above, name))


def _wanted_at(pattern: Pattern, path: Path) -> Iterator[tuple[Path, tuple[object, ...]]]:
    match inner_of(pattern):
        case PatternCall(arguments) as call:
            targets = tuple(arguments)
            yield path, targets
            if len(targets) == 1 and call.exchanged is None:
                yield from _wanted(call, targets[0], path)
        case Constant(number=number):
            yield path, (_PLAIN, *FILLED) if number else (_PLAIN,)
        case ListPattern(items):
            for at, each in enumerate(items):
                yield from _wanted_at(each, (*path, at))
        case _:
            pass


def _tree(asked: Sequence[_Requirement[Entry]], answered: frozenset[Path]) -> _Tree[Entry]:
    """The question that most entries ask first, and trees for its answers."""
    counts = Counter(path for each in asked for path in each.wanted if path not in answered)
    if not counts:
        return _Leaf([(each.order, each.entry) for each in asked])
    path = min(counts, key=lambda each: (-counts[each], len(each), repr(each)))
    groups: defaultdict[object, list[_Requirement[Entry]]] = defaultdict(list)
    others: list[_Requirement[Entry]] = []
    for each in asked:
        for target in each.wanted.get(path, ()):
            groups[target].append(each)
        if path not in each.wanted:
            others.append(each)
    answered |= {path}
    branches = {target: _tree(group, answered) for target, group in groups.items()}
    return _Test(path, branches, _tree(others, answered))


def _answers(
    tree: _Tree[Entry], node: fx.Node, known: dict[fx.Node, dict[str, object]]
) -> Iterator[tuple[int, Entry]]:
    while isinstance(tree, _Test):
        value = _value_at(node, tree.path, known)
        branch = tree.branches.get(value.target if isinstance(value, fx.Node) else _PLAIN)
        if branch is not None:
            yield from _answers(branch, node, known)
        tree = tree.others
    yield from tree.entries


def _value_at(node: fx.Node, path: Path, known: dict[fx.Node, dict[str, object]]) -> object:
    value: Any = node
    for step in path:
        if isinstance(step, str) and isinstance(value, fx.Node) and value.op == "call_function":
            if value not in known:
                known[value] = arguments(value)
            value = known[value].get(step)
        elif isinstance(step, int) and isinstance(value, list | tuple) and step < len(value):
            value = value[step]
        else:
            return None
    return value
