"""What the host does in a call of a step, in µs by stage, where kernels take next to no time.

    python benchmarks/host_time.py                    on the CPU
    python benchmarks/host_time.py --recorded         likewise, with recordings that do nothing
    python benchmarks/host_time.py --device cuda      on a GPU: recorded steps, and not recorded

::

    variant   is anything other than at the last call        actions  launches and library calls
    inputs    the user's tensors, in order                   results  views of what holds them
    turn      checks of numbers, what undoes the call        apply    gradients, counters, state
    begin     bind what moved, threads                       return   hooks of what is pending

Medians of 40 calls, of the fastest of ``--parts`` times 40, without collections of garbage. Then
actions are timed one by one: µs for each launch with its kernel, for each library call with its
kernel, and for the rest (allocating and releasing).
"""

import argparse
import functools
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from guards import gpt2
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.runtime.execute.actions import Actions
from treadle.runtime.execute.executable import Executable
from treadle.runtime.execute.library_calls import CallAllocating, CallInto
from treadle.runtime.kernels.launch_table import LaunchTable
from treadle.runtime.replay import recording_plan
from treadle.runtime.replay.replay import Replay
from treadle.runtime.replay.replay_policy import Launches
from treadle.runtime.store.artifact import Launch
from treadle.session import serve
from treadle.session.variants.dispatch import Dispatcher

Case = tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]
STAGES = ("variant", "inputs", "turn", "begin", "actions", "results", "apply", "return")


def trained(model: nn.Module, batch: tuple[Tensor, ...], **options: Any) -> Case:
    """One step of a classifier."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, batch


def mlp(device: str, dropout: float = 0.0) -> Case:
    """Three layers."""
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    batch = torch.randn(2, 8, device=device), torch.randint(4, (2,), device=device)
    return trained(model, batch)


class Block(nn.Module):
    """Two convolutions with their norms, around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


def residual(device: str, blocks: int = 8, width: int = 4) -> Case:
    """Convolutions and buffers."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *[Block(width) for _ in range(blocks)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4),
    ).to(device)  # fmt: skip
    batch = torch.randn(2, 3, 4, 4, device=device), torch.randint(4, (2,), device=device)
    return trained(model, batch)


def language_model(device: str) -> Case:
    """GPT-2 of twelve layers of tiny width."""
    step, model, optimizer, (tokens,) = gpt2()
    model.to(device)  # the parameters stay the same objects
    return step, model, optimizer, (tokens.to(device),)


CASES: dict[str, Callable[[str], Case]] = {
    "GPT-2, 12 layers": language_model,
    "three layers": mlp,
    "with dropout": lambda device: mlp(device, dropout=0.1),
    "convolutions": residual,
}


@dataclass
class Stamps:
    """When stages of a call ended, by name, in ns."""

    ended: dict[str, int]

    def after(self, holder: Any, name: str, stage: str) -> None:
        """``stage`` ends when the function ``name`` of ``holder`` does."""
        own = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            try:
                return own(*args, **kwargs)
            finally:
                self.ended[stage] = time.perf_counter_ns()

        setattr(holder, name, timed)

    def before(self, holder: Any, name: str, stage: str) -> None:
        """``stage`` ends when it begins."""
        own = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.ended[stage] = time.perf_counter_ns()
            return own(*args, **kwargs)

        setattr(holder, name, timed)

    @staticmethod
    def placed() -> "Stamps":
        """At the borders of what treadle runs in a call."""
        stamps = Stamps({})
        stamps.after(Dispatcher, "variant", "variant")
        stamps.after(serve, "read_inputs", "inputs")
        stamps.before(serve, "perform", "turn")
        stamps.before(Actions, "run", "begin")
        stamps.after(Actions, "run", "actions")
        stamps.before(torch.cuda.CUDAGraph, "replay", "begin")
        stamps.after(torch.cuda.CUDAGraph, "replay", "actions")
        stamps.after(Executable, "run", "results")
        stamps.after(serve, "apply_outputs", "apply")
        return stamps

    def of_call(self, call: Callable[[], object]) -> list[float]:
        """µs of each stage of a call, and of all."""
        start = time.perf_counter_ns()
        call()
        self.ended["return"] = time.perf_counter_ns()
        at, spent = start, []
        for stage in STAGES:
            spent.append((self.ended[stage] - at) / 1e3)
            at = self.ended[stage]
        return [*spent, (at - start) / 1e3]


class NoWork:
    """Records launches, and does nothing where a GPU would replay them."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """A call that launching takes all the time of."""
        run()
        return 1.0, 1.0

    def start(self) -> None:
        """Nothing is to be prepared."""

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """The results of this call are those of all later ones."""
        return run(), self._replay

    def _replay(self) -> None:
        self._stamps.ended["begin"] = self._stamps.ended["actions"] = time.perf_counter_ns()


def record(executable: Executable, stamps: Stamps) -> None:
    """Calls on the CPU are replayed from now on, whatever they call."""
    recording_plan.may_wait = lambda *_, **__: False
    policy = executable.policy
    assert policy is not None
    executable.replay = Replay(executable.artifact, executable.frame, NoWork(stamps), policy)


def medians(row: Callable[[], list[float]], count: int) -> list[float]:
    """Of each column of ``count`` rows."""
    return list(map(statistics.median, zip(*(row() for _ in range(count)), strict=True)))


KINDS = ("launches", "calls", "rest")


def kind_of(action: Any) -> str:
    """Of an action of an artifact."""
    if isinstance(action, CallInto | CallAllocating):
        return "calls"
    alone = isinstance(action, functools.partial) and not isinstance(action, LaunchTable)
    return "rest" if alone else "launches"


def timed_actions(actions: Actions, call: Callable[[], object], parts: int) -> dict[str, float]:
    """µs of a call in actions of each kind. The clock's own time is taken off."""
    program = actions.program(0, len(actions.flat)).actions
    plain = list(program)
    spent = dict.fromkeys(KINDS, 0)

    def timed(action: Callable[[], object]) -> Callable[[], object]:
        kind = kind_of(action)

        def run() -> None:
            begun = time.perf_counter_ns()
            action()
            spent[kind] += time.perf_counter_ns() - begun

        return run

    counts = Counter(map(kind_of, plain))
    clock = min(-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(1000))
    program[:] = map(timed, plain)

    def of_call() -> list[float]:
        spent.update(dict.fromkeys(KINDS, 0))
        call()
        return [(spent[kind] - counts[kind] * clock) / 1e3 for kind in KINDS]

    best = min((medians(of_call, 40) for _ in range(parts)), key=sum)
    program[:] = plain
    return dict(zip(KINDS, best, strict=True))


