"""Dims of arguments that change from call to call, and their sizes in one call."""

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size
from treadle.algebra.guards import Guard
from treadle.algebra.strides import SizedLayout, StrideForm, stride_forms
from treadle.capture.python_state.call_arguments import parameter_names
from treadle.capture.python_state.flatten import flatten_with_paths
from treadle.util.errors import CaptureError, TreadleError, require

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""
Named = Mapping[int, str] | Sequence[str | None]


SMALLEST = 2
"""The smallest size that may be any size: steps of size 0 and 1 are other steps."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """The result of ``dynamic``: the names of dims by argument, and for each name its smallest size
    and the largest size of each bucket, in order."""

    arguments: Mapping[str, Mapping[int, str]]
    ranges: Mapping[str, tuple[int, ...]]

    def bucket(self, name: str, size: int) -> tuple[int, int]:
        """The smallest and the largest size that are compiled together with ``size``."""
        low, *tops = self.ranges[name]
        at = bisect.bisect_left(tops, size)
        return (tops[at - 1] + 1 if at else low), tops[at]

    def largest(self, name: str, size: int) -> int:
        """The largest size that the model is known to accept, of those compiled with ``size``."""
        return self.bucket(name, size)[1]

    def is_alone(self, name: str, size: int) -> bool:
        """Whether no other size is compiled together with ``size``: sizes 0 and 1 compile
        separately, and a bucket may have a single size."""
        low, high = self.bucket(name, size)
        return size < SMALLEST or max(low, SMALLEST) == high


def dynamic(arguments: Mapping[str, Named], /, **ranges: Sequence[int]) -> Dynamic:
    """Declare which dims of a step's arguments change, and their ranges.

    ::

        shapes = treadle.dynamic(
            {"tokens": ("batch", "time"), "labels": ("batch", "time")},
            batch=(1, 64), time=(16, 1024),
        )
        step = treadle.compile(train_step, model=model, optimizer=optimizer, shapes=shapes)

    - ``arguments``: for each parameter (``"batch['tokens']"`` for an entry of a dict), the names of
      its dims in order, with ``None`` for a fixed dim; or a dict from dim to name. Dims with the
      same name have equal sizes in every call.
    - ``ranges``: for each name, the smallest and the largest size, both included. Numbers in
      between split a range into buckets: ``time=(16, 128, 512, 1024)`` compiles 16..128, 129..512
      and 513..1024 separately, each planned for its own largest size.

    One compile serves a whole range if possible. A memory budget holds for the largest sizes. A
    name without a range, or an invalid range, raises ``TreadleError`` TR-001.
    """
    named = {argument: _by_dim(dims) for argument, dims in arguments.items()}
    used = {name for dims in named.values() for name in dims.values()}
    require(used == set(ranges), _mismatch(used, set(ranges)))
    sizes_of = {name: tuple(sizes) for name, sizes in ranges.items()}
    for name, sizes in sizes_of.items():
        ascending = all(a < b for a, b in itertools.pairwise(sizes[1:]))
        fits = name.isidentifier() and len(sizes) > 1 and 0 <= sizes[0] <= sizes[1] and ascending
        why = f"dim {name} cannot range over {', '.join(map(str, sizes))}"
        remedy = "pass the smallest and the largest size; sizes between them must ascend"
        require(fits, TreadleError(why, code="TR-001", remedy=remedy))
    return Dynamic(named, sizes_of)


def _by_dim(dims: Named) -> dict[int, str]:
    pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims)
    return {at: name for at, name in pairs if name is not None}


def _mismatch(used: set[str], ranged: set[str]) -> TreadleError:
    missing, extra = sorted(used - ranged), sorted(ranged - used)
    said = f"no range for {', '.join(missing)}" if missing else f"no dim is {', '.join(extra)}"
    return TreadleError(
        said, code="TR-001", remedy="give every named dim one range: time=(16, 1024)"
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What one call says: the dims of each dynamic leaf, its shape and how its strides follow; and
    the sizes of all names."""

    leaves: Mapping[int, tuple[tuple[int, str], ...]]  # leaf -> (dim, name)...
    shapes: Mapping[int, tuple[int, ...]]
    forms: Mapping[int, tuple[StrideForm, ...]]
    sizes: Sizes


