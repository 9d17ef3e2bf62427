"""One case through ``torch.compile`` with our backend, beside eager."""

import contextlib
import enum
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from opdb_cases import Case, copied, distance, tensors_of, widened
from torch.testing._internal.opinfo.core import SampleInput

from treadle.backend import treadle

SECONDS = 120
"""Given to one sample; one that takes longer hangs."""


class Outcome(enum.StrEnum):
    """What became of a case."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    NOT_OURS = "not ours"  # torch.compile(backend="aot_eager") fails as well
    EAGER = "eager"  # Dynamo gave the backend no graph at all


@dataclass(frozen=True)
class Verdict:
    """The outcome, and for those that did not pass why."""

    case: str
    outcome: Outcome
    why: str = ""


class Hangs(Exception):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hangs(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Counting:
    """A backend that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += any(node.op.startswith("call_") for node in module.graph.nodes)
        return treadle(module, inputs)


def checked(case: Case, samples: int) -> Verdict:
    """The worst of its samples: wrong before error before what others cannot do either."""
    verdicts = [_sample(case, each) for each in case.samples(samples)]
    order = [Outcome.WRONG, Outcome.ERROR, Outcome.NOT_OURS, Outcome.PASSED, Outcome.EAGER]
    if not verdicts:
        return Verdict(case.name, Outcome.NOT_OURS, "the database has no samples")
    return min(verdicts, key=lambda each: order.index(each.outcome))


def _sample(case: Case, sample: SampleInput) -> Verdict:
    def function(first: Any, args: Any, kwargs: Any) -> Any:
        return case.op.op(first, *args, **kwargs)

    def run(call: Callable[..., Any], wide: bool = False) -> list[torch.Tensor]:
        made = (widened if wide else copied)((sample.input, sample.args, sample.kwargs))
        torch.manual_seed(case.digest)
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _values(case, sample, made, call)

    try:
        eager = run(function)
    except Exception as error:
        return Verdict(case.name, Outcome.NOT_OURS, f"eager: {_first_line(error)}")
    counting = Counting()
    torch._dynamo.reset()
    try:
        ours = run(torch.compile(function, backend=counting, dynamic=False))
    except Exception as error:
        return _failed(case, error, run, function)
    finally:
        torch._dynamo.reset()
    why = _compared(case, ours, eager, lambda: run(function, wide=True))
    if why:
        return _wrong(case, f"{why} {_shown(sample)}", run, function, eager)
    return Verdict(case.name, Outcome.PASSED if counting.graphs else Outcome.EAGER)


def _values(
    case: Case, sample: SampleInput, made: Any, call: Callable[..., Any]
) -> list[torch.Tensor]:
    """Results, and for gradients those of all inputs that need one."""
    leaves = [each for each in tensors_of(made) if each.requires_grad]
    result = call(*made)
    results = tensors_of(result)
    if not case.grad:
        return [each.detach() for each in results]
    summed = tensors_of(sample.output_process_fn_grad(result))
    summed = [each for each in summed if each.requires_grad]
    if not summed or not leaves:
        return [each.detach() for each in results]
    seeds = [torch.ones_like(each) * 0.5 + _ramp(each) for each in summed]
    grads = torch.autograd.grad(summed, leaves, seeds, allow_unused=True)
    zeros = (torch.zeros(()) for _ in leaves)
    return [
        *(each.detach() for each in results),
        *(zero if g is None else g for g, zero in zip(grads, zeros, strict=True)),
    ]


def _ramp(like: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(-1, 1, like.numel(), dtype=torch.float64).reshape(like.shape)
    return ramp.to(like.dtype)


def _failed(
    case: Case, error: Exception, run: Callable[..., Any], function: Callable[..., Any]
) -> Verdict:
    """Ours, unless the same without our compiler fails as well."""
    torch._dynamo.reset()
    try:
        run(torch.compile(function, backend="aot_eager", dynamic=False))
    except Exception as other:
        return Verdict(case.name, Outcome.NOT_OURS, f"aot_eager: {_first_line(other)}")
    return Verdict(case.name, Outcome.ERROR, f"{_first_line(error)}  [{_place(error)}]")


def _wrong(
    case: Case,
    why: str,
    run: Callable[..., Any],
    function: Callable[..., Any],
    eager: list[torch.Tensor],
) -> Verdict:
    """Ours, unless the numbers are the same wrong ones without our compiler."""
    torch._dynamo.reset()
    other = run(torch.compile(function, backend="aot_eager", dynamic=False))
    if _compared(case, other, eager, lambda: run(function, wide=True)):
        return Verdict(case.name, Outcome.NOT_OURS, f"aot_eager is wrong as well: {why}")
    return Verdict(case.name, Outcome.WRONG, why)


def _compared(
    case: Case,
    ours: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
) -> str:
    why = _difference(case, ours, eager)
    if why and (case.dtype.is_floating_point or case.dtype.is_complex):
        return _beside_exact(why, ours, eager, exact)
    return why


def _difference(case: Case, ours: list[torch.Tensor], eager: list[torch.Tensor]) -> str:
    if len(ours) != len(eager):
        return f"{len(ours)} results instead of {len(eager)}"
    for mine, other in zip(ours, eager, strict=True):
        if mine.layout is not other.layout:
            return f"{mine.layout} instead of {other.layout}"
        try:
            if case.filled:
                torch.testing.assert_close(mine, other, equal_nan=True, rtol=1e-5, atol=1e-5)
            elif (mine.shape, mine.dtype) != (other.shape, other.dtype):
                return "another type"
        except AssertionError as error:
            return " ".join(str(error).split())[:160]
    return ""


def _beside_exact(
    why: str,
    ours: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: Callable[[], list[torch.Tensor]],
) -> str:
    """No difference after all where ours are as near to float64's numbers as eager's."""
    try:
        wide = exact()
        if _difference_of_places(ours, eager):
            return why
        mine, theirs = distance(ours, wide), distance(eager, wide)
    except Exception:
        return why
    return "" if mine <= 4 * theirs + 1e-6 else f"{why} (off by {mine:.1e}, eager {theirs:.1e})"


def _difference_of_places(ours: list[torch.Tensor], eager: list[torch.Tensor]) -> bool:
    """Whether other elements are infinite or no numbers, or whole numbers differ."""
    for mine, other in zip(ours, eager, strict=True):
        if mine.shape != other.shape or mine.dtype is not other.dtype:
            return True
        if not (mine.is_floating_point() or mine.is_complex()):
            if not torch.equal(mine, other):
                return True
        elif not torch.equal(torch.isfinite(mine), torch.isfinite(other)):
            return True
    return False


def _first_line(error: BaseException) -> str:
    while isinstance(inner := vars(error).get("inner_exception"), BaseException):
        error = inner  # Dynamo's wrapper names the backend and nothing else
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _place(error: BaseException) -> str:
    """Where in our own code it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        each
        for each in frames
        if "treadle" in each.filename and "site-packages" not in each.filename
    ]
    last = own[-1] if own else frames[-1]
    return f"{last.filename.rsplit('/treadle/', 1)[-1]}:{last.lineno}"


def _shown(sample: SampleInput) -> str:
    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{list(value.shape)}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(show, value))})"
        if isinstance(value, dict):
            return str({key: show(each) for key, each in value.items()})
        return str(value)

    return f"for {show(sample.input)} {show(sample.args)} {show(sample.kwargs)}"
