"""What a budget costs to plan: a step for an H200 that need not be there.

::

    python benchmarks/planner.py [--model gpt2] [--layers 36] [--budgets 0.05,0.15,0.3,0.5,0.7,0.9]
        [--solvers cut,greedy,dynamic,integer]

First the nodes of the step, and CPU seconds of one cut, of the simulated frontier of one version,
and of its lower bound. Then a row for each budget and solver: the exact peak of the plan, the least
that any plan as fast has, the estimated time of a step, how many plans were scheduled to find it,
and CPU seconds of this process: of those schedules, and of all, capture left out.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from language_models import PRESETS
from torch import Tensor

import treadle
from treadle.capture.step import capture
from treadle.compiler.chunks import versions_of
from treadle.compiler.cleaning import cleaned
from treadle.compiler.memory import ScheduledPeaks, known_of
from treadle.compiler.target import Target
from treadle.graph.core.signature import StepGraph
from treadle.passes.memory.bound import PeakBound
from treadle.passes.memory.choose import Plans
from treadle.passes.memory.classify import classify
from treadle.passes.memory.cut import cheapest_cut
from treadle.passes.memory.fused import recompute_costs
from treadle.passes.memory.order import facts_of
from treadle.passes.memory.search import candidates
from treadle.util.collector import without_collector
from treadle.util.planning.planner import SOLVERS
from treadle.util.sizes import format_bytes


def captured(name: str, layers: int | None = None) -> tuple[StepGraph, Target]:
    """The step of a preset, in bfloat16 with AdamW and a clip."""
    preset = PRESETS[name]
    layers = layers or preset.layers
    sizes = argparse.Namespace(layers=layers, vocabulary=preset.vocabulary, dropout=0.0)
    with torch.device("meta"):
        model = preset.make(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.empty(preset.batch, preset.length, dtype=torch.int64, device="meta")

    def train(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    objects = {"models": {"": model}, "optimizers": {"": optimizer}}
    found = capture(train, **objects, args=(tokens,), kwargs={}, place=torch.device("cpu"))
    target = Target("cuda", treadle.Options(memory=1.0), like="h200")
    return cleaned(found.step, target.options), target


@without_collector()
def row(step: StepGraph, target: Target, budget: float, solver: str) -> str:
    """The plan within one budget, as a line of the table."""
    options = replace(target.options, memory=budget, planner=solver)
    target = replace(target, options=options)
    began = time.process_time()
    evaluator, judged = ScheduledPeaks(target, known_of(step)), list[float]()

    def judge(candidate: StepGraph, /) -> int:
        asked_at = time.process_time()
        peak = evaluator(candidate)
        judged.append(time.process_time() - asked_at)
        return peak

    asked = target.options.budget
    assert asked is not None
    plans = Plans.of(versions_of(step, target), target.hardware, judge, options.method)
    chosen = plans.within(plans.as_bytes(asked))
    seconds = time.process_time() - began
    if chosen is None:
        return f"{budget:6} {solver:8} no plan fits"
    milliseconds, peak = 1e3 * plans.points[chosen].seconds, plans.exact(chosen)
    bound = plans.bound(chosen)
    spent = f"{len(judged):4} schedules in {sum(judged):.2f} of {seconds:.2f} s"
    proved = f"at least {format_bytes(bound):>10} ({peak / bound:.2f} x)"
    return f"{budget:6} {solver:8} {format_bytes(peak):>12} {proved} {milliseconds:8.2f} ms {spent}"


@without_collector()
def parts(step: StepGraph, target: Target) -> str:
    """What one cut, one simulated frontier and one lower bound cost, as a line."""
    facts, hardware = facts_of(step), target.hardware
    fused = recompute_costs(facts, hardware)
    prices = [nbytes * hardware.bandwidth for nbytes in fused.again]
    claims = classify(facts)
    seconds = [
        _seconds(lambda: cheapest_cut(facts, claims, prices, products=True)),
        _seconds(lambda: list(candidates(step, hardware))),
        _seconds(lambda: PeakBound.of(step, hardware).within(fused.once)),
    ]
    cut, frontier, bound = seconds
    nodes = len(facts.nodes)
    return f"{nodes} nodes: cut {cut:.3f} s, frontier {frontier:.2f} s, bound {bound:.2f} s"


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2", choices=PRESETS)
    parser.add_argument("--budgets", default="0.05,0.15,0.3,0.5,0.7,0.9")
    parser.add_argument("--layers", type=int, help="default: the model's own")
    parser.add_argument("--solvers", default="cut", help=f"of {', '.join(SOLVERS)}")
    given = parser.parse_args()
    step, target = captured(given.model, given.layers)
    print(parts(step, target), flush=True)
    for budget in filter(None, given.budgets.split(",")):
        for solver in given.solvers.split(","):
            print(row(step, target, float(budget), solver), flush=True)


if __name__ == "__main__":
    main()
