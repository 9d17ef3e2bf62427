"""How long Triton compiles the device code of a step, without a GPU: GPT-2, as it is planned for an
H200 and compiled for compute capability 9.0.

    python benchmarks/device_code.py                one function after another, then in processes
    python benchmarks/device_code.py --layers 48    of so many layers

The first line is what the first launches of a step take, one after another (``--longest``: the
functions that take longest); the second what ``runtime/kernels/triton_ahead.py`` takes in their
place, with a worker for each core. Seconds; each line with an empty cache of Triton's.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.codegen.host import artifact_of
from treadle.compiler.cleaning import cleaned
from treadle.compiler.memory import planned
from treadle.compiler.target import Target
from treadle.options import from_environment
from treadle.runtime.kernels import triton_launch, triton_worker
from treadle.runtime.kernels.triton_ahead import CompileJob, compile_ahead
from treadle.runtime.kernels.triton_modules import module_of
from treadle.runtime.store.artifact import Artifact, Launch
from treadle.schedule.launches import launches_of
from treadle.targets.cuda import CUDA

H200 = ("cuda", 90, 32)


def artifact(layers: int) -> Artifact:
    """The step on the meta device, as launches."""
    config = transformers.GPT2Config(n_layer=layers, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.empty(8, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    captured = capture(
        train,
        models=named_models(model),
        optimizers=named_optimizers(optimizer),
        args=(tokens,),
        kwargs={},
        place=torch.device("cpu"),
    )
    target = Target(CUDA.device, from_environment(), like="h200")
    plan = planned(cleaned(captured.step, target.options), target).plan
    return artifact_of(plan, launches_of(plan), device=CUDA.device, language=CUDA.language)


def jobs_of(step: Artifact, folder: Path) -> list[CompileJob]:
    """What the launches of ``step`` ask of Triton, the longest functions first."""
    (source,) = step.sources
    module = module_of(folder, source.text)
    launches = [each for each in step.steps if isinstance(each, Launch)]
    launches.sort(key=lambda launch: -len(source.function(launch.function)))
    jobs = (job for launch in launches for job in triton_launch._jobs(module, launch))
    return list({job.line: job for job in jobs}.values())


@contextmanager
def empty_cache():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--longest", type=int, default=3)
    given = parser.parse_args()
    driver.set_active(triton_worker._Driver(GPUTarget(*H200)))
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(artifact(given.layers), Path(folder))
        seconds: dict[str, float] = {}
        with empty_cache():
            for job in jobs:
                began = time.perf_counter()
                triton_worker._compile(json.loads(job.line))
                seconds[job.function] = time.perf_counter() - began
        longest = sorted(seconds.items(), key=lambda pair: -pair[1])[: given.longest]
        told = ", ".join(f"{name} {spent:.2f}" for name, spent in longest)
        print(f"one after another: {len(jobs)} functions in {sum(seconds.values()):.1f} s; {told}")
        with empty_cache():
            began = time.perf_counter()
            assert len(compile_ahead(jobs, H200)) == len(jobs)
            cores = len(os.sched_getaffinity(0))
            print(f"{cores} workers: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
