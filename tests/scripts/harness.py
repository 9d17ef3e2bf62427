"""Runs a training script twice, as it stands and with its step left eager, and compares them.

A script says in its docstring what may compile its step again, one line for each time::

    again: dim 0: 16 -> 8      a part of the reason that ``recompiles`` has to give

and with ``loose: 1e-2`` by how much its numbers may differ where rounding is amplified.
"""

import contextlib
import functools
import io
import random
import re
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import treadle
from treadle.capture.refuse import named_models
from treadle.session.variants.compiling import VariantCompiler

PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = 1e-3
_TREADLES = re.compile(r"step\.(explain|recompiles|recaptures)")
"""What treadle's own warnings tell people to look at."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+|nan|inf)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Script:
    """A file, and what its docstring declares."""

    path: Path
    again: tuple[str, ...]
    tolerance: float

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass
class Ran:
    """What one run of a script left: its globals, its text, its warnings, and of each step its
    calls."""

    values: dict[str, object] = field(default_factory=dict)
    text: str = ""
    calls: dict[str, Callable[[], object]] = field(default_factory=dict)  # each step's last one
    steps: list[treadle.Step] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)  # texts of warnings, without their numbers


def scripts() -> list[Script]:
    return [script(path) for path in sorted(PROGRAMS.glob("*.py"))]


def script(path: Path) -> Script:
    text = path.read_text()
    again = tuple(re.findall(r"^again: (.+)$", text, re.MULTILINE))
    loose = re.findall(r"^loose: (\S+)$", text, re.MULTILINE)
    return Script(path, again, float(loose[0]) if loose else TOLERANCE)


def run(each: Script, *, eager: bool, shaken: float = 0.0) -> Ran:
    """The script as ``python script.py`` runs it, from the same random state every time.
    ``shaken``: by what part parameters are off before the first call."""
    ran, printed = Ran(), io.StringIO()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    with _replaced(ran, eager, shaken), contextlib.redirect_stdout(printed), _arguments(each):
        ran.values = runpy.run_path(str(each.path), run_name="__main__")
    ran.text = printed.getvalue()
    return ran


@contextlib.contextmanager
def _replaced(ran: Ran, eager: bool, shaken: float) -> Iterator[None]:
    """``treadle.compile`` leaves the step eager, or keeps account of it and of its calls."""
    models: list[nn.Module] = []  # that were shaken
    real = treadle.compile

    def compile(function: Callable[..., object], **how: Any) -> Callable[..., object]:
        name = f"{getattr(function, '__name__', 'step')} {len(ran.calls)}"
        if shaken:
            _shake(named_models(how.get("model")), models, shaken)
        if eager:
            return _noted(ran, name, function)
        step = real(function, **how)
        ran.steps.append(step)
        return _noted(ran, name, step)

    treadle.compile = compile
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield
    finally:
        treadle.compile = real
    ran.warned = {_NUMBER.sub("#", str(each.message)) for each in heard}


def _shake(given: Mapping[str, nn.Module], done: list[nn.Module], part: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for model in given.values():
        if all(model is not each for each in done):
            done.append(model)
            for p in filter(torch.numel, model.parameters()):
                by = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.data.add_(by * p.detach().abs().max(), alpha=part)


def _noted(ran: Ran, name: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function, updated=())
    def call(*args: object, **kwargs: object) -> object:
        ran.calls[name] = functools.partial(function, *args, **kwargs)
        return function(*args, **kwargs)

    ran.calls[name] = call
    return call


@contextlib.contextmanager
def _arguments(each: Script) -> Iterator[None]:
    before = sys.argv
    sys.argv = [str(each.path)]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def compiles() -> Iterator[dict[int, int]]:
    """How often each step compiles meanwhile, by its compiler."""
    counts: dict[int, int] = {}
    real = VariantCompiler.compile

    def counted(self: VariantCompiler, *args: Any, **kwargs: Any) -> Any:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return real(self, *args, **kwargs)

    VariantCompiler.compile = counted
    try:
        yield counts
    finally:
        VariantCompiler.compile = real


def unjustified(each: Script, ran: Ran, counts: Mapping[int, int]) -> list[str]:
    """Compiles after the first that the script does not declare, or that have no reason."""
    wrong: list[str] = []
    declared = list(each.again)
    for step in ran.steps:
        reasons = [*step.recompiles, *step.recaptures]
        for reason in reasons:
            found = [part for part in declared if part in reason]
            if found:
                declared.remove(found[0])
            else:
                wrong.append(reason)
        extra = counts.get(id(step._dispatcher._compiler), 0) - 1 - len(reasons)
        if extra > 0:
            wrong.append(f"{extra} compiles without a reason")
    return wrong


def differences(each: Script, eager: Ran, compiled: Ran, shaken: Ran) -> list[str]:
    """Where the globals and the printed text of two runs differ by more than rounding explains:
    ``shaken`` began with parameters that are off in the last bits."""
    found = list(Comparison(each.tolerance).of(_own(eager), _own(compiled), _own(shaken)))
    texts = [_NUMBER.sub("#", ran.text) for ran in (eager, compiled)]
    if texts[0] != texts[1]:
        found.append(f"the printed text differs: {eager.text[-200:]!r}, {compiled.text[-200:]!r}")
    warned = {text for text in compiled.warned if not _TREADLES.search(text)} - eager.warned
    return [*found, *(f"only the compiled run warns: {text}" for text in sorted(warned))]


def _own(ran: Ran) -> dict[str, object]:
    """A script's values; times and what the module itself holds are none."""
    return {
        name: value
        for name, value in ran.values.items()
        if not name.startswith("__") and not re.match(r"(t|t0|start|elapsed|seconds)$", name)
    }


