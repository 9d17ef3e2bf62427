"""Bytes that the kernels of a language model's step move on a GPU: with values computed again, with
rows and columns reduced by one kernel, and without either.

::

    python benchmarks/values_at_hand.py [--model llama-271m] [--layers 4]

Nothing runs and no GPU is needed: the step is captured from a model that is not allocated, as for
CPUs, and planned for an H200. Bytes are those that generated kernels read and write, each buffer
once a kernel.
"""

import argparse
from dataclasses import replace
from unittest import mock

import torch
from language_models import PRESETS, make_optimizer, make_step

from treadle.capture.step import capture
from treadle.compiler.cleaning import cleaned
from treadle.compiler.memory import applied, plan_within, planned
from treadle.compiler.request import Target
from treadle.loop.kernel import Kernel, KernelPlan
from treadle.options import Options
from treadle.schedule import workers
from treadle.schedule.plan import plan_reads, plan_writes

VARIANTS = (
    ("stored", False, workers.THREADS.sweeps),
    ("computed again", True, workers.THREADS.sweeps),
    ("and both ways", True, workers.PROGRAMS.sweeps),
)


def moved(plan: KernelPlan) -> tuple[int, float]:
    """Kernels, and the gigabytes that they move."""
    kernels = [each for each in plan.steps if isinstance(each, Kernel)]
    names = [name for each in kernels for name in plan_reads(each) | plan_writes(each)]
    return len(kernels), sum(plan.buffers[name].nbytes for name in names) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="llama-271m")
    parser.add_argument("--layers", type=int, help="default: the model's own")
    given = parser.parse_args()
    preset = PRESETS[given.model]
    given.layers, given.vocabulary = given.layers or preset.layers, preset.vocabulary
    given.dropout = 0.0
    with torch.device("meta"):
        model = preset.make(given).train()
    optimizer = make_optimizer(model, fused=False)
    captured = capture(
        make_step(model, optimizer, model),
        models={"model": model},
        optimizers={"optimizer": optimizer},
        args=(torch.empty(preset.batch, preset.length, dtype=torch.int64, device="meta"),),
        kwargs={},
        place=torch.device("cpu"),
    )
    options = Options()
    step = cleaned(captured.step, options)
    for name, again, sweeps in VARIANTS:
        chosen = replace(workers.PROGRAMS, computes_again=again, sweeps=sweeps)
        with mock.patch.dict(workers.WORKERS, {"programs": chosen}):
            target = Target("cuda", options, like="h200", kept=captured.kept_bytes)
            memory, evaluated = plan_within(step, target)
            plan = (evaluated or planned(applied(step, memory), target)).plan
        kernels, gigabytes = moved(plan)
        peak = plan.peak_bytes / 2**30
        print(f"{name:16} {kernels:5} kernels  {gigabytes:8.2f} GB  peak {peak:.3f} GiB")


if __name__ == "__main__":
    main()
