"""Compiled steps that serve many shapes, and the variants made from them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from treadle.algebra.dims import Sizes
from treadle.algebra.extents import Size
from treadle.algebra.guards import Guard
from treadle.capture.input_sources import Dims
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.session.variants.guards import GuardKey, Ignored
from treadle.session.variants.narrowing import MOST_PARTS, narrowed, ranges
from treadle.session.variants.shapes import SMALLEST, Dynamic, Found, sampled_dims
from treadle.util.errors import LoweringError, VerifyError

_MOST = 3
"""Patterns for one range of sizes. PyTorch chooses libraries by size: oneDNN's convolution is for
16 images or more."""


@dataclass(slots=True)
class Specializations:
    """The patterns of one step, by what they depend on beside the dynamic sizes."""

    spec: Dynamic
    notes: list[str]
    _known: list[tuple[GuardKey, Compiled]] = field(default_factory=list[tuple[GuardKey, Compiled]])
    _failed: set[tuple[GuardKey, Answers]] = field(default_factory=set[tuple[GuardKey, Answers]])
    _taken: Answers = ()
    """The path of the pattern that served the last call."""
    alone: str = ""
    """Why the last call's sizes go by themselves."""

    @property
    def has_failed(self) -> bool:
        """Whether nothing could be compiled for many sizes, though it was tried."""
        return bool(self._failed) and not self._known

    def undo(self) -> Callable[[], None]:
        """What forgets which ranges are found to have no pattern from now on."""
        spec, failed = self.spec, set(self._failed)

        def forget() -> None:
            self.spec, self._failed = spec, failed

        return forget

    def variant(
        self,
        key: GuardKey,
        dynamic_dims: Found,
        numbers: set[int],
        make: Callable[[GuardKey, Dims], Compiled | None],
        path: Answers = (),
        *,
        is_planned: bool,
    ) -> Compiled | None:
        """The variant for this call from a pattern; ``None`` where its size goes by itself.

        ``numbers``: sizes of the step that do not change, which no sample should be; ``make``
        compiles a pattern for calls of this key, or finds one; ``None`` where there is none.
        ``path``: the answers that the call is known to give; without, the last call's are likely.
        ``is_planned``: within a budget, so by estimates for the largest sizes.
        """
        self.alone = ""
        sizes = dynamic_dims.sizes.items()
        fixed = frozenset(name for name, size in sizes if self.spec.is_alone(name, size))
        while len(fixed) < len(dynamic_dims.sizes):
            general = _general(key, dynamic_dims, fixed, self.spec)
            patterns = self._valid(general, path)
            broken = [_broken(pattern, dynamic_dims.sizes) for pattern in patterns]
            while all(broken):  # none fits
                of_largest = is_planned and not patterns
                dims = sampled_dims(
                    *(self.spec, dynamic_dims, fixed, numbers, broken), of_largest=of_largest
                )
                if not _are_new(dims, broken, dynamic_dims.sizes):
                    break
                pattern = self._made(general, path, dynamic_dims, fixed, dims, make)
                if pattern is None:
                    return None
                self._tell_why(broken)
                patterns.append(pattern)
                broken.append(_broken(pattern, dynamic_dims.sizes))
            fitting = [pattern for pattern, why in zip(patterns, broken, strict=True) if not why]
            if fitting:
                pattern = min(fitting, key=lambda each: _path_of(each) != self._taken)
                self._taken = _path_of(pattern)
                return _instance(pattern, dynamic_dims)
            fixed |= {dim.name for guard in broken[-1] for dim in guard.formula.roots}
            words = _words_of(broken[-1], patterns[-1].captured.sized)
            self.alone = f"compiled for these sizes only, {words}"
        return None

    def _tell_why(self, broken: Sequence[Sequence[Guard]]) -> None:
        """Why a range that has a pattern needs another one."""
        deciding = {
            dim.name for guards in broken for guard in guards for dim in guard.formula.roots
        }
        if deciding:
            self.notes[-1] += f", again: what runs depends on {', '.join(sorted(deciding))}"

    def paths(self) -> set[Answers]:
        """For which there are patterns."""
        return {_path_of(compiled) for _, compiled in self._known}

    def _valid(self, general: GuardKey, path: Answers) -> list[Compiled]:
        """Patterns of paths that begin with this one, which read outside the step what is there
        now."""
        return [
            compiled
            for key, compiled in self._known
            if general.as_seen_by(key) == key
            and _path_of(compiled)[: len(path)] == path
            and compiled.captured.dependencies.hold()
        ]

    def _made(
        self,
        general: GuardKey,
        path: Answers,
        dynamic_dims: Found,
        fixed: frozenset[str],
        dims: Dims,
        make: Callable[[GuardKey, Dims], Compiled | None],
    ) -> Compiled | None:
        if (general, path) in self._failed:
            return None
        compiled: Compiled | None = None
        for _ in range(MOST_PARTS):
            try:
                compiled = make(general, dims)
                break
            except (VerifyError, LoweringError) as error:
                part = narrowed(dims, error)
                if part is None:
                    self._failed.add((general, path))
                    self.notes.append(f"each size is compiled separately: {error.message}")
                    return None
                dims = part
        if compiled is None:
            return None
        self._known.append((general.of(None, Ignored.of(compiled.captured)), compiled))
        traced = compiled.captured.dims or dims
        self.notes.append(self._said(compiled, dynamic_dims, fixed, traced))
        return compiled

    def _said(
        self, compiled: Compiled, dynamic_dims: Found, fixed: frozenset[str], dims: Dims
    ) -> str:
        """For which sizes it is."""
        pins = list(filter(_is_pin, compiled.artifact.guards))
        alone = {dim.name for guard in pins for dim in guard.formula.roots} - fixed
        kept = ", ".join(f"{name}={dynamic_dims.sizes[name]}" for name in sorted(fixed))
        open_ = ", ".join(
            "{} in {}..{}".format(name, *self._range(name, size, dims))
            for name, size in dynamic_dims.sizes.items()
            if name not in fixed | alone
        )
        if not open_:
            return f"each size is compiled separately, {_words_of(pins, compiled.captured.sized)}"
        by = "another process compiled" if compiled.untraced else "compiled"
        return f"{by} for {open_}" + (f", with {kept}" if kept else "")

    def _range(self, name: str, size: int, dims: Dims) -> tuple[int, int]:
        """That of the bucket, or the part of it that is compiled together."""
        low, high = self.spec.bucket(name, size)
        least, most = ranges(dims).get(name, (low, high))
        return (low if least == SMALLEST else least), most


