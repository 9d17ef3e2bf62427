"""The part of a range of sizes for which a question has one answer.

::

    x[: int(0.2 * n)] of n in 2..64 may be empty          compiled for n in 5..64
    avg_pool2d(x, 2) of n in 2..64 gives one row or more  compiled for n in 4..64

A step is compiled for all sizes of a range at once. If one kernel cannot serve them all, the failed
question defines which part of the range belongs to the sample. What was captured for the range is
right for its part, and is not captured again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from treadle.algebra.dims import Dim, sizes_of
from treadle.algebra.extents import dim_of, dims_in, size_of
from treadle.algebra.guards import Guard
from treadle.algebra.polynomial import Undecided
from treadle.capture.captured import Captured
from treadle.capture.input_sources import Dims
from treadle.compiler.compiled import Compiled
from treadle.util.errors import LoweringError, VerifyError

_MOST = 1 << 16
"""Sizes that are tried."""
MOST_PARTS = 8
"""Questions about sizes of which each leaves a part of a range."""


def compiled_in_part(captured: Captured, make: Callable[[Captured], Compiled]) -> Compiled:
    """What ``make`` compiles of a captured step, or of the part of its sizes that one program
    serves."""
    for _ in range(MOST_PARTS):
        try:
            return make(captured)
        except (VerifyError, LoweringError) as error:
            part = _in_part(captured, error)
            if part is None:
                raise
            captured = part
    return make(captured)


def _in_part(captured: Captured, error: BaseException) -> Captured | None:
    dims = None if captured.dims is None else narrowed(captured.dims, error)
    if dims is None:
        return None
    from treadle.capture.dynamic import in_part  # late: few steps have such sizes

    return in_part(captured, dims)


def narrowed(dims: Dims, error: BaseException) -> Dims | None:
    """The same dims for fewer sizes, about which ``error`` does not come again; ``None`` where that
    is none that has to do with sizes, or where one size is left of a dim."""
    asked = next((each for each in _behind(error) if isinstance(each, Undecided)), None)
    if asked is None:
        return None
    known = {dim.name: dim for leaf in dims.values() for dim in map(dim_of, dims_in(leaf.traced))}
    roots = [known[dim.name] for dim in asked.formula.roots if dim.name in known]
    answer = Guard(asked.formula, asked.sign, True)
    answer = replace(answer, answer=answer.holds({dim.name: dim.sample for dim in roots}))
    parts = [part for dim in roots if (part := _part(dim, roots, answer)) is not None]
    if not parts:
        return None
    best = max(parts, key=lambda part: (part.high - part.low) / (known[part.name].high + 1))
    size = size_of(best)
    return {at: leaf._replace(part={**leaf.part, best.name: size}) for at, leaf in dims.items()}


def _part(dim: Dim, roots: list[Dim], answer: Guard) -> Dim | None:
    """The sizes of ``dim`` around its sample that give this answer, whatever those of the other
    roots are; ``None`` where these are all sizes, or a single one."""
    every = sizes_of(roots, _MOST)
    if every is None:
        return None
    wrong = {sizes[dim.name] for sizes in every if not answer.holds(sizes)}
    low = max((size + 1 for size in wrong if size < dim.sample), default=dim.low)
    high = min((size - 1 for size in wrong if size > dim.sample), default=dim.high)
    if not wrong or dim.sample in wrong or low >= high:
        return None
    return replace(dim, low=low, high=high)


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def ranges(dims: Dims) -> Mapping[str, tuple[int, int]]:
    """By the name of a dim the least and the largest size."""
    traced = [dim for leaf in dims.values() for dim in map(dim_of, dims_in(leaf.traced))]
    return {dim.name: (dim.low, dim.high) for dim in traced}
