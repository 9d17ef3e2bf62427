"""All options of treadle, in one frozen dataclass, and the only reader of the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from treadle.util.declared_types import undeclared
from treadle.util.errors import TreadleError
from treadle.util.planning.planner import Planner
from treadle.util.sizes import Budget, parse_bytes

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

PREFIX = "TREADLE_"
NUMERICS = ("default", "eager", "fp8")
STREAMS = ("eager", "counter")
SHARDS = (None, "optimizer")
STATES = ("default", "8bit")
AUTO = "auto"
"""The ``micro_batch`` that the budget chooses."""
T = TypeVar("T")
OPTIONAL_PASSES = (
    "RemoveNoOps",
    "RemoveCommonSubexpressions",
    "RemoveDeadCode",
    "SimplifySplitCat",
    "CountConstants",
    "FoldConstants",
    "outer-product",
    "column-of-dots",
    "column-of-dots-and-bias",
    "vector-of-dots",
    "row-of-dots",
    "written-out-product",
    "AccumulateProducts",
    "ScaleInProduct",
    "FoldWeightCast",
    "FuseAttention",
    "CallFastestAttention",
    "GroupHeads",
    "ProveAttentionMasks",
    "SplitConvolutionBias",
    "NormaliseFromStatistics",
    "ConvolveDepthwiseGradient",
    "ConvolveChannelsLast",
    "RunTakenBranches",
)
"""What ``skip`` may name: passes by their class, and rules by their name. A step computes the same
without them."""
_RENAMED: Mapping[str, str] = {"JoinPieces": "SimplifySplitCat"}
"""What was called otherwise in 0.1.0."""
LOGS = ("compile", "recompiles", "fallbacks")
"""What ``logs`` may name: loggers below ``treadle``."""
_DECIDES_NOTHING: Mapping[str, bool] = {"decides": False}
"""Marks an option that changes only what is reported, checked or kept, never the compiled
result."""


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(PREFIX + "CACHE_DIR") or Path(root) / "treadle")


def _require_one_of(
    name: str, value: str, known: tuple[str, ...], page: str = "docs/howto/numerics.md"
) -> None:
    if value not in known:
        raise TreadleError(
            f"{name}={value!r} is not one of {', '.join(known)}",
            code="TR-001",
            remedy=f"{page} describes each of them",
        )


def _known_passes(skip: object) -> tuple[str, ...]:
    given = tuple(skip) if isinstance(skip, list | tuple) else (skip,)
    names = tuple(_RENAMED.get(str(name), name) for name in given)
    unknown = [name for name in names if name not in OPTIONAL_PASSES]
    if unknown:
        raise TreadleError(
            f"skip={skip!r} names {unknown[0]!r}, which cannot be skipped",
            code="TR-001",
            remedy=f"a tuple of {', '.join(OPTIONAL_PASSES)}",
        )
    return tuple(str(name) for name in names)


def _known_logs(logs: object) -> tuple[str, ...]:
    names = tuple(logs) if isinstance(logs, list | tuple) else (logs,)
    unknown = [name for name in names if name not in (*LOGS, "all")]
    if unknown:
        raise TreadleError(
            f"logs={logs!r} names {unknown[0]!r}, which is not a log",
            code="TR-001",
            remedy=f"a tuple of {', '.join(LOGS)}, or all",
        )
    return LOGS if "all" in names else tuple(str(name) for name in names)


def _bytes_or_none(name: str, nbytes: str | int | None) -> int | None:
    """As ``parse_bytes``, which knows no size of 0."""
    if nbytes is None:
        return None
    return 0 if str(nbytes) == "0" else parse_bytes(nbytes, name)


def _require_types(options: "Options") -> None:
    """TR-001 for a value of another type than the option declares."""
    found = next(undeclared(options), None)
    if found is not None:
        name, words = found
        text = f"{name}={vars(options)[name]!r} has another type"
        raise TreadleError(text, code="TR-001", remedy=f"pass {words}")


def _require_rows(micro_batch: object) -> None:
    known = micro_batch is None or micro_batch == AUTO
    if isinstance(micro_batch, int) and not isinstance(micro_batch, bool):
        known = micro_batch > 0
    if not known:
        raise TreadleError(
            f"micro_batch={micro_batch!r} is not a number of rows",
            code="TR-001",
            remedy=f'pass a positive int, or "{AUTO}" with a budget',
        )


def _environment_flag(name: str) -> bool:
    return os.environ.get(PREFIX + name, "0") not in ("", "0")


def _environment_level(name: str) -> int:
    text = os.environ.get(PREFIX + name, "") or "0"
    if not text.isdecimal():
        raise TreadleError(
            f"{PREFIX}{name}={text!r} is not a level", code="TR-001", remedy="set it to 0 .. 5"
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class RegionRule:
    """``compiler`` compiles these operations in these modules.

    - ``compiler``: ``"native"``, ``"eager"`` (PyTorch's kernels, one by one), ``"inductor"``, or a
      registered one.
    - ``operations``, ``module``: glob patterns: ``"gelu*"``, ``"blocks.3*"``.
    - ``ahead``: compile the region with the step, not at its first call.
    """

    compiler: str
    operations: str = "*"
    module: str = "*"
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Regions:
    """Which parts of a step are compiled, and by what.

    - ``rules``: the first rule that matches an operation decides. Default: treadle generates what
      it can.
    - ``smallest``: no code is generated for regions with fewer operations that compute.
    - ``accepts``: called once for each region of generated code. If it returns ``False``, the
      region runs with PyTorch's kernels.
    - ``show``: receives each region's graph as text, and returns a handle (a path, a URL) that
      names the region in profiles. An empty handle names none.
    """

    rules: tuple[RegionRule, ...] = ()
    smallest: int = 0
    accepts: Callable[[Any], bool] | None = None
    show: Callable[[str], str] | None = None

    @property
    def chooses(self) -> bool:
        """Whether anything here changes what runs."""
        return bool(self.rules or self.smallest or self.accepts)


@final
@dataclass(frozen=True, slots=True, eq=False)
class DataParallel:
    """One model on many ranks, each with its own batches.

    Before the first call, every rank receives the first rank's parameters and buffers. Gradients
    are averaged where an optimizer steps or the step reads them, so accumulation sends nothing.
    Buffers that a call writes (running statistics) have the first rank's values after it.

    - ``group``: a process group, or a ``DeviceMesh`` of one dim. Default: all ranks.
    - ``shard``: ``"optimizer"`` shards the optimizer's state. Each rank keeps it for some rows of
      each parameter, updates those rows, and receives the others (ZeRO 1). Gradients that nothing
      else uses are sharded as well (ZeRO 2).
    """

    group: "ProcessGroup | DeviceMesh | None" = None
    shard: str | None = None

    def __post_init__(self) -> None:
        if self.shard not in SHARDS:
            raise TreadleError(
                f"DataParallel(shard={self.shard!r}) is not one of {', '.join(map(repr, SHARDS))}",
                code="TR-500",
                remedy=(
                    '"optimizer" shards state and updates; to shard parameters, apply '
                    "torch.distributed.fsdp.fully_shard to the model, which needs no DataParallel"
                ),
            )


@dataclass(frozen=True, slots=True)
class Carry:
    """Run the updates of these parameters in the next call, with their communication.

    - ``parameters``: a glob pattern of names (``"blocks.0.*"``), several patterns, or a function of
      a name.
    - ``before``: a glob pattern of a module's path. All updates run before its first operation.
      Default: each update runs before the first operation that reads its parameter.
    """

    parameters: str | tuple[str, ...] | Callable[[str], bool] = "*"
    before: str = ""

    def takes(self, name: str) -> bool:
        """Whether the parameter with this name is one of them."""
        if callable(self.parameters):
            return bool(self.parameters(name))
        names = self.parameters
        patterns = (names,) if isinstance(names, str) else names
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    @property
    def words(self) -> str:
        """The parameters as text, for messages."""
        names = self.parameters
        if callable(names):
            return "the parameters that a function chooses"
        return repr(names) if isinstance(names, str) else ", ".join(map(repr, names))


def _several(name: str, given: object, kind: type[T], remedy: str) -> tuple[T, ...]:
    """The value of an option that is one object of ``kind``, or several."""
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    kept = tuple([value for value in values if isinstance(value, kind)])
    if len(kept) < len(values):
        raise TreadleError(
            f"{name}={given!r} is neither a treadle.{kind.__name__} nor a list of them",
            code="TR-001",
            remedy=remedy,
        )
    return kept


class Callback:
    """Called by steps that have it in ``Options(callbacks=...)``. Override the methods that you
    need.

    Each method gets the ``Step``, after the call in which it happened. An exception of a method is
    raised by that call, after its step has run.
    """

    def on_recompile(self, step: Any, reason: str) -> None:
        """The step was compiled or captured again, or ran eagerly: an entry of ``recompiles`` or
        ``recaptures``."""

    def on_compile(self, step: Any) -> None:
        """A variant was compiled, or taken from the cache; ``step.summary()`` describes it."""

    def on_call(self, step: Any) -> None:
        """A call has returned. On a GPU its kernels may still run."""


@dataclass(frozen=True)
class Options:
    """How a step is compiled.

    - ``memory``: the maximum of bytes alive during a step: ``"7GiB"``, bytes as an int, or a ratio
      from ``0.0`` (the smallest plan) to ``1.0`` (the fastest). Default: no budget, which gives the
      fastest plan, or one that is almost as fast and much smaller.
    - ``planner``: how plans are made: a ``Planner``, or the name of a solver
      (``docs/howto/budget.md``).
    - ``strict``: an operation or an optimizer that falls back to PyTorch is an error (TR-302).
    - ``numerics``: ``"eager"`` rounds where eager rounds, without fused multiply-adds and padded
      products. ``"default"`` is as close to the exact result as eager. ``"fp8"`` multiplies large
      matrices of half precision as float8, on GPUs that can (``docs/howto/numerics.md``).
    - ``rng``: ``"eager"`` draws eager's random numbers. ``"counter"`` computes dropout masks from a
      key and the position, and stores none; they differ from eager's.
    - ``chunk_logits``: the maximum size of logits over a vocabulary (``"64MiB"``, bytes as an int).
      Larger ones are computed in chunks of rows, together with the loss. ``0``: never in chunks.
      Default: treadle chooses.
    - ``micro_batch``: compute gradients for at most so many rows of the batch at a time, and
      accumulate them, then update once (``docs/howto/accumulation.md``). ``"auto"``: as many rows
      as fit ``memory``. Default: the whole batch at once.
    - ``optimizer_state``: ``"8bit"`` keeps averages of gradients as 8-bit codes, a quarter of their
      bytes (``docs/howto/optimizer-state.md``). Default: as the optimizer does.
    - ``codegen``: generate kernels. ``False`` uses PyTorch's kernels.
    - ``fuse``: fuse operations into kernels.
    - ``target``: the name of a registered target, instead of the device's own
      (``docs/howto/target.md``).
    - ``tune``: time several schedules of large kernels on this machine and keep the fastest. A
      first compile takes seconds to minutes longer.
    - ``measure``: measure the rates of this GPU once, within a second, and estimate times with
      them. ``False`` uses the rates of an H200. CPUs have fixed rates, those of two cores, because
      measurements of one CPU differed by a factor of 16; the planner's estimator ``"measured"``
      measures them.
    - ``skip``: names of rewrites to skip, to find the one that causes a problem. An unknown name is
      an error that lists all of them.
    - ``replay``: on a GPU, record the launches of a step that is bound by launch overhead as one
      CUDA graph (``docs/howto/gpu.md``).
    - ``cache_dir``: the folder for compiled code (``docs/howto/cache.md``).
    - ``max_cached``: the maximum number of compiled variants that a step keeps.
    - ``dynamic``: when an argument has a second size, compile once for a range of sizes
      (``docs/howto/dynamic-shapes.md``). ``False`` compiles each size separately.
    - ``dump``: a folder to which every stage is written as text (``docs/howto/watch.md``).
    - ``debug``: what to print on standard error. 1: the time of each stage; 2: also what each pass
      changed; 3: loops and kernels; 4: generated sources; 5: which passes change results.
    - ``progress``: show a line on a terminal while a compile takes more than a second.
    - ``logs``: which of the loggers ``treadle.compile``, ``treadle.recompiles`` and
      ``treadle.fallbacks`` to show: ``("recompiles",)``, or ``("all",)``.
    - ``callbacks``: a ``Callback``, or several, that are told what happens to a step
      (``docs/howto/watch.md``).
    - ``buckets``: the maximum size of a bucket of collectives; the first bucket of a kind has at
      most 1 MiB. ``0`` makes no buckets. Default: an eighth of the bytes sent, from 1 to 25 MiB.
    - ``overlap``: choose the buckets and the order that overlap most communication with compute, by
      a simulated timeline, for identical ranks (``docs/howto/communication.md``).
    - ``async_tensor_parallel``: split products into chunks that run during their all-gathers and
      reduce-scatters, where the timeline predicts that this is faster.
    - ``regions``: which parts are compiled, and by what (``docs/howto/regions.md``).
    - ``carry``: updates that run in the next call, one ``Carry`` or several
      (``docs/howto/carry.md``).
    """

    memory: str | int | float | None = None
    planner: Planner | str = field(default=Planner())
    strict: bool = field(default=False, metadata=_DECIDES_NOTHING)
    numerics: str = "default"
    rng: str = "eager"
    chunk_logits: str | int | None = None
    micro_batch: int | str | None = None
    optimizer_state: str = "default"
    codegen: bool = True
    fuse: bool = True
    target: str = ""
    tune: bool = False
    measure: bool = True
    skip: tuple[str, ...] = ()
    replay: bool = field(default=True, metadata=_DECIDES_NOTHING)
    cache_dir: Path = field(default_factory=_default_cache, metadata=_DECIDES_NOTHING)
    max_cached: int = field(default=8, metadata=_DECIDES_NOTHING)
    dynamic: bool = field(default=True, metadata=_DECIDES_NOTHING)
    dump: Path | None = field(default=None, metadata=_DECIDES_NOTHING)
    debug: int = field(default=0, metadata=_DECIDES_NOTHING)
    progress: bool = field(default=True, metadata=_DECIDES_NOTHING)
    logs: tuple[str, ...] = field(default=(), metadata=_DECIDES_NOTHING)
    callbacks: Callback | tuple[Callback, ...] = field(default=(), metadata=_DECIDES_NOTHING)
    buckets: str | int | None = None
    overlap: bool = False
    async_tensor_parallel: bool = False
    regions: Regions = field(default=Regions(), metadata=_DECIDES_NOTHING)  # decides the graph
    carry: Carry | tuple[Carry, ...] = field(default=(), metadata=_DECIDES_NOTHING)  # as regions

    def __post_init__(self) -> None:
        _ = self.budget, self.chunk_bytes, self.bucket_bytes  # what is not a size is refused here
        object.__setattr__(self, "planner", Planner.of(self.planner))
        object.__setattr__(self, "skip", _known_passes(self.skip))
        object.__setattr__(self, "logs", _known_logs(self.logs))
        object.__setattr__(
            self, "carry", _several("carry", self.carry, Carry, 'treadle.Carry("blocks.0.*")')
        )
        derived = "an object of a class that is derived from treadle.Callback"
        told = _several("callbacks", self.callbacks, Callback, derived)
        object.__setattr__(self, "callbacks", told)
        _require_types(self)
        if self.max_cached < 1:
            raise TreadleError(
                f"max_cached={self.max_cached!r} is less than 1",
                code="TR-001",
                remedy="pass the number of variants to keep",
            )
        _require_rows(self.micro_batch)
        _require_one_of("numerics", self.numerics, NUMERICS)
        _require_one_of("rng", self.rng, STREAMS)
        _require_one_of(
            "optimizer_state", self.optimizer_state, STATES, "docs/howto/optimizer-state.md"
        )

    @cached_property
    def budget(self) -> Budget | None:
        """``memory`` as a value; ``None`` for the fastest plan."""
        return None if self.memory is None else Budget.of(self.memory)

    @cached_property
    def chunk_bytes(self) -> int | None:
        """``chunk_logits`` as bytes; 0 for no chunks, ``None`` if treadle chooses."""
        return _bytes_or_none("chunk_logits", self.chunk_logits)

    @cached_property
    def bucket_bytes(self) -> int | None:
        """``buckets`` as bytes; 0 for no buckets, ``None`` if treadle chooses."""
        return _bytes_or_none("buckets", self.buckets)

    @property
    def eight_bits(self) -> bool:
        """Whether optimizer state is kept in 8 bits."""
        return self.optimizer_state == "8bit"

    @property
    def told(self) -> tuple[Callback, ...]:
        """``callbacks`` as a tuple."""
        return (self.callbacks,) if isinstance(self.callbacks, Callback) else self.callbacks

    @property
    def carries(self) -> tuple[Carry, ...]:
        """``carry`` as a tuple."""
        return (self.carry,) if isinstance(self.carry, Carry) else self.carry

    def decisive(self) -> "Options":
        """These options, with those that do not change the compiled result at their defaults."""
        return Options(cache_dir=Path(), **{name: vars(self)[name] for name in deciding(self)})

    @property
    def method(self) -> Planner:
        """``planner`` as an object."""
        return Planner.of(self.planner)

    @property
    def watched(self) -> bool:
        """Whether the cache is not used: a stage is to be seen, or the user's function plans."""
        return self.dump is not None or self.debug > 1 or not self.method.is_named


def deciding(options: Options) -> dict[str, Any]:
    """The options that change the compiled result, by name, as what JSON can hold."""
    chosen = (option.name for option in fields(options) if option.metadata.get("decides", True))
    return {name: vars(options)[name] for name in chosen} | {"planner": options.method.text}


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """An environment variable: the option that it sets, and to what. ``read`` receives the
    variable's name."""

    option: str
    read: Callable[[str], Any]
    meaning: str


def _turns_off(name: str) -> bool:
    return not _environment_flag(name)


def _environment_text(name: str) -> str:
    return os.environ.get(PREFIX + name, "")


def _environment_names(name: str) -> tuple[str, ...]:
    return tuple(each for each in _environment_text(name).split(",") if each)


def _environment_folder(name: str) -> Path | None:
    text = _environment_text(name)
    return Path(text) if text else None


def _shows_progress(name: str) -> bool:
    """Of the processes that torchrun starts on a machine, only the first shows progress."""
    return _turns_off(name) and os.environ.get("LOCAL_RANK", "0") == "0"


VARIABLES: Mapping[str, EnvironmentVariable] = {
    "PLANNER": EnvironmentVariable("planner", _environment_text, "a solver, or fields as JSON"),
    "STRICT": EnvironmentVariable("strict", _environment_flag, "`1`: `True`"),
    "NO_CODEGEN": EnvironmentVariable("codegen", _turns_off, "`1`: `False`"),
    "TARGET": EnvironmentVariable("target", _environment_text, "a name"),
    "TUNE": EnvironmentVariable("tune", _environment_flag, "`1`: `True`"),
    "NO_MEASURE": EnvironmentVariable("measure", _turns_off, "`1`: `False`"),
    "SKIP": EnvironmentVariable("skip", _environment_names, "comma-separated names"),
    "NO_REPLAY": EnvironmentVariable("replay", _turns_off, "`1`: `False`"),
    "NO_DYNAMIC": EnvironmentVariable("dynamic", _turns_off, "`1`: `False`"),
    "DUMP": EnvironmentVariable("dump", _environment_folder, "a folder"),
    "DEBUG": EnvironmentVariable("debug", _environment_level, "`0` to `5`"),
    "NO_PROGRESS": EnvironmentVariable("progress", _shows_progress, "`1`: `False`"),
    "LOGS": EnvironmentVariable("logs", _environment_names, "`all`, or comma-separated names"),
    "BUCKETS": EnvironmentVariable(
        "buckets", lambda name: _environment_text(name) or None, "a size, or `0`"
    ),
}
"""The variables that set options, by their names without the prefix. The cache folder has one more,
``TREADLE_CACHE_DIR``, which is the default of ``cache_dir``."""


def from_environment() -> Options:
    """The defaults, with ``VARIABLES`` applied."""
    return Options(**{each.option: each.read(name) for name, each in VARIABLES.items()})


def options_with(options: Options | None, **given: Any) -> Options:
    """``options``, or those of the environment, with each of ``given`` that is not ``None``."""
    named = {name: value for name, value in given.items() if value is not None}
    return replace(options or from_environment(), **named)
