"""Sixty and more ordinary training steps, whole: eager against treadle, from the same start.

::

    python benchmarks/ordinary.py [--device cuda] [--small] [--only vit,gan] [--steps 3]
        [--repeats 10] [--seconds 300] [--apart] [--backend] [--json rows.json]

For each step of ``ordinary_steps`` two copies train on the same batches from the same random state.
``differ`` is the largest difference of any loss, parameter or buffer, relative to the largest
number of its tensor; ``noise`` the same between eager and eager whose parameters start 1e-7 off,
which is what rounding alone may do. A row is equal if it differs by less than 1e-4, or by less than
30 times the noise. ``time`` and ``peak`` are treadle's over eager's: medians over alternating
steps, and the peak of all tensor memory in a step. ``--apart`` runs each row in a process of its
own, so that a crash takes one row with it. ``--backend``: the models alone are compiled, by
``torch.compile(backend="treadle")``; ``again`` counts graphs beside the first. The exit status is 1
if a row is wrong or an error.
"""

import argparse
import gc
import json
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from ordinary_steps import generative, sequences, tables, training, vision
from ordinary_steps.kit import ROWS, Kit, Setup
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import treadle
from treadle.backend import compiled
from treadle.backend import treadle as backend
from treadle.compat.switches import clear_workspaces
from treadle.runtime.meter import measure_peak

FAMILIES = (vision, generative, sequences, tables, training)
"""Importing them fills the list."""

Values = dict[str, Tensor]


@dataclass
class Result:
    """One row of the table. ``status``: ``equal``, ``wrong`` or ``error``."""

    name: str
    status: str = "error"
    differ: float = float("nan")
    noise: float = float("nan")
    worst: str = ""
    time: float = float("nan")
    eager_ms: float = float("nan")
    peak: float = float("nan")
    fallbacks: int = -1
    recompiles: int = -1
    said: str = ""

    def text(self) -> str:
        found = (
            f"{self.name:28} {self.status:6} {self.differ:9.1e} {self.noise:9.1e} "
            f"{self.time:7.2f} {self.eager_ms:9.2f} {self.peak:6.2f} {self.fallbacks:5d} "
            f"{self.recompiles:5d}"
        )
        return f"{found}  {self.said or self.worst}"


HEAD = (
    f"{'step':28} {'':6} {'differ':>9} {'noise':>9} {'time':>7} {'eager ms':>9} {'peak':>6} "
    f"{'falls':>5} {'again':>5}"
)


def made(name: str, kit: Kit) -> Setup:
    """The step, its models in the same state whenever it is made."""
    torch.manual_seed(0)
    return ROWS[name](kit)


def _models(setup: Setup) -> list[nn.Module]:
    found = setup.models
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, list | tuple) else [found]


