"""A small training step as Triton modules under the interpreter, compared with eager.

``test_triton_step.py`` runs this file in a process of its own, where ``TRITON_INTERPRET`` was set
before triton was imported. Arguments: a folder for modules, ``float32`` or ``bfloat16``, and
``chosen`` or ``large``: with the loops that such small sizes get, or with those of large ones.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.capture.step import capture
from treadle.codegen.host import artifact_of
from treadle.compiler.cleaning import clean
from treadle.loop.kernel import Kernel, KernelKind, KernelSchedule, LoopForm
from treadle.loop.nest import running_sums
from treadle.lower.graph import lower
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build, build
from treadle.runtime.kernels.triton_launch import TritonLauncher
from treadle.runtime.store.artifact import Launch
from treadle.runtime.store.cache import Cache
from treadle.schedule.launches import launches_of
from treadle.schedule.plan import schedule
from treadle.schedule.programs import choose
from treadle.schedule.workers import PROGRAMS, Workers
from treadle.session.bind import apply_outputs, read_inputs


def rotated(x: Tensor) -> Tensor:
    """Positions as angles, half of the width against the other half."""
    places = torch.arange(x.shape[-2]).float()[:, None] * torch.ones(x.shape[-1]) / 3
    left, right = x.chunk(2, -1)
    return (x * places.cos() + torch.cat([-right, left], -1) * places.sin()).to(x.dtype)


class Net(nn.Module):
    """Tied embedding, layer norm, a rotary embedding, attention, an MLP, dropout: what a language
    model is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        self.norm = nn.LayerNorm(24)
        self.qkv = nn.Linear(24, 72)
        self.up, self.down = nn.Linear(24, 50), nn.Linear(50, 24)
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        heads = (each.unflatten(-1, (3, 8)).transpose(1, 2) for each in self.qkv(h).chunk(3, -1))
        q, k, v = heads
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        h = h + attended.transpose(1, 2).flatten(2)
        h = h + self.down(F.gelu(self.up(self.norm(h)), approximate="tanh"))
        return self.head(F.dropout(h, 0.1, self.training))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype):
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def of_large_sizes(kernel: Kernel) -> KernelSchedule:
    """Rows in tiles, their largest and its sum in one pass; rows and columns at once anyway."""
    running = tuple(running_sums(kernel))
    if not running or kernel.kind is not KernelKind.ROWS:
        return choose(kernel)
    return KernelSchedule(LoopForm.LOOPED, 1, 8, running=running, warps=4)


LARGE = replace(PROGRAMS, choose=of_large_sizes, sweeps=lambda rows, cols, sums: rows > 1)


def main(folder: Path, dtype: torch.dtype, workers: Workers) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    # A small eps would turn gradients that are zero but for rounding into whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    eager = make_step(twin, other, dtype)
    batches = [(torch.randint(19, (2, 7)), torch.randint(19, (2, 7))) for _ in range(3)]
    captured = capture(
        make_step(model, optimizer, dtype),
        models={"": model},
        optimizers={"": optimizer},
        args=batches[0],
        kwargs={},
    )
    plan = schedule(lower(clean(captured.step), device="cpu"), workers=workers)
    kernels = [each for each in plan.steps if isinstance(each, Kernel)]
    assert any(each.kind is KernelKind.BOTH for each in kernels) == (workers is LARGE)
    assert any(each.scheduled.running for each in kernels) == (workers is LARGE)
    artifact = artifact_of(plan, launches_of(plan), device="cpu", language="triton")
    machine = build(Cache(folder), device="cpu")  # the compiler is for the draws
    loaders = {**machine.loaders, "triton": TritonLauncher(folder)}
    executable = Executable(artifact, Build("triton", loaders))
    launches = sum(isinstance(step, Launch) for step in artifact.steps)
    print(f"{launches} launches of {len(plan.steps)} steps")
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.03}
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss = apply_outputs(captured, executable.run(read_inputs(captured, list(batch))))
        torch.manual_seed(number)
        torch.testing.assert_close(loss, eager(*batch), **close)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **close)


if __name__ == "__main__":
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    loops = {"chosen": PROGRAMS, "large": LARGE}
    main(Path(sys.argv[1]), dtypes[sys.argv[2]], loops[sys.argv[3]])