def report(name: str, stamps: Stamps, given: argparse.Namespace) -> None:
    """Print what one case takes."""
    torch.manual_seed(0)
    function, model, optimizer, batch = CASES[name](given.device)
    replay = given.device == "cuda" and not given.launched
    options = treadle.Options(replay=replay)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    step(*batch)
    if given.recorded:
        record(step.compiled.executable, stamps)
    for _ in range(30):
        step(*batch)
    gc.collect()
    gc.disable()
    parts = [medians(lambda: stamps.of_call(lambda: step(*batch)), 40) for _ in range(given.parts)]
    each = dict(zip((*STAGES, "all"), min(parts, key=lambda part: part[-1]), strict=True))
    compiled = step.prepare(*batch)
    recorded = compiled.executable.is_recorded
    before = sum(each[stage] for stage in STAGES[:4])
    after = sum(each[stage] for stage in STAGES[5:])
    print(f"{name}{', recorded' if recorded else ''}: {each['all']:.0f} µs a call, ", end="")
    print(f"{before:.0f} before the first launch, {after:.0f} after the last")
    print("    " + "  ".join(f"{stage} {each[stage]:.1f}" for stage in STAGES))
    if not recorded:
        actions = compiled.executable.frame.actions
        spent = timed_actions(actions, lambda: step(*batch), given.parts)
        steps = compiled.artifact.steps
        kernels = [len(step.buffers) for step in steps if isinstance(step, Launch)]
        launches = len(kernels)
        print(
            f"    {launches} launches of {sum(kernels)} kernels, "
            f"{spent['launches'] / max(1, launches):.2f} µs each; "
            f"{len(steps) - launches} library calls, "
            f"{spent['calls'] / max(1, len(steps) - launches):.2f} each; "
            f"allocating and releasing {spent['rest']:.1f}"
        )
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recorded", action="store_true", help="on the CPU, recordings of nothing")
    parser.add_argument("--launched", action="store_true", help="on a GPU, without recordings")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--parts", type=int, default=10, help="of 40 calls each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    stamps = Stamps.placed()
    for name in CASES:
        if given.only in name:
            report(name, stamps, given)


if __name__ == "__main__":
    main()