@dataclass
class Comparison:
    """Of two runs' values, through containers, modules, optimizers and the script's own objects."""

    tolerance: float
    seen: set[int] = field(default_factory=set)

    def of(self, a: object, b: object, shaken: object, path: str = "") -> Iterator[str]:
        """Where ``a`` and ``b`` differ by more than ``a`` and ``shaken`` let expect."""
        if _is_number(a):
            if not self._is_close(a, b, shaken):
                yield f"{path}: {_shown(a)} and {_shown(b)}"
            return
        if id(a) in self.seen:
            return
        self.seen.add(id(a))
        parts, others, third = _parts(a), _parts(b), _parts(shaken)
        if parts.keys() != others.keys():
            yield f"{path}: other entries, {sorted(map(str, parts.keys() ^ others.keys()))[:4]}"
            return
        for name, value in parts.items():
            inner = f"{path}.{name}".lstrip(".")
            yield from self.of(value, others[name], third.get(name, value), inner)

    def _is_close(self, a: Any, b: Any, shaken: Any) -> bool:
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return False
        x, y, z = map(_numbers, (a, b, shaken))
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        scale = float(x.double().abs().max()) if x.numel() else 0.0
        alike = x.numel() > 0 and x.shape == z.shape
        noise = float((x.double() - z.double()).abs().max()) if alike else 0.0
        tolerance = self.tolerance if x.is_floating_point() else 0.0
        within = tolerance * min(scale, 1.0) + 1e-7 + 30 * noise
        return torch.allclose(x.double(), y.double(), rtol=tolerance, atol=within)


def _is_number(value: object) -> bool:
    kinds = Tensor | np.ndarray | np.generic | float
    return isinstance(value, kinds) or type(value) is int


def _numbers(value: Any) -> Tensor:
    found = torch.as_tensor(value.detach() if isinstance(value, Tensor) else value)
    found = found.to_dense() if found.is_sparse else found
    return torch.view_as_real(found) if found.is_complex() else found


def _parts(value: object) -> Mapping[object, object]:
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if isinstance(key, str | int | tuple)}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        gradients = {f"{n}.grad": p.grad for n, p in value.named_parameters() if p.grad is not None}
        return {**value.state_dict(), **gradients, "training": value.training}
    if isinstance(value, torch.optim.Optimizer):
        return value.state_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    if type(value).__module__ == "__main__" and not isinstance(value, types.FunctionType | type):
        return vars(value)
    return {}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.detach().flatten()[:3].tolist()}"
    return repr(value)[:80]


@dataclass(frozen=True)
class Outcome:
    """What is wrong with a script, and its runs."""

    wrong: Sequence[str]
    eager: Ran
    compiled: Ran


def outcome(each: Script) -> Outcome:
    with compiles() as counts:  # first: what eager fills (caches, registries) is not there yet
        compiled = run(each, eager=False)
    eager = run(each, eager=True)
    shaken = run(each, eager=True, shaken=1e-7)
    wrong = differences(each, eager, compiled, shaken) + unjustified(each, compiled, counts)
    return Outcome(wrong, eager, compiled)
