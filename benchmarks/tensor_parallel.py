"""A tensor-parallel step with sequence parallelism on several ranks: eager DTensor beside treadle,
with and without asynchronous tensor parallelism, in turns in one run.

::

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--width 512] [--layers 2]
        [--tokens 1024] [--batch 1] [--rounds 20] [--unmeasured]

Prints, for the slowest rank, the median milliseconds of a step, its ratio to eager's, the
milliseconds that the timeline of the step says and the share of communication that it says nothing
hides, the promised peak (MiB), and the collectives of one step. ``--unmeasured``: plan with told
times of collectives, all of which count as hidden beside compute. On GPUs over NCCL, on CPUs over
Gloo.
"""

import argparse
import copy
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import treadle
from treadle.runtime.store.artifact import CallStep


class Block(nn.Module):
    """Norm, a wide product, GELU, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gelu = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.gelu(self.up(self.norm(x))))


def divided(net: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose products are divided among the ranks, and the tokens between them."""
    model, mesh = copy.deepcopy(net), init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model.children():
        parallelize_module(block, mesh, plan)
    ahead = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    return parallelize_module(model, mesh, {"0": ahead})


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).full_tensor().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ways(
    net: nn.Module, device: torch.device, *, measure: bool
) -> dict[str, Callable[..., torch.Tensor]]:
    """Each with a model and an optimizer of its own."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = divided(net, device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compiled(**given: bool):
        model, optimizer = made()
        options = treadle.Options(measure=measure, **given)
        step = training(model, optimizer)
        return treadle.compile(step, model=model, optimizer=optimizer, options=options)

    return {
        "eager": training(*made()),
        "treadle": compiled(),
        "treadle, overlap=True": compiled(overlap=True),
        "treadle, async_tensor_parallel=True": compiled(async_tensor_parallel=True),
        "treadle, both": compiled(overlap=True, async_tensor_parallel=True),
    }


def told(step: object) -> str:
    """What is known of the variant that ran last."""
    if not isinstance(step, treadle.Step):
        return ""
    artifact = step.compiled.artifact
    line = step.simulate(ranks=dist.get_world_size()).timeline
    calls = [each.out for each in artifact.steps if isinstance(each, CallStep)]
    kinds = Counter(each.split(".")[1] for each in calls if each.startswith("treadle_c10d."))
    kinds.pop("wait", None)
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    times = f"{1e3 * line.seconds:8.2f} ms  {line.exposed_share:6.1%}"
    return f"{times}  {artifact.peak_bytes / 2**20:8.2f}  {sent}"


def seconds_of(step: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    step(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    found = torch.tensor(time.perf_counter() - begin, device=x.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"width": 512, "layers": 2, "tokens": 1024, "batch": 1, "rounds": 20}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--unmeasured", action="store_true", help="plan with told times")
    given = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(given.width) for _ in range(given.layers)]).to(device)
    x = torch.randn(given.batch, given.tokens, given.width, device=device)
    steps = ways(net, device, measure=not given.unmeasured)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(given.rounds + 3):
        for name, step in steps.items():
            found = seconds_of(step, x)
            if round_ >= 3:  # the first ones compile
                taken[name].append(found)
    words = {name: told(step) for name, step in steps.items()}
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {given.batch} x {given.tokens} tokens, {device.type}"
        )
        medians = {name: statistics.median(each) for name, each in taken.items()}
        first = next(iter(medians.values()))
        for name, found in medians.items():
            line = f"{name:36} {1e3 * found:8.2f} ms {found / first:5.2f}  {words[name]}"
            print(line.rstrip())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