def _values(setup: Setup) -> Values:
    return {
        f"{at}.{name}": value
        for at, model in enumerate(_models(setup))
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def _compile_in_place(model: nn.Module) -> None:
    """What the step calls: of lists and dicts of modules each. ``nn.Module.compile`` would pass a
    ``Sequential`` over."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for part in model.children():
            _compile_in_place(part)
        return
    forward = model.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = torch.compile(called, backend=backend)


def trained(name: str, kit: Kit, steps: int, how: str) -> tuple[Values, Setup, Any]:
    """``steps`` steps ``how``: ``eager``, ``near`` (eager from 1e-7 off), ``treadle`` or
    ``backend``. Returns copies of all values after each step, the setup and what runs."""
    setup = made(name, kit)
    run: Any = setup.step
    if how == "treadle":
        run = treadle.compile(setup.step, model=setup.models, optimizer=setup.optimizers)
    if how == "backend":
        for model in _models(setup):
            _compile_in_place(model)
    if how == "near":
        with torch.no_grad():
            for model in _models(setup):
                for parameter in model.parameters():
                    parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape).to(parameter))
    seen: Values = {}
    for number in range(steps):
        torch.manual_seed(100 + number)
        batch = setup.batch()
        torch.manual_seed(200 + number)
        results = [each for each in pytree.tree_leaves(run(*batch)) if isinstance(each, Tensor)]
        named = {f"result {at}": each for at, each in enumerate(results)} | _values(setup)
        seen |= {f"{key} after {number + 1}": v.detach().clone() for key, v in named.items()}
    return seen, setup, run


def difference(ours: Values, theirs: Values) -> tuple[float, str]:
    """The largest, relative to the largest number of each tensor, and where it is."""
    if ours.keys() != theirs.keys():
        return float("inf"), f"only one has {sorted(ours.keys() ^ theirs.keys())[0]}"
    worst, where = 0.0, ""
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf"), f"{name}: {value.dtype}{list(value.shape)}"
        if not value.numel():
            continue
        wide = torch.complex128 if value.is_complex() else torch.float64
        a, b = value.to_dense().to(wide), other.to_dense().to(wide)
        bad = ~(a.isfinite() == b.isfinite()).all() or a.isnan().any() != b.isnan().any()
        gap = (a - b).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        size = max(b.abs().nan_to_num(0.0, 0.0, 0.0).max().item(), 1e-3)
        if bad or gap / size > worst:
            worst, where = (float("inf") if bad else gap / size), name
    return worst, where


def _wait(kit: Kit) -> None:
    if kit.device.type == "cuda":
        torch.cuda.synchronize()


def _timed(run: Callable[..., Any], batch: tuple[Any, ...], kit: Kit) -> float:
    _wait(kit)
    start = time.perf_counter()
    run(*batch)
    _wait(kit)
    return time.perf_counter() - start


def _peak(run: Callable[..., Any], setup: Setup, kit: Kit) -> float:
    """Of all tensors: on a GPU as the allocator says, less what other steps hold."""
    batch = setup.batch()
    held = [*_values(setup).values(), *(x for x in batch if isinstance(x, Tensor))]
    optimizers = setup.optimizers
    listed = optimizers.values() if isinstance(optimizers, dict) else optimizers
    for each in listed if isinstance(optimizers, list | dict) else [optimizers]:
        held += [v for s in each.state.values() for v in s.values() if isinstance(v, Tensor)]
    if isinstance(run, treadle.Step):
        return run.measure(*batch).peak_bytes
    return measure_peak(lambda: run(*batch), [each.detach() for each in held]).peak_bytes


def compare(name: str, kit: Kit, steps: int, repeats: int, how: str) -> Result:
    """One row. Errors of treadle are in it; those of eager are raised."""
    result = Result(name)
    eager, setup, run = trained(name, kit, steps, "eager")
    near, *_ = trained(name, kit, steps, "near")
    try:
        torch._dynamo.reset()
        known = len(compiled())
        ours, twin, step = trained(name, kit, steps, how)
        result.noise = difference(near, eager)[0]
        result.differ, result.worst = difference(ours, eager)
        good = result.differ <= max(1e-4, 30 * result.noise)
        result.status = "equal" if good else "wrong"
        if how == "backend":
            graphs = [each.summary() for each in compiled()[known:]]
            result.fallbacks = sum(each.fallbacks for each in graphs)
            result.recompiles = len(graphs) - 1
        else:
            result.fallbacks = len(step.compiled.artifact.fallbacks)
            result.recompiles = len(step.recompiles)
        times: dict[str, list[float]] = {"eager": [], "treadle": []}
        for at in range(repeats + 2):
            for key, each, of in (("eager", run, setup), ("treadle", step, twin)):
                taken = _timed(each, of.batch(), kit)
                if at >= 2:
                    times[key].append(taken)
        medians = {key: statistics.median(found) for key, found in times.items() if found}
        if medians:
            result.time = medians["treadle"] / medians["eager"]
            result.eager_ms = 1e3 * medians["eager"]
        ended = twin if how == "backend" else made(name, kit)
        peak = _peak(step, ended, kit) if kit.device.type == "cpu" else 0.0
        if kit.device.type == "cpu":
            result.peak = peak / max(_peak(run, setup, kit), 1)
    except TimeoutError:
        result.status, result.said = "error", "takes too long"
    except Exception as error:
        lines = str(error).splitlines() or [""]
        result.status, result.said = "error", f"{type(error).__name__}: {lines[0]}"[:160]
    return result


def peaks_on_gpu(name: str, kit: Kit, steps: int, how: str) -> float:
    """Treadle's peak over eager's, each alone on the device."""
    found: list[float] = []
    for each in ("eager", how):
        gc.collect()
        torch.cuda.synchronize()
        clear_workspaces()  # of products that ran before
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        _, setup, run = trained(name, kit, max(steps, 2), each)
        batch = setup.batch()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        run(*batch)
        torch.cuda.synchronize()
        found.append(torch.cuda.max_memory_allocated() - before)
        del setup, run, batch, _
    return found[1] / max(found[0], 1)


def _or_none(measured: Callable[[], float]) -> float | None:
    """Nothing where treadle fails; ``compare`` says why."""
    try:
        return measured()
    except TimeoutError:
        raise
    except Exception:
        return None


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """``TimeoutError`` after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def one(name: str, kit: Kit, options: argparse.Namespace) -> Result:
    """A row, whatever happens."""
    try:
        with within(options.seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            on_gpu = kit.device.type == "cuda"
            how = "backend" if options.backend else "treadle"
            peak = _or_none(lambda: peaks_on_gpu(name, kit, options.steps, how)) if on_gpu else None
            result = compare(name, kit, options.steps, options.repeats, how)
            result.peak = result.peak if peak is None else peak
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        result = Result(name, said=f"outside of treadle: {type(error).__name__}: {line}"[:160])
    gc.collect()
    return result


def one_apart(name: str, options: argparse.Namespace) -> Result:
    """A row in a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--device", options.device, "--line"]
    command += ["--steps", str(options.steps), "--repeats", str(options.repeats)]
    command += ["--seconds", str(options.seconds)] + ["--small"] * options.small
    command += ["--backend"] * options.backend
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds + 120, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(name, said="takes too long")
    lines = [each for each in done.stdout.splitlines() if each.startswith("{")]
    if not lines:
        said = (done.stderr.strip().splitlines() or [""])[-1]
        return Result(name, said=f"the process ended with {done.returncode}: {said}"[:160])
    return Result(**json.loads(lines[-1]))


def summary(rows: list[Result]) -> str:
    """How many are what, and which are not as they should be."""
    counts = {kind: [r for r in rows if r.status == kind] for kind in ("equal", "wrong", "error")}
    lines = [", ".join(f"{len(found)} {kind}" for kind, found in counts.items())]
    for kind in ("wrong", "error"):
        lines += [f"  {kind}: {', '.join(r.name for r in counts[kind])}"] if counts[kind] else []
    slower = [r for r in counts["equal"] if r.time > 1.0]
    if slower:
        shown = ", ".join(f"{r.name} {r.time:.2f}" for r in sorted(slower, key=lambda r: -r.time))
        lines.append(f"  slower than eager: {shown}")
    larger = [r for r in counts["equal"] if r.peak > 1.005]
    if larger:
        shown = ", ".join(f"{r.name} {r.peak:.2f}" for r in sorted(larger, key=lambda r: -r.peak))
        lines.append(f"  larger than eager: {shown}")
    times = [r.time for r in counts["equal"] if r.time == r.time]
    if times:
        lines.append(f"  time over eager's: geometric mean {statistics.geometric_mean(times):.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="ordinary steps, eager against treadle")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="sizes that run in no time")
    parser.add_argument("--only", default="", help="names of rows, with commas between")
    parser.add_argument("--steps", type=int, default=3, help="that are compared")
    parser.add_argument("--repeats", type=int, default=10, help="that are timed")
    parser.add_argument("--seconds", type=int, default=300, help="for a row")
    parser.add_argument("--apart", action="store_true", help="each row in its own process")
    parser.add_argument("--backend", action="store_true", help="torch.compile with it, not steps")
    parser.add_argument("--json", default="", help="where to write the rows")
    parser.add_argument("--line", action="store_true", help="rows as JSON")
    options = parser.parse_args()
    kit = Kit(torch.device(options.device), small=options.small)
    names = options.only.split(",") if options.only else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    rows: list[Result] = []
    if not options.line:
        print(f"{len(names)} steps on {options.device}\n{HEAD}", flush=True)
    for name in names:
        rows.append(one_apart(name, options) if options.apart else one(name, kit, options))
        print(json.dumps(asdict(rows[-1])) if options.line else rows[-1].text(), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(each) for each in rows], file, indent=1)
    if not options.line:
        print(summary(rows))
    return int(any(each.status != "equal" for each in rows))


if __name__ == "__main__":
    sys.exit(main())
