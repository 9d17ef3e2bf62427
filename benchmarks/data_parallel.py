"""A step on several ranks: eager ``DistributedDataParallel`` and ``fully_shard`` beside treadle, in
turns in one run.

::

    torchrun --nproc-per-node 2 benchmarks/data_parallel.py [--width 512] [--layers 6] [--rows 64]
        [--rounds 30] [--collectives] [--clip]

Prints, for the slowest rank, the median milliseconds of a step, its ratio to eager's, the peak that
treadle promises for the first rank (MiB), and the collectives of one step. ``--collectives``: and
the milliseconds of one collective of the bytes of all gradients, with nothing beside it.
``--clip``: gradients are clipped by their norm. On GPUs over NCCL, on CPUs over Gloo.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool
) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ways(net: nn.Module, *, clips: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """Each with a model and an optimizer of its own."""

    def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(net)
        if kind == "wrapped":
            model = DistributedDataParallel(model)
        if kind == "sharded":
            for module in (*model, model):
                fully_shard(module)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compiled(kind: str = "plain", shard: str | None = None, **given: object):
        model, optimizer = made(kind)
        parallel = treadle.DataParallel(shard=shard) if kind == "plain" else None
        options = treadle.Options(**given)
        return treadle.compile(
            training(model, optimizer, clips=clips),
            model=model,
            optimizer=optimizer,
            parallel=parallel,
            options=options,
        )

    return {
        "eager, DistributedDataParallel": training(*made("wrapped"), clips=clips),
        "treadle, DistributedDataParallel": compiled("wrapped"),
        "treadle, DataParallel": compiled(),
        "treadle, each collective by itself": compiled(buckets=0),
        "treadle, overlap=True": compiled(overlap=True),
        'treadle, shard="optimizer"': compiled(shard="optimizer"),
        "eager, fully_shard": training(*made("sharded"), clips=clips),
        "treadle, fully_shard": compiled("sharded"),
    }


def sent(step: object) -> str:
    if not isinstance(step, treadle.Step):
        return ""
    calls = [each.out for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    kinds = Counter(each.split(".")[1] for each in calls if each.startswith("treadle_c10d."))
    kinds.pop("wait", None)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def promised(step: object) -> str:
    """Of the variant that ran last."""
    if not isinstance(step, treadle.Step):
        return ""
    return f"{step.compiled.artifact.peak_bytes / 2**20:.2f}"


def collectives(net: nn.Module) -> dict[str, Callable[[torch.Tensor], object]]:
    """Of as many bytes as all gradients have, each without anything beside it. The argument, which
    steps have, is not read."""
    world = dist.get_world_size()
    count = sum(each.numel() for each in net.parameters())
    part = next(net.parameters()).new_zeros(-(-count // world))
    full = part.new_zeros(world * part.numel())
    return {
        "all-reduce": lambda _: dist.all_reduce(full),
        "reduce-scatter": lambda _: dist.reduce_scatter_tensor(part, full),
        "all-gather": lambda _: dist.all_gather_into_tensor(full, part),
    }


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
    for name, value in {"width": 512, "layers": 6, "rows": 64, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--collectives", action="store_true", help="time each alone as well")
    parser.add_argument("--clip", action="store_true", help="clip gradients by their norm")
    given = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(given.width) for _ in range(given.layers)]).to(device)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(given.rows, given.width, device=device)
    steps = ways(net, clips=given.clip)
    alone = collectives(net) if given.collectives else {}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(given.rounds + 3):
        for name, step in steps.items():
            found = seconds_of(step, x)
            if round_ >= 3:  # the first ones compile
                taken[name].append(found)
    sends = {
        name: [seconds_of(each, x) for _ in range(given.rounds + 3)][3:]
        for name, each in alone.items()
    }
    if dist.get_rank() == 0:
        size = sum(each.nbytes for each in net.parameters()) / 2**20
        print(f"{dist.get_world_size()} ranks, {size:.1f} MiB of gradients, {device.type}")
        medians = {name: statistics.median(each) for name, each in taken.items()}
        first = next(iter(medians.values()))
        for name, found in medians.items():
            step = steps[name]
            words = f"{found / first:5.2f}  {promised(step):>8}  {sent(step)}"
            print(f"{name:36} {1e3 * found:8.2f} ms  {words}".rstrip())
        for name, each in sends.items():
            print(f"{name + ' alone':36} {1e3 * statistics.median(each):8.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
