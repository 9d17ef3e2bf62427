"""The replacement of a rule: built, compared with the matched values, and inserted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import fx

from treadle.algebra.extents import size_key
from treadle.graph.analysis.alias import leaves_step
from treadle.graph.analysis.joined_bytes import JoinedBytes, Replaced
from treadle.graph.core.arguments import Argument, map_nodes
from treadle.graph.core.node_info import value_of
from treadle.graph.core.operators import is_mutable, is_random, may_drop
from treadle.graph.core.types import TensorType, is_tensor, show_type, tensors_in, type_of_tensor
from treadle.graph.rewrite.builder import ReplacementBuilder
from treadle.graph.rewrite.matching import PatternMatch
from treadle.graph.rewrite.pattern_programs import result_of, returned_by, traced
from treadle.graph.rewrite.pattern_words import Program
from treadle.graph.rewrite.torch_programs import TorchReplacement
from treadle.util.errors import VerifyError, require
from treadle.util.refusals import NoMatch, attempt

Bindings: TypeAlias = Mapping[str, Any]


@final
@dataclass(frozen=True)
class Lowering:
    """A replacement that a function builds, instead of tracing a program:
    ``build(builder, **bindings)`` receives the values of the variables, creates operations with
    ``builder.call``, and returns one value for each value of the pattern. If it raises ``NoMatch``,
    the graph stays as it was."""

    build: Callable[..., object]


def lowering(build: Callable[..., object]) -> Lowering:
    """A replacement that ``build(builder, **bindings)`` makes, node by node."""
    return Lowering(build)


Replacement: TypeAlias = Program | Lowering | TorchReplacement


def built(
    name: str, replacement: Replacement, match: PatternMatch, joined: JoinedBytes
) -> list[Replaced]:
    """Each root of a match of the rule ``name`` with its replacement, which stands in the graph and
    which nobody reads yet. After ``NoMatch`` nothing was made."""
    builder = ReplacementBuilder(match.place, match.anchor)
    replaced = attempt(_replaced, name, replacement, match, joined, builder)
    if isinstance(replaced, NoMatch):
        builder.undo()
        raise replaced
    return replaced


def _replaced(
    name: str,
    replacement: Replacement,
    match: PatternMatch,
    joined: JoinedBytes,
    builder: ReplacementBuilder,
) -> list[Replaced]:
    results = _results(name, replacement, match, builder)
    for node in builder.made:
        plain = not is_mutable(node) and not is_random(node)
        require(plain, VerifyError, f"{name} puts {node} there, which writes or draws")
    replaced: list[Replaced] = []
    for old, new in zip(match.roots, results, strict=True):
        replaced.append((old, fitting(name, old, new, made=new in builder.made)))
    joined.require_no_new(replaced)
    return replaced


def _results(
    name: str, replacement: Replacement, match: PatternMatch, builder: ReplacementBuilder
) -> Sequence[Any]:
    if isinstance(replacement, Lowering):
        made = replacement.build(builder, **match.bindings)
    elif isinstance(replacement, TorchReplacement):
        made = _copied(name, builder, replacement.graph_for(match.bindings), match.bindings)
    else:
        result = returned_by(replacement)
        if isinstance(result, fx.Node) and str(result.target) in match.bindings:
            return (match.bindings[str(result.target)],)
        made = _copied(name, builder, traced(replacement), match.bindings)
    results: Sequence[object] = made if isinstance(made, list | tuple) else (made,)
    words = f"{name} replaces {len(match.roots)} values by {len(results)}"
    require(len(results) == len(match.roots), VerifyError, words)
    return results


def _copied(
    name: str, builder: ReplacementBuilder, program: fx.Graph, inputs: Bindings
) -> Argument:
    """The operations of a traced program; ``inputs``: what its variables stand for."""
    values: dict[fx.Node, Argument] = {}
    for each in program.nodes:
        match each.op:
            case "placeholder":
                known = str(each.target) in inputs
                words = f"{name} puts {each.target} there, which it does not find"
                require(known, VerifyError, words)
                values[each] = inputs[str(each.target)]
            case "output":
                break
            case _:
                values[each] = builder.copy(each, values.__getitem__)
    return map_nodes(values.__getitem__, result_of(program))


def fitting(name: str, old: fx.Node, new: Any, *, made: bool) -> fx.Node:
    """``new``, if all may read it instead of ``old``."""
    require(isinstance(new, fx.Node), NoMatch, f"{new} is not a tensor")
    before, after = value_of(old), value_of(new)
    same = _layouts(before) == _layouts(after)
    if not made:
        require(is_tensor(new), NoMatch, f"{new} is not a tensor")
        if not same:
            types = f"{show_type(after)} to {show_type(before)}"
            raise NoMatch(f"{old} changes {types}, or its strides or device")
    elif _kinds(before) != _kinds(after):
        words = f"{name} turned {show_type(before)} into {show_type(after)} at {old}"
        raise VerifyError(words)
    require(same or not leaves_step(old), NoMatch, f"{old} is returned with other strides")
    return new


def _layouts(value: object) -> list[TensorType]:
    return [type_of_tensor(each) for each in tensors_in(value)]


def _kinds(value: object) -> list[tuple[object, ...]]:
    return [(t.dtype, tuple(map(size_key, t.shape)), t.device) for t in _layouts(value)]


def put_in(replaced: Sequence[Replaced]) -> None:
    """All read the replacements. What was replaced goes, with the operands that only it kept;
    operations that matter even so stay."""
    for old, new in replaced:
        old.replace_all_uses_with(new)
    roots = {old for old, _ in replaced}
    worklist = sorted(roots)
    erased: set[fx.Node] = set()
    while worklist:
        node = worklist.pop()
        if node in erased or node.users or node.op != "call_function":
            continue
        if node in roots or may_drop(node):
            worklist += node.all_input_nodes
            node.graph.erase_node(node)
            erased.add(node)
