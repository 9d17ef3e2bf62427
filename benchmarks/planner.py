"""What a budget costs to plan: a step for an H200 that need not be there.

::

    python benchmarks/planner.py [--model gpt2] [--budgets 0.05,0.15,0.3,0.5,0.7,0.9]

A row for each budget: the exact peak of the plan, the estimated time of a step, how many plans were
scheduled to find it, and CPU seconds of this process: of those schedules, and of all, capture left
out.
"""

import argparse
import time
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
from treadle.passes.memory.choose import plan_memory
from treadle.util.collector import without_collector
from treadle.util.sizes import format_bytes


def captured(name: str) -> tuple[StepGraph, Target]:
    """The step of a preset, in bfloat16 with AdamW and a clip."""
    preset = PRESETS[name]
    sizes = argparse.Namespace(layers=preset.layers, vocabulary=preset.vocabulary, dropout=0.0)
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
def row(step: StepGraph, target: Target, budget: float) -> str:
    """The plan within one budget, as a line of the table."""
    target = replace(target, options=replace(target.options, memory=budget))
    began = time.process_time()
    evaluator, judged = ScheduledPeaks(target, known_of(step)), list[float]()

    def judge(candidate: StepGraph, /) -> int:
        asked_at = time.process_time()
        peak = evaluator(candidate)
        judged.append(time.process_time() - asked_at)
        return peak

    asked = target.options.budget
    assert asked is not None
    plan = plan_memory(versions_of(step, target), asked, target.hardware, judge)
    seconds, milliseconds = time.process_time() - began, 1e3 * plan.seconds
    peak = format_bytes(plan.peak_bytes)
    spent = f"{len(judged):4} schedules in {sum(judged):.2f} of {seconds:.2f} s"
    return f"{budget:6} {peak:>12} {milliseconds:8.2f} ms {spent}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2", choices=PRESETS)
    parser.add_argument("--budgets", default="0.05,0.15,0.3,0.5,0.7,0.9")
    given = parser.parse_args()
    step, target = captured(given.model)
    for budget in given.budgets.split(","):
        print(row(step, target, float(budget)), flush=True)


if __name__ == "__main__":
    main()
