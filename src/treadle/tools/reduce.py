"""``treadle reduce FILE``: reduces a failing graph to the smallest graph that still fails."""

import shlex
import tempfile
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from treadle.compat.operators.operator_facts import gives_undefined
from treadle.compat.operators.schemas import OpOverload
from treadle.compiler.pipeline import compile_step
from treadle.graph.analysis.execute import run_step
from treadle.graph.analysis.reduce import count_of, reduced
from treadle.graph.core.node_info import known_value
from treadle.graph.core.signature import StepGraph
from treadle.graph.core.types import tensors_in
from treadle.graph.text.parsing import parse
from treadle.graph.text.printing import show
from treadle.options import Options, from_environment
from treadle.report.made_up import is_harmless, made_up_inputs
from treadle.runtime.store.cache import Cache
from treadle.targets.registry import target_for
from treadle.tools.entry_point import load_module
from treadle.util.errors import TreadleError, counted
from treadle.util.expected import NotExpected
from treadle.util.files import check_output, write_output

_SEED = 0
_DIFFERS = "different results"
_ROUNDINGS = 8
"""So many of a dtype's own are no failure, whatever the tolerance is."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a graph fails. Two graphs fail the same way if their ``kind`` is the same."""

    kind: str  # "TR-900 KeyError", "different results"
    words: str

    def __str__(self) -> str:
        return self.words if self.kind == _DIFFERS else f"{self.kind}: {self.words}"


class Trial:
    """Compiles graphs and runs them beside PyTorch's kernels, on inputs that are made up.

    ``rtol``: numbers within ``rtol * (0.1 + |eager|)`` are the same.
    """

    def __init__(self, options: Options, rtol: float) -> None:
        self._options = options
        self._cache = Cache(options.cache_dir)
        self._rtol = rtol
        self.unseen = ""  # why the numbers of the graph looked at last are not known

    def failure(self, step: StepGraph) -> Failure | None:
        """How ``step`` fails, or ``None``. ``unseen`` says whether PyTorch's kernels ran it."""
        theirs = self._eager(step)
        try:
            built = compile_step(
                step.copy(), str(_device_of(step)), self._options, cache=self._cache
            )
            if theirs is None:
                return None
            inputs = made_up_inputs(step)
            with _same_draws():
                built.checks.require(inputs)
                results = built.executable.run(inputs)
        except Exception as error:  # of any stage's: that is what is looked for
            return _raised(error)
        return self._difference(step, _values(step, results, inputs), theirs)

    def _eager(self, step: StepGraph) -> "_Eager | None":
        """What PyTorch's kernels give; ``None`` if they cannot be asked."""
        foreign = next((node for node in step.graph.nodes if not is_harmless(node)), None)
        if foreign is not None:
            self.unseen = f"the graph calls {foreign.target}, which is not run on random inputs"
            return None
        try:
            with _same_draws():
                results = run_step(_zeroed(step), made_up_inputs(step))
            with _same_draws(), _filled_memory():
                filled = run_step(step, made_up_inputs(step))
        except NotExpected:
            self.unseen = "a check of the graph fails on random inputs"
            return None
        except Exception as error:  # of any operation's
            self.unseen = f"PyTorch's kernels do not run it on random inputs: {error}"
            return None
        self.unseen = ""
        return _Eager(results, filled)

    def _difference(
        self, step: StepGraph, ours: Sequence[Tensor | None], theirs: "_Eager"
    ) -> Failure | None:
        for at, output in enumerate(step.signature.outputs):
            words = self._other(ours[at], theirs.values[at], theirs.filled[at])
            if words:
                return Failure(_DIFFERS, f"{output.name} {words}")
        return None

    def _other(self, mine: Tensor | None, other: Tensor | None, filled: Tensor | None) -> str:
        """How a value differs from eager's, in words; nothing if it does not."""
        if mine is None or other is None or filled is None:
            return "" if mine is other else "is missing"
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return "has another type"
        rtol = self._rtol
        if other.is_floating_point():
            rtol = max(rtol, _ROUNDINGS * torch.finfo(other.dtype).eps)
        defined = ~_undefined(other, filled)
        mine, other = mine[defined], other[defined]
        if torch.allclose(mine, other, rtol=rtol, atol=0.1 * rtol, equal_nan=True):
            return ""
        gap = (mine.to(torch.float64) - other.to(torch.float64)).abs().max()
        return f"differs from eager by up to {float(gap):.3g}"


@dataclass(frozen=True, slots=True)
class _Eager:
    """What PyTorch's kernels give with zeros for ``empty``; and once more with all memory filled
    that is not written."""

    values: Sequence[Tensor | None]
    filled: Sequence[Tensor | None]


def _zeroed(step: StepGraph) -> StepGraph:
    """The step with zeros in what operations give as it is. Only to be run."""
    candidate = step.copy()
    for node in candidate.graph.nodes:
        if isinstance(node.target, OpOverload) and gives_undefined(node.target):
            node.target = _with_zeros(node.target)
    return candidate


def _with_zeros(op: OpOverload) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return op(*args, **kwargs).zero_()

    return call


def _undefined(value: Tensor, filled: Tensor) -> Tensor:
    """Which elements are whatever memory held: the number it was filled with, else another."""
    if value.is_floating_point() or value.is_complex():
        return filled.isnan() & ~value.isnan()
    most = True if value.dtype is torch.bool else torch.iinfo(value.dtype).max
    return (filled == most) & (value != most)


