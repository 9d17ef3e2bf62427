"""``torch.compile(model, backend="treadle")`` beside ``torch.compile`` and eager: whole training
steps, of which the backend has the forward and the backward, and the optimizer is PyTorch's fused.

::

    python benchmarks/backend.py [--model gpt2,bert,resnet50,vit] [--only eager,compile,backend]
        [--steps 5] [--timed 20] [--profile] [--small]

``step`` is ``treadle.compile`` of the whole step, optimizer included. ``--model`` takes all of
``networks.py``: language models, experts, a state space model, an LSTM, diffusion, vision.

On a GPU bf16 autocast, float32 parameters and AdamW; ``--small``: few and small layers, for CPUs.
Every variant starts from the same weights, sees the same batches, and runs in a process of its own.
``loss``: the largest relative distance to eager's. Time is the median of ``--timed`` steps, and
``host`` what the host took until all was launched. ``GiB`` is the peak that PyTorch's allocator
reports, without the memory of recordings; ``held`` what it reserved at most, recordings included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from networks import NETWORKS, Batch
from torch import Tensor

GIB = 2**30
VARIANTS = {"eager": None, "compile": "inductor", "backend": "treadle", "step": None}


def one(args: argparse.Namespace) -> None:
    """One model and variant, in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, batch_of, loss_of = NETWORKS[args.model](args.small)
    model.to(device).train()
    fused = on_gpu and args.only != "step"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None)
    backend = VARIANTS[args.only]
    forward: Any = model
    if backend == "treadle":
        from treadle.backend import treadle

        forward = torch.compile(model, backend=treadle)
    elif backend:
        forward = torch.compile(model, backend=backend)
    batches = [tuple(part.to(device) for part in batch_of()) for _ in range(4)]

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=on_gpu):
            loss = loss_of(forward, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if args.only == "step":
        import treadle as package

        step = package.compile(step, model=model, optimizer=optimizer)
    torch.manual_seed(1)
    began = time.perf_counter()
    losses = [step(batches[0]).item()]
    first = time.perf_counter() - began
    losses += [step(batches[at % 4]).item() for at in range(1, args.steps)]
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    hosts: list[float] = []
    for at in range(args.timed):
        _wait(on_gpu)
        began = time.perf_counter()
        step(batches[at % 4])
        hosts.append(1e3 * (time.perf_counter() - began))
        _wait(on_gpu)
        times.append(1e3 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    held = torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0
    row: dict[str, Any] = {"losses": losses, "first": first, "peak": peak, "held": held}
    row |= {"ms": statistics.median(times), "host": statistics.median(hosts)}
    if args.profile and on_gpu:
        row["profile"] = _profile(step, batches[0])
    if backend == "treadle":
        from treadle.backend import compiled

        row["graphs"] = [_told(graph) for graph in compiled()]
    print(json.dumps(row), flush=True)


def _told(graph: Any) -> str:
    told = graph.summary()
    return (
        f"{told.name}: {told.launches} launches, {told.library_calls} library calls, "
        f"{told.fallbacks} fallbacks, arena {told.arena_bytes / GIB:.2f} GiB, "
        f"peak {told.peak_predicted_bytes / GIB:.2f} GiB, {told.compile_seconds:.1f} s to compile"
    )


def _profile(step: Callable[[Batch], Tensor], batch: Batch) -> list[tuple[str, int, float]]:
    """Device time by kernel over three steps: name, count and milliseconds a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            step(batch)
        torch.cuda.synchronize()
    events = [event for event in trace.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [(e.key[:80], e.count // 3, e.self_device_time_total / 3000) for e in events[:40]]


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2,bert,resnet50,vit")
    parser.add_argument("--only", default="eager,compile,backend")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timed", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    args = parser.parse_args()
    if args.one:
        one(args)
        return 0
    flags = [f"--steps={args.steps}", f"--timed={args.timed}"]
    flags += ["--profile"] * args.profile + ["--small"] * args.small
    failed = 0
    places = f"{'GiB':>6} {'held':>6}"
    print(f"{'model':10} {'variant':9} {'ms':>8} {'host':>7} {places} {'first s':>8} {'loss':>9}")
    for model in args.model.split(","):
        eager: list[float] = []
        for variant in args.only.split(","):
            chosen = ["--one", f"--model={model}", f"--only={variant}"]
            told = subprocess.run(
                [sys.executable, __file__, *chosen, *flags],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if told.returncode:
                failed += 1
                print(f"{model:10} {variant:9} failed", flush=True)
                continue
            row = json.loads(told.stdout.splitlines()[-1])
            eager = eager or row["losses"]
            pairs = zip(row["losses"], eager, strict=True)
            distance = max(abs(a - b) / abs(b) for a, b in pairs)
            print(
                f"{model:10} {variant:9} {row['ms']:8.2f} {row['host']:7.2f} {row['peak']:6.2f} "
                f"{row['held']:6.2f} {row['first']:8.1f} {distance:9.1e}",
                flush=True,
            )
            for line in row.get("graphs", ()):
                print(f"    {line}")
            for name, count, ms in row.get("profile", ()):
                print(f"    {ms:8.3f} ms {count:5d}x {name}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