def _path_of(pattern: Compiled) -> Answers:
    return pattern.captured.dependencies.path.answers


def _broken(pattern: Compiled, sizes: Sizes) -> list[Guard]:
    """Of the answers that a pattern was made with, those that are wrong for these sizes."""
    return [guard for guard in pattern.artifact.guards if not guard.holds(sizes)]


def _words_of(broken: Sequence[Guard], lines: Sequence[str]) -> str:
    """That a step asks for the numbers of sizes, and where."""
    names = ", ".join(sorted({dim.name for guard in broken for dim in guard.formula.roots}))
    where = f": {'; '.join(lines[:3])}" if lines else ""
    return f"because what runs depends on the number {names}{where}"


def _is_pin(guard: Guard) -> bool:
    """Whether it holds for one size: what is made with another holds for that one. Of a dim that
    is computed it may come of the sample, and hold for several."""
    computed = any(dim.of is not None for dim in guard.formula.dims)
    return guard.sign == "==" and guard.answer and not computed


def _are_new(dims: Dims, broken: Sequence[Sequence[Guard]], sizes: Sizes) -> bool:
    """Whether a pattern made of these samples gives the right answers for ``sizes`` where known
    patterns give wrong ones: after one for 16 images or more, another for fewer."""
    if len(broken) >= _MOST or any(_is_pin(guard) for guards in broken for guard in guards):
        return False
    shapes = (leaf.shape for leaf in dims.values())
    open_ = [size for shape in shapes for size in shape if isinstance(size, Size)]
    samples = {dim.name: dim.sample for size in open_ for dim in size.formula.dims}
    return not any(guard.holds({**sizes, **samples}) for guards in broken for guard in guards)


def _general(key: GuardKey, dynamic_dims: Found, fixed: frozenset[str], spec: Dynamic) -> GuardKey:
    """The key with buckets for dynamic sizes."""
    arguments = list(key.arguments)
    for at, dims in dynamic_dims.leaves.items():
        path, (dtype, shape, _, *rest) = arguments[at]
        named = list(shape)
        for dim, name in dims:
            size = named[dim]
            named[dim] = size if name in fixed else (name, spec.bucket(name, size))
        arguments[at] = path, (dtype, tuple(named), dynamic_dims.forms[at], *rest)
    return replace(key, arguments=tuple(arguments))


def _instance(pattern: Compiled, dynamic_dims: Found) -> Compiled:
    artifact = pattern.artifact.at_sizes(dynamic_dims.sizes)
    build = Build.without_compiler()  # unused: the code is the pattern's
    checks = pattern.checks.at(dynamic_dims.sizes)
    like = pattern.executable
    executable = Executable(artifact, build, like=like, first=checks.launch, policy=like.policy)
    return replace(
        pattern,
        artifact=artifact,
        executable=executable,
        checks=checks,
        pattern=pattern.artifact,
        has_run=False,
    )


def fixed_numbers(tensors: Iterable[Tensor]) -> set[int]:
    """The sizes of tensors whose shapes stay."""
    return {int(size) for tensor in tensors for size in tensor.shape}
