"""An ordinary PyTorch loop with treadle: scheduler, accumulation, checkpoint, resume.

::

    python examples/plain_loop.py [--steps 60] [--eager] [--checkpoint FILE]
    torchrun --nproc-per-node 2 examples/plain_loop.py

With ``--checkpoint`` the loop stops half-way, writes everything to FILE, starts again from it, and
ends where an uninterrupted run ends. Prints the losses, first and last. On several ranks each has
its share of every batch, and the loss is that of all of them.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import treadle


def make(
    dropout: float,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(dropout), nn.Linear(64, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return model, optimizer, scheduler


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, 16, generator=generator)
    y = x[:, :4].argmax(1)
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return x[rank::ranks], y[rank::ranks]
    return x, y


def mean_over_ranks(loss: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train(
    first: int,
    last: int,
    state: dict | None = None,
    *,
    eager: bool = False,
    dropout: float = 0.1,
):
    """Steps ``first`` to ``last``, from ``state`` if there is one: losses, and the state after."""
    model, optimizer, scheduler = make(dropout)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
    step = training_step(model, optimizer)
    if not eager:
        parallel = treadle.DataParallel() if dist.is_initialized() else None
        step = treadle.compile(step, model=model, optimizer=optimizer, parallel=parallel)
    losses = []
    for number in range(first, last):
        losses.append(mean_over_ranks(step(*batch(number))))
        scheduler.step()
    assert eager or first == last or step.compiled.has_run, "nothing was compiled"
    after = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    return losses, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group()
    half = options.steps // 2 if options.checkpoint else options.steps
    losses, state = train(0, half, eager=options.eager)
    if options.checkpoint:
        torch.save(state, options.checkpoint)
        state = torch.load(options.checkpoint, weights_only=True)
        losses += train(half, options.steps, state, eager=options.eager)[0]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
