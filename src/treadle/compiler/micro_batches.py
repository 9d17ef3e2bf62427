"""Which micro-batches a step is planned in: the one place that chooses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from treadle.compiler.chunks import versions_of
from treadle.compiler.target import Target
from treadle.graph.analysis.dynamic import dims_of_graph
from treadle.graph.core.signature import StepGraph
from treadle.passes.chunks.batch_region import batch_region_of, rows_of
from treadle.passes.chunks.micro_batches import MOST_PARTS, MicroBatch, parts_of_batch
from treadle.passes.memory.choose import Version
from treadle.util.errors import LoweringError, PlanError
from treadle.util.refusals import NoMatch, attempt

_PARTS = (2, 4, 8, MOST_PARTS)
"""In how many micro-batches a budget may want the batch, from the fewest."""


def groups_of(step: StepGraph, target: Target) -> Iterator[tuple[Version, ...]]:
    """The versions of a step by the size of their micro-batches, the largest first. Each is made
    when it is asked for: a plan for one that fits needs no smaller one."""
    wanted = target.options.micro_batch
    if wanted is None:
        yield versions_of(step, target)
    elif isinstance(wanted, int):
        yield _of_rows(step, wanted, target)
    else:
        yield from _largest_first(step, target)


def _of_rows(step: StepGraph, rows: int, target: Target) -> tuple[Version, ...]:
    """Micro-batches of at most as many rows as were asked for; ``PlanError`` TR-212 if they cannot
    be."""
    _require_fixed(step)
    given = rows_of(step)
    if given is not None and given <= rows:
        return _told(versions_of(step, target), f"the whole batch: {given} of at most {rows} rows")
    region = attempt(batch_region_of, step)
    if isinstance(region, NoMatch):
        _refuse(f"the batch cannot be computed in micro-batches: {region.message}", _OTHERWISE)
    count, parts = region.grid.count, parts_of_batch(region, rows)
    if parts > MOST_PARTS:
        least = -(-count // MOST_PARTS)
        _refuse(
            f"micro_batch={rows} makes {parts} parts of {count} rows, and a step has at most "
            f"{MOST_PARTS}",
            f"give at least micro_batch={least}, or call the step with fewer rows",
        )
    return _split(step, rows, target, f"{_words(count, rows, parts)}, as asked")


def _largest_first(step: StepGraph, target: Target) -> Iterator[tuple[Version, ...]]:
    whole = versions_of(step, target)
    if target.options.budget is None:
        yield _told(whole, "the whole batch, without a budget")
        return
    _require_fixed(step)
    region = attempt(batch_region_of, step)
    if isinstance(region, NoMatch):
        yield _told(whole, f"the whole batch, which cannot be split: {region.message}")
        return
    yield _told(whole, "the whole batch, which fits the budget")
    before = region.grid.count
    for pieces in _PARTS:
        rows = -(-region.grid.count // pieces)
        if rows < before:
            words = _words(region.grid.count, rows, parts_of_batch(region, rows))
            why = f"{words}: {before} rows do not fit the budget"
            yield _split(step, rows, target, why)
            before = rows


def _words(count: int, rows: int, parts: int) -> str:
    return f"{parts} micro-batches of at most {rows} of {count} rows"


def _split(step: StepGraph, rows: int, target: Target, why: str) -> tuple[Version, ...]:
    """The step in micro-batches, with the chunks of their logits to choose from."""
    split = MicroBatch(rows, target.record.wide_products)
    return _told(versions_of(step, target, (split,)), why)


def _told(versions: tuple[Version, ...], why: str) -> tuple[Version, ...]:
    return tuple(replace(version, why=why) for version in versions)


_OTHERWISE = "leave micro_batch out, or move what needs all rows out of the step"


def _refuse(message: str, remedy: str) -> NoReturn:
    raise PlanError(message, code="TR-212", remedy=remedy)


def _require_fixed(step: StepGraph) -> None:
    """``LoweringError`` TR-212 for a step of many sizes: each size is compiled separately then."""
    if dims_of_graph(step.graph):
        raise LoweringError(
            "micro-batches need fixed sizes, and this step is for many",
            code="TR-212",
            remedy="leave shapes= out, or micro_batch",
        )