def find(
    spec: Dynamic,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Found:
    """The dims of this call. ``CaptureError`` TR-113 where they are not what was declared."""
    arguments, _ = flatten_with_paths((args, kwargs), parameter_names(function))
    return found_in(spec, arguments)


def found_in(spec: Dynamic, arguments: Sequence[tuple[str, object]]) -> Found:
    """The dims of arguments by their paths. ``CaptureError`` TR-113 as above."""
    layouts = (
        (path, (tuple(leaf.shape), leaf.stride()) if isinstance(leaf, Tensor) else None)
        for path, leaf in arguments
    )
    return found_of_layouts(spec, list(layouts))


def found_of_layouts(spec: Dynamic, given: Sequence[tuple[str, Layout | None]]) -> Found:
    """Likewise of their shapes and strides; ``None`` for what has none that may change."""
    leaves: dict[int, tuple[tuple[int, str], ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    forms: dict[int, tuple[StrideForm, ...]] = {}
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for at, (argument, layout) in enumerate(given):
        dims = spec.arguments.get(argument)
        if dims is None or layout is None:
            continue
        shape, strides = layout
        forms[at] = stride_forms(shape, strides)
        _require_fits(argument, len(shape), dims)
        leaves[at], shapes[at] = tuple(sorted(dims.items())), shape
        for dim, name in sorted(dims.items()):
            size, place = int(shape[dim]), f"{argument} (dim {dim})"
            known = sizes.setdefault(name, size)
            first = seen.setdefault(name, place)
            require(known == size, _refused(f"{name} is {known} in {first} and {size} in {place}"))
            low, high = spec.ranges[name][0], spec.ranges[name][-1]
            inside = low <= size <= high
            require(inside, _refused(f"{name} is {size} in {place}, outside {low}..{high}"))
    for argument in spec.arguments:
        is_passed = any(path == argument for path, _ in given)
        require(is_passed, _refused(f"the call has no argument {argument}"))
    return Found(leaves, shapes, forms, sizes)


def _require_fits(argument: str, rank: int, dims: Mapping[int, str]) -> None:
    deep = all(-rank <= dim < rank for dim in dims)
    require(deep, _refused(f"{argument} has {rank} dims, not {max(dims, default=0) + 1}"))


def _refused(said: str) -> CaptureError:
    remedy = "change treadle.dynamic(...), or pass matching arguments"
    return CaptureError(said, code="TR-113", remedy=remedy)


def sampled_dims(
    spec: Dynamic,
    dynamic_dims: Found,
    fixed: frozenset[str],
    taken: set[int],
    broken: Sequence[Sequence[Guard]] = (),
    *,
    of_largest: bool = False,
) -> dict[int, SizedLayout]:
    """The shape of each dynamic leaf, with a ``Size`` for each dim that is not fixed; and how its
    strides follow.

    The sample of a size is a number near the call's, or near the largest one, that nothing else in
    the step is likely to be, so that a size is told from a width that happens to be equal.
    ``taken``: numbers to avoid; ``broken``: of patterns that do not fit the call the guards that do
    not hold for its sizes, nor for these samples where that can be.
    """
    samples: dict[str, int] = {}
    chosen: dict[str, int] = {}
    taken = taken | {dynamic_dims.sizes[name] for name in fixed}
    for name, size in dynamic_dims.sizes.items():
        if name in fixed:
            samples[name] = size
            continue
        low, high = spec.bucket(name, size)
        low = max(low, SMALLEST)
        most = spec.largest(name, size)
        near = most if of_largest else size
        fits = functools.partial(_is_as_asked, broken, {**dynamic_dims.sizes, **chosen}, name)
        sample = _strange(near, low, most, taken, fits)
        if (sample in taken or not fits(sample)) and not of_largest:
            sample = _strange(near, low, high, taken, fits)
        chosen[name] = sample
        taken.add(sample)
        samples[name] = Size.dim(name, low, high, sample)
    sized: dict[int, SizedLayout] = {}
    for at, dims in dynamic_dims.leaves.items():
        shape: list[int] = list(dynamic_dims.shapes[at])
        for dim, name in dims:
            shape[dim] = samples[name]
        sized[at] = SizedLayout(tuple(shape), dynamic_dims.forms[at])
    return sized


_FAR = 4096
_ENOUGH = 256
"""Candidates: many primes are among them."""


def _is_as_asked(broken: Sequence[Sequence[Guard]], sizes: Sizes, name: str, sample: int) -> bool:
    """Whether none of the guards holds with ``sample`` in the place of a size."""
    others = {**sizes, name: sample}
    return not any(guard.holds(others) for guards in broken for guard in guards)


def _strange(size: int, low: int, high: int, taken: set[int], fits: Callable[[int], bool]) -> int:
    """The prime nearest ``size`` that is not taken, of numbers that fit where some do; if there is
    none, another number in range."""
    near = [n for d in range(_FAR) for n in {size - d, size + d} if low <= n <= high]
    fitting = list(itertools.islice(filter(fits, near), _ENOUGH))
    near = fitting if len(fitting) > 1 else near  # else no other size is compiled with it
    free = [n for n in near if n not in taken]
    return next(filter(_is_prime, free), free[0] if free else min(max(size, low), high))


def _is_prime(n: int) -> bool:
    return n > 3 and all(n % d for d in range(2, int(n**0.5) + 1))
