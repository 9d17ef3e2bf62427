"""The smallest part of a step that still has a property, such as failing.

::

    before:  h = relu(x); c = cumsum(h, 0); y = exp(c); return [y]     fails: has a cumsum
    after:   c = cumsum(x, 0); return [c]

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)
over operations and then over results: halves first, then smaller parts, until no single one can be
left out. The output of a removed operation becomes an input, and its operands become results, so
any set of operations is a step. Inputs are then merged if possible, and sizes reduced.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, fx

from treadle.graph.analysis.alias import storages
from treadle.graph.analysis.resize import resized, sizes_of
from treadle.graph.core.node_info import set_value, value_of
from treadle.graph.core.operators import may_drop, operation_name
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.core.types import type_of
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.util.errors import ParseError, VerifyError, counted

Heard = Callable[[str, StepGraph, int], None]
"""Hears of each smaller step: the move that found it, the step, and how many were tried."""
T = TypeVar("T")
Fails = Callable[[StepGraph], bool]
Unit = tuple[fx.Node, ...]
"""An operation and the picks of its results, which are kept or left out together."""


@dataclass(frozen=True, slots=True, order=True)
class Count:
    """How large a step is; it sorts by the first number that differs."""

    operations: int
    inputs: int
    results: int
    elements: int  # of the inputs

    def __str__(self) -> str:
        parts = ((self.operations, "operation"), (self.inputs, "input"), (self.results, "result"))
        return ", ".join(counted(count, noun) for count, noun in parts)


def count_of(step: StepGraph) -> Count:
    """How large a step is: what a reduction makes smaller."""
    nodes = [node for node in step.graph.nodes if node.op not in ("placeholder", "output")]
    elements = sum(type_of(node).numel for node in step.placeholders)
    return Count(len(nodes), len(step.placeholders), len(step.returned), elements)


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of ``items`` of which ``fails`` is true, and of none with one item less.

    ``fails(list(items))`` is taken to be true. Parts are tried first, then what they leave.
    """
    kept = list(items)
    if not kept or fails([]):
        return []
    parts = 2
    while len(kept) > 1:
        bounds = [len(kept) * i // parts for i in range(parts + 1)]
        chunks = [range(*bound_pair) for bound_pair in itertools.pairwise(bounds)]
        first_failing = _first_failing(kept, chunks, fails)
        if first_failing is not None:
            kept, parts = first_failing[0], max(2, min(first_failing[1], parts - 1))
        elif parts >= len(kept):
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept


def _first_failing(
    kept: list[T], chunks: Sequence[range], fails: Callable[[list[T]], bool]
) -> tuple[list[T], int] | None:
    """The first part that fails, else the first rest; and in how many parts to go on."""
    for chunk in chunks:
        part = [kept[i] for i in chunk]
        if fails(part):
            return part, 2
    for chunk in chunks if len(chunks) > 2 else ():  # of two parts each is the other's rest
        rest = [item for i, item in enumerate(kept) if i not in chunk]
        if fails(rest):
            return rest, len(chunks)
    return None


def _nothing(move: str, step: StepGraph, tries: int) -> None:
    """For a caller to whom it does not matter how far it is."""


def reduced(step: StepGraph, fails: Fails, heard: Heard = _nothing) -> StepGraph:
    """A smallest step that verifies and that ``fails``; ``step`` itself if it does not.

    Equal steps and equal answers give equal results. ``heard`` is called with each smaller step
    that fails. ``ParseError`` where ``step`` cannot be written down exactly.
    """
    search = _Search(parse(show(step, exact=True)), fails, heard)
    if not search.accepts(search.step):
        return step
    while True:
        before = search.text
        for search.move, change in _MOVES:
            change(search)
        if search.text == before:
            return search.step


class _Search:
    """The smallest step so far, and what is known of others."""

    def __init__(self, step: StepGraph, fails: Fails, heard: Heard) -> None:
        self.step = step
        self.move = ""
        self.text = show(step, exact=True)
        self.tries = 0
        self._fails = fails
        self._heard = heard
        self._smallest = count_of(step)
        self._known: dict[str, bool] = {}
        self._sound = _is_sound(step)

    def accepts(self, candidate: StepGraph | None) -> bool:
        """Whether a step, as it is read again from its text, still fails."""
        if candidate is None:
            return False
        text = show(candidate, exact=True)
        if text not in self._known:
            self.tries += 1
            accepted = self._read(text)
            self._known[text] = accepted is not None and self._fails(accepted)
            if accepted is not None and self._known[text]:
                self._tell(accepted)
        return self._known[text]

    def _tell(self, step: StepGraph) -> None:
        count = count_of(step)
        if count < self._smallest:
            self._smallest = count
            self._heard(self.move, step, self.tries)

    def _read(self, text: str) -> StepGraph | None:
        """The step of a text; ``None`` for one that would not be right by itself."""
        try:
            parsed = parse(text)
        except (ParseError, VerifyError):
            return None
        return parsed if _is_sound(parsed) or not self._sound else None

    def take(self, candidate: StepGraph | None) -> bool:
        """Go on with ``candidate``, if it fails."""
        if candidate is None or not self.accepts(candidate):
            return False
        self.step = parse(show(candidate, exact=True))
        self.text = show(self.step, exact=True)
        return True


def _is_sound(step: StepGraph) -> bool:
    """Whether no result shows the bytes of an input that is written: when it is, is not said."""
    written = {
        storage
        for _, output in step.outputs()
        if output.writes is not None
        for storage in storages(value_of(step.placeholders[output.writes]))
    }
    results = (
        node for node, output in step.outputs() if output.writes is None and node is not None
    )
    return all(written.isdisjoint(storages(value_of(node))) for node in results)


# operations


def _fewer_operations(search: _Search) -> None:
    units = _units(search.step)
    kept = ddmin(units, lambda some: search.accepts(_with_operations(search.step, some)))
    if len(kept) < len(units):
        search.take(_with_operations(search.step, kept))


def _units(step: StepGraph) -> list[Unit]:
    units: dict[fx.Node, list[fx.Node]] = {}
    for node in step.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        maker = node.args[0] if node.target is operator.getitem else None
        if isinstance(maker, fx.Node) and maker in units:
            units[maker].append(node)
        else:
            units[node] = [node]
    return [tuple(unit) for unit in units.values()]


def _with_operations(step: StepGraph, units: Sequence[Unit]) -> StepGraph | None:
    """Only these operations; what they read of others become inputs, what others read of them
    results. ``None`` where that is not a tensor, or nothing is left to look at."""
    kept = {node for unit in units for node in unit}
    needed = _needed(step, kept)
    if not all(isinstance(value_of(node), Tensor) for node in needed):
        return None
    graph = fx.Graph(owning_module=step.graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [role for _, role in step.inputs()]  # all of them first, so that writes stay right
    for node in step.placeholders:
        copies[node] = graph.node_copy(node)
    for node in needed:
        base = operation_name(node.target).partition(".")[0]
        copies[node] = graph.placeholder(f"from_{base}")
        set_value(copies[node], value_of(node))
        inputs.append(Input(Role.BATCH, copies[node].name))
    for node in step.graph.nodes:
        if node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    returned, outputs = _outputs_of(step, kept, copies)
    if not returned:
        return None
    graph.output(tuple(returned))
    candidate = StepGraph(graph, Signature(tuple(inputs), tuple(outputs)))
    return _without_unread(candidate)


def _needed(step: StepGraph, kept: set[fx.Node]) -> list[fx.Node]:
    """The values that ``kept`` read and that nothing gives any more."""
    read = {operand for node in kept for operand in node.all_input_nodes}
    return [n for n in step.graph.nodes if n in read and n not in kept and n.op != "placeholder"]


def _outputs_of(
    step: StepGraph, kept: set[fx.Node], copies: dict[fx.Node, fx.Node]
) -> tuple[list[fx.Node], list[Output]]:
    """What is returned of ``kept`` alone: the old results, and what was read by others."""
    returned: list[fx.Node] = []
    outputs: list[Output] = []
    for node, output in step.outputs():
        if node is not None and node in kept:
            returned.append(copies[node])
            outputs.append(output)
    for node in step.graph.nodes:
        read = any(user not in kept and user.op != "output" for user in node.users)
        if node not in kept or not read or not isinstance(value_of(node), Tensor):
            continue
        if copies[node] not in returned:
            returned.append(copies[node])
            outputs.append(Output(f"result {len(outputs)}"))
    return returned, outputs


def _without_unread(step: StepGraph) -> StepGraph:
    """Without operations and inputs that nothing reads; changes ``step``."""
    for node in reversed(step.graph.nodes):
        if not node.users and may_drop(node, keep_random=False):
            step.graph.erase_node(node)
    written = {output.writes for output in step.signature.outputs}
    inputs = list(enumerate(step.inputs()))
    kept = [(at, role) for at, (node, role) in inputs if node.users or at in written]
    places = {at: new for new, (at, _) in enumerate(kept)}
    for at, (node, _) in inputs:
        if at not in places:
            step.graph.erase_node(node)
    outputs = [
        output if output.writes is None else replace(output, writes=places[output.writes])
        for output in step.signature.outputs
    ]
    step.signature = Signature(tuple(role for _, role in kept), tuple(outputs))
    return step


# results


def _fewer_results(search: _Search) -> None:
    places = list(range(len(search.step.returned)))
    kept = ddmin(places, lambda some: search.accepts(_with_results(search.step, some)))
    if len(kept) < len(places):
        search.take(_with_results(search.step, kept))


def _with_results(step: StepGraph, places: Sequence[int]) -> StepGraph | None:
    """Only these results and writes."""
    if not places:
        return None
    smaller = step.copy()
    output = smaller.graph.output_node()
    output.args = (tuple(smaller.returned[at] for at in places),)
    outputs = tuple(step.signature.outputs[at] for at in places)
    smaller.signature = replace(step.signature, outputs=outputs)
    return _without_unread(smaller)


def _fewer_writes(search: _Search) -> None:
    """What is written is returned instead: all of it, or one by one."""
    writes = [
        at for at, output in enumerate(search.step.signature.outputs) if output.writes is not None
    ]
    if writes and search.take(_returning(search.step, writes)):
        return
    for at in writes:
        search.take(_returning(search.step, [at]))


def _returning(step: StepGraph, places: Sequence[int]) -> StepGraph:
    candidate = step.copy()
    outputs = [
        replace(output, writes=None) if at in places else output
        for at, output in enumerate(step.signature.outputs)
    ]
    candidate.signature = replace(step.signature, outputs=tuple(outputs))
    return candidate


# inputs


def _simpler_operands(search: _Search) -> None:
    """An operation reads the first input of a type instead of another one, wherever it can."""
    at = 0
    while at < len(search.step.placeholders):
        if not search.take(_merged(search.step, at)):
            at += 1


def _merged(step: StepGraph, at: int) -> StepGraph | None:
    merged = step.copy()
    node = merged.placeholders[at]
    first = next(
        (
            placeholder
            for placeholder in merged.placeholders
            if type_of(placeholder) == type_of(node)
        ),
        node,
    )
    if first is node:
        return None
    node.replace_all_uses_with(first)
    return _without_unread(merged)


def _smaller_sizes(search: _Search) -> None:
    """Each size, the largest first, is 1, 2, or half of it, wherever it is written."""
    for size in sizes_of(search.step):
        smaller = sorted(
            {smaller_size for smaller_size in (1, 2, size // 2) if smaller_size < size}
        )
        any(search.take(resized(search.step, size, smaller_size)) for smaller_size in smaller)


_MOVES: tuple[tuple[str, Callable[[_Search], None]], ...] = (
    ("operations", _fewer_operations),  # first: halves of a step are the cheapest to leave out
    ("results", _fewer_results),
    ("writes", _fewer_writes),
    ("inputs", _simpler_operands),
    ("sizes", _smaller_sizes),  # last: of what is left
)