@contextmanager
def _filled_memory() -> Generator[None]:
    """Inside, ``empty`` gives NaN, or the largest number: PyTorch does so where it is to be
    deterministic. It warns of operations that cannot be; here that does not matter."""
    was = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


def _raised(error: Exception) -> Failure:
    cause = error.__cause__
    inner = f" {type(cause).__name__}" if cause is not None else ""
    if isinstance(error, TreadleError):
        return Failure(f"{error.code}{inner}", error.message)
    return Failure(f"{type(error).__name__}", str(error))


@contextmanager
def _same_draws() -> Generator[None]:
    """Inside, random numbers are those of one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        yield


def _values(
    step: StepGraph, results: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Results, and what was written into ``inputs``, in the order of the outputs."""
    outputs = zip(results, step.signature.outputs, strict=True)
    return [value if o.writes is None else inputs[o.writes] for value, o in outputs]


def _device_of(step: StepGraph) -> torch.device:
    """Where the graph runs: where most values are that are not on the host, else there."""
    values = [tensor for node in step.graph.nodes for tensor in tensors_in(known_value(node))]
    devices = dict.fromkeys(value.device for value in values)
    away = (device for device in devices if not target_for(device).on_host)
    return next(away, next(iter(devices), torch.device("cpu")))


@dataclass(frozen=True)
class ReduceRequest:
    """What a person asked for on the command line."""

    path: Path
    output: Path | None = None
    rtol: float = 1e-4
    memory: str | int | float | None = None
    imports: tuple[Path, ...] = ()

    @property
    def smallest(self) -> Path:
        """Where the smallest graph is written."""
        return self.output or self.path.with_name(f"{self.path.stem}.reduced{self.path.suffix}")

    @property
    def again(self) -> str:
        """The command that looks at the smallest graph in the same way."""
        words = ["treadle", "reduce", str(self.smallest)]
        words += [word for path in self.imports for word in ("--import", str(path))]
        words += ["--rtol", str(self.rtol)] if self.rtol != ReduceRequest.rtol else []
        words += ["--memory", str(self.memory)] if self.memory is not None else []
        return shlex.join(words)


def run_reduce(job: ReduceRequest, console: Console, progress: Console) -> int:
    """Write the smallest graph that fails as that of ``job`` does; 1 if that does not fail."""
    text = _text_of(job.path)
    for path in job.imports:
        load_module(path)
    step = parse(text)
    check_output(job.smallest)
    _require_inputs(job, step)
    with tempfile.TemporaryDirectory(prefix="treadle-reduce-") as folder:
        options = replace(from_environment(), cache_dir=Path(folder), progress=False, dump=None)
        trial = Trial(replace(options, debug=0, memory=job.memory), job.rtol)
        failure = trial.failure(step)
        if failure is None:
            return _no_failure(job, trial, console)
        _say(console, f"{count_of(step)}: {failure}")
        return _search(job, trial, step, failure, console, progress)


def _search(
    job: ReduceRequest,
    trial: Trial,
    step: StepGraph,
    failure: Failure,
    console: Console,
    progress: Console,
) -> int:
    was_seen = not trial.unseen
    failures = {show(step, exact=True): failure}

    def fails(candidate: StepGraph) -> bool:
        """In the same way, and PyTorch's kernels still run it if they did."""
        met = trial.failure(candidate)
        seen = not trial.unseen or not was_seen
        if met is None or met.kind != failure.kind or not seen:
            return False
        failures[show(candidate, exact=True)] = met
        return True

    def heard(move: str, candidate: StepGraph, tries: int) -> None:
        needed = counted(tries, "try", "tries")
        _say(progress, f"treadle: {move}: {count_of(candidate)} after {needed}")
        _write(job, candidate, step, failures[show(candidate, exact=True)])

    smallest = reduced(step, fails, heard)
    _write(job, smallest, step, failures[show(smallest, exact=True)])
    _say(console, show(smallest))
    _say(console, f"written to {job.smallest}; to reproduce: {job.again}")
    return 0


def _require_inputs(job: ReduceRequest, step: StepGraph) -> None:
    """``TreadleError`` TR-009 where the graph is for a device that is not here."""
    try:
        made_up_inputs(step)
    except (RuntimeError, AssertionError) as error:  # of any device's
        raise TreadleError(
            f"the inputs of {job.path} cannot be created on this machine: {error}",
            code="TR-009",
            remedy="reduce it where it was captured, or write another device into its text",
        ) from error


def _no_failure(job: ReduceRequest, trial: Trial, console: Console) -> int:
    if trial.unseen:
        raise TreadleError(
            f"{job.path} compiles, but there is no reference result: {trial.unseen}",
            code="TR-009",
            remedy="treadle verify FILE:FUNCTION compares a step on its own batch",
        )
    _say(console, f"{job.path} does not fail: it compiles, and its results equal eager's")
    return 1


def _write(job: ReduceRequest, reduced_step: StepGraph, step: StepGraph, failure: Failure) -> None:
    lines = (
        str(failure),
        f"the smallest of {job.path}, {count_of(step)}",
        f"to reproduce: {job.again}",
    )
    head = "\n".join(f"# {row}" for line in lines for row in line.splitlines())
    write_output(job.smallest, f"{head}\n{show(reduced_step, exact=True)}\n")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TreadleError(
            f"{path} cannot be read: {why}",
            code="TR-008",
            remedy="pass a graph written by TREADLE_DUMP: FOLDER/NAME-DIGEST/captured.txt",
        ) from error


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
