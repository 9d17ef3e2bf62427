"""The check that a program for many shapes is valid: lowered from other samples it is the same.

A size that loses its formula on the way, in a call that takes plain numbers, would make a program
that is valid for only one size. Two samples of every dim are lowered; they must agree.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from treadle.algebra.dims import Dim, Sizes
from treadle.algebra.extents import size_of
from treadle.algebra.guards import Guard, GuardSet
from treadle.graph.analysis.dynamic import dims_of_graph, resampled, symbols_of_graph
from treadle.graph.core.signature import StepGraph
from treadle.loop.printing import show_program
from treadle.loop.program import Program
from treadle.util.errors import LoweringError


def require_unspecialized(
    step: StepGraph, program: Program, make: Callable[[StepGraph], Program]
) -> None:
    """``LoweringError`` TR-306 if ``make``, which gave ``program``, gives another one for the step
    with other samples. Nothing to do where all shapes are known."""
    symbols = symbols_of_graph(step.graph)
    if symbols is None:
        return
    dims = dims_of_graph(step.graph)
    others = {dim.name: size_of(dim) for dim in _others(dims, symbols.guards)}
    graph = resampled(step.graph, symbols, others)
    again = make(StepGraph(graph, step.signature, list(step.history)))
    for first, second in zip(
        show_program(program).splitlines(), show_program(again).splitlines(), strict=False
    ):
        if first != second:
            raise LoweringError(
                f"a size becomes a plain number: {first.strip()!r} for one sample, "
                f"{second.strip()!r} for another",
                code="TR-306",
            )


def _others(dims: Iterable[Dim], guards: GuardSet) -> Iterator[Dim]:
    """Other samples, with which the guards hold where there are such. As terms are in the order of
    their samples, dims are in the same order by these."""
    known = sorted(dims)
    roots = sorted({root for dim in known for root in dim.roots})
    asked = {guard: {dim.name: dim for dim in guard.formula.roots} for guard in guards.guards}
    sizes = {dim.name: dim.sample for named in asked.values() for dim in named.values()}
    sizes |= {dim.name: dim.sample for dim in roots}
    for dim in roots:
        mine = [guard for guard, named in asked.items() if dim.name in named]
        near = [n for d in range(1, _FAR) for n in (dim.sample + d, dim.sample - d)]
        inside = [n for n in near if dim.low <= n <= dim.high] or [dim.sample]
        fitting = [n for n in inside if _hold(mine, {**sizes, dim.name: n})] or inside
        ordered = (n for n in fitting if _is_in_order(dim, n, roots, sizes))
        sizes[dim.name] = next(ordered, fitting[0])
    for dim in known:
        sample = dim.at(sizes)
        if sample == dim.sample and dim.of is not None:  # another, though no size gives it
            near = [n for n in (sample + 1, sample - 1) if dim.low <= n <= dim.high]
            mine = [guard for guard in asked if dim in guard.formula.dims]
            fitting = (n for n in near if _hold(mine, {**sizes, dim.name: n}))
            sample = next(fitting, sample)
        yield replace(dim, sample=sample)


def _is_in_order(dim: Dim, size: int, others: Iterable[Dim], sizes: Sizes) -> bool:
    """Whether ``size`` is below or above the sizes of others as its sample is below or above
    theirs."""
    return all(
        (size > sizes[other.name]) - (size < sizes[other.name])
        == (dim.sample > other.sample) - (dim.sample < other.sample)
        for other in others
        if other != dim
    )


def _hold(guards: Iterable[Guard], sizes: Sizes) -> bool:
    return all(guard.holds(sizes) for guard in guards)


_FAR = 64
