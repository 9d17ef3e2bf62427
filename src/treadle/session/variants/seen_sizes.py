"""Which dims of a step's arguments change, derived from its calls: for steps without declared dims.

::

    call 1   tokens [8, 700]   labels [8, 700]     compiled for these sizes
    call 2   tokens [8, 300]   labels [8, 300]     tokens_1 in 2..700: dim 1 of both
    call 3   tokens [8, 900]   labels [8, 900]     tokens_1 in 701..1024
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from treadle.algebra.strides import stride_forms
from treadle.session.variants.guards import GuardKey
from treadle.session.variants.shapes import SMALLEST, Dynamic, Found, found_of_layouts
from treadle.util.errors import CaptureError

ArgumentDim = tuple[int, int]
"""An argument by its number, and a dim of it."""


@final
@dataclass(frozen=True, slots=True)
class SeenDims(Dynamic):
    """Dims that calls have shown. What they have not shown may be more than the model takes."""

    def largest(self, name: str, size: int) -> int:
        """As of declared ones in the first bucket; later ones end with a power of two."""
        return self.ranges[name][1] if size <= self.ranges[name][1] else size

    def found(self, key: GuardKey) -> Found | None:
        """What a call with this key says of these dims; ``None`` if it has others, or sizes that
        are out of their ranges."""
        layouts = [
            (path, (fact[1], fact[2]) if _is_sized(fact) else None) for path, fact in key.arguments
        ]
        try:
            found = found_of_layouts(self, layouts)
        except CaptureError:
            return None
        known = dict(layouts)
        return found if all(known[path] is not None for path in self.arguments) else None

    def data(self) -> dict[str, object]:
        """As JSON has it."""
        arguments = {path: list(map(list, dims.items())) for path, dims in self.arguments.items()}
        ranges = {name: list(ends) for name, ends in self.ranges.items()}
        return {"arguments": arguments, "ranges": ranges}

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> "SeenDims":
        """The inverse."""
        arguments = {path: dict(dims) for path, dims in data["arguments"].items()}
        return SeenDims(arguments, {name: tuple(ends) for name, ends in data["ranges"].items()})


@final
@dataclass(slots=True)
class AlikeCalls:
    """Calls that differ in the sizes of their arguments alone. ``key``: that of a variant which
    served one of them. ``spec``: the dims that changed; those that were equal in all calls have one
    name."""

    key: GuardKey
    spec: SeenDims = field(default_factory=lambda: SeenDims({}, {}))
    _first: dict[ArgumentDim, int] = field(default_factory=dict[ArgumentDim, int])
    _groups: list[list[ArgumentDim]] = field(default_factory=list[list[ArgumentDim]])
    """Places of equal sizes in all calls."""

    def __post_init__(self) -> None:
        self._first = _sizes_of(self.key)
        self._groups = _parted([sorted(self._first)], self._first)

    def is_of(self, key: GuardKey) -> bool:
        """Whether a call with this key is one of them."""
        return without_sizes(key.as_seen_by(self.key)) == without_sizes(self.key)

    def is_like(self, key: GuardKey) -> bool:
        """Whether a call with this key has such arguments, of these sizes or others."""
        mine, other = (without_sizes(each.of_any_values()) for each in (self.key, key))
        return mine.arguments == other.arguments and mine.structure == other.structure

    def undo(self) -> Callable[[], None]:
        """What forgets the calls that are seen from now on."""
        spec, groups = self.spec, self._groups

        def forget() -> None:
            self.spec, self._groups = spec, groups

        return forget

    def adopt(self, spec: SeenDims) -> None:
        """Take dims that calls of another process had, and these have as well."""
        self.spec = spec
        at_path = {path: at for at, (path, _) in enumerate(self.key.arguments)}
        named: dict[str, list[ArgumentDim]] = {}
        for path, dims in spec.arguments.items():
            for dim, name in dims.items():
                named.setdefault(name, []).append((at_path[path], dim))
        known = {place for places in named.values() for place in places}
        others = [place for place in sorted(self._first) if place not in known]
        self._groups = [sorted(places) for places in named.values()]
        self._groups += _parted([others], self._first)

    def see(self, key: GuardKey) -> Found:
        """Note the sizes of a call, which is one of them; what they are by the names of dims."""
        sizes = _sizes_of(key)
        self._groups = _parted(self._groups, sizes)
        known = {name for dims in self.spec.arguments.values() for name in dims.values()}
        paths = [path for path, _ in key.arguments]
        arguments: dict[str, dict[int, str]] = {}
        ranges: dict[str, tuple[int, ...]] = {}
        leaves: dict[int, list[tuple[int, str]]] = {}
        for places in self._groups:
            size, first, (leaf, dim) = sizes[places[0]], self._first[places[0]], places[0]
            name = _name(paths[leaf], dim)
            name = f"{name}_{leaf}" if name in ranges else name  # two paths of the same words
            if size == first and name not in known:
                continue
            ranges[name] = _extended(self.spec.ranges.get(name, ()), first, size)
            for at, each in places:
                arguments.setdefault(paths[at], {})[each] = name
                leaves.setdefault(at, []).append((each, name))
        self.spec = SeenDims(arguments, ranges)
        facts = {at: key.arguments[at][1] for at in leaves}
        shapes = {at: fact[1] for at, fact in facts.items()}
        forms = {at: stride_forms(fact[1], fact[2]) for at, fact in facts.items()}
        by_name = {name: sizes[at, dim] for at, dims in leaves.items() for dim, name in dims}
        places = {at: tuple(sorted(dims)) for at, dims in leaves.items()}
        return Found(places, shapes, forms, by_name)


def _extended(known: tuple[int, ...], first: int, size: int) -> tuple[int, ...]:
    """The smallest size and the largest of each bucket. The first bucket ends with the largest size
    that was there, so that nothing is planned for sizes that never come; later ones with a
    power of two, so that there are few."""
    if not known:
        return SMALLEST, max(first, size, SMALLEST)
    return known if size <= known[-1] else (*known, 1 << (size - 1).bit_length())


def _parted(
    groups: Iterable[list[ArgumentDim]], sizes: dict[ArgumentDim, int]
) -> list[list[ArgumentDim]]:
    """The groups, each parted by these sizes."""
    parted: list[list[ArgumentDim]] = []
    for group in groups:
        by_size: dict[int, list[ArgumentDim]] = {}
        for place in group:
            by_size.setdefault(sizes[place], []).append(place)
        parted += by_size.values()
    return parted


def _name(path: str, dim: int) -> str:
    """``batch['tokens']``, 1  ->  ``batch_tokens_1``"""
    words = re.findall(r"\w+", path, re.ASCII) or ["argument"]
    return "_".join(itertools.chain(words, [str(dim)]))


def _is_sized(fact: tuple[object, ...]) -> bool:
    """Whether an argument is a tensor, whose sizes may change."""
    match fact:
        case (_, tuple() as shape, tuple() as strides, _, _):
            return all(type(number) is int for number in (*shape, *strides))
        case _:
            return False


def _sizes_of(key: GuardKey) -> dict[ArgumentDim, int]:
    return {
        (at, dim): size
        for at, (_, fact) in enumerate(key.arguments)
        if _is_sized(fact)
        for dim, size in enumerate(fact[1])
    }


def without_sizes(key: GuardKey) -> GuardKey:
    """The key of calls with tensors of as many dims, which lie alike."""
    arguments = tuple(
        (path, (fact[0], stride_forms(*fact[1:3]), *fact[3:]) if _is_sized(fact) else fact)
        for path, fact in key.arguments
    )
    return replace(key, arguments=arguments)


def with_sizes_of(key: GuardKey, other: GuardKey) -> GuardKey:
    """``other``, whose tensors have the sizes of those of ``key``."""
    pairs = zip(other.arguments, key.arguments, strict=True)
    arguments = tuple((path, new if _is_sized(old) else old) for (path, old), (_, new) in pairs)
    return replace(other, arguments=arguments)
