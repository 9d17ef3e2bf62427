"""How far plans of small steps are from the best: chains of layers and a U-Net, on a CPU.

::

    python benchmarks/optimal_plans.py [--steps chain6,chain10,unet] [--points 5]

These are the cases of the literature on rematerialisation: a chain whose layers all take the same
memory and time, and a network whose first results are read by its last layers. Layers are library
calls alone: products, or convolutions. Each row is one plan of the simulated frontier: its
estimated time, relative to the fastest; its peak; the proved lower bound; the smallest peak of
plans that are as fast (``passes/memory/solvers/exact.py`` says of which), how far the plan is above
it, and the CPU seconds that the integer program took.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle
from treadle.capture.step import capture
from treadle.compiler.cleaning import cleaned
from treadle.graph.core.signature import StepGraph
from treadle.passes.memory.bound import PeakBound
from treadle.passes.memory.search import candidates
from treadle.passes.memory.solvers.exact import retention_optimum
from treadle.targets.cpu import CPU_MODEL
from treadle.util.sizes import format_bytes


def chain(layers: int) -> tuple[nn.Module, Tensor]:
    """Equal layers, one after the other."""
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)]), torch.empty(
        4096, 64, device="meta"
    )


class UNet(nn.Module):
    """Two levels down and two up; each level up reads the result of its level down."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 16), (16, 32), (32, 64)
        self.downs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1 if a == 3 else 2, 1, bias=False) for a, b in sizes
        )
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2, bias=False) for a, b in sizes[:0:-1]
        )
        self.out = nn.Conv2d(16, 3, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            kept.append(x)
        kept.pop()
        for up in self.ups:
            x = up(x) + kept.pop()
        return self.out(x)


STEPS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain6": lambda: chain(6),
    "chain8": lambda: chain(8),
    "chain10": lambda: chain(10),
    "unet": lambda: (UNet(), torch.empty(8, 3, 64, 64, device="meta")),
}


def captured(make: Callable[[], tuple[nn.Module, Tensor]]) -> StepGraph:
    """A training step of a model, on the CPU."""
    with torch.device("meta"):
        model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    objects = {"models": {"": model}, "optimizers": {"": optimizer}}
    found = capture(train, **objects, args=(batch,), kwargs={}, place=torch.device("cpu"))
    return cleaned(found.step, treadle.Options())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default="chain6,chain8,unet", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--points", type=int, default=6, help="plans of each frontier at most")
    given = parser.parse_args()
    for name in given.steps.split(","):
        step = captured(STEPS[name])
        bound, plans = PeakBound.of(step, CPU_MODEL), list(candidates(step, CPU_MODEL))
        print(f"{name}: {len(bound.facts.nodes)} nodes, {len(plans)} plans", flush=True)
        for plan in plans[:: max(-(-len(plans) // given.points), 1)]:
            began = time.process_time()
            found = retention_optimum(bound, plan.seconds)
            spent = time.process_time() - began
            proved = bound.within(plan.seconds)
            least = max(found.bound_bytes if found else 0, proved)
            is_solved = "" if found and found.is_optimal else " (not solved to the end)"
            ratio = plan.seconds / plans[0].seconds
            print(
                f"  {ratio:5.3f} x {format_bytes(plan.predicted_peak):>11}"
                f"  bound {format_bytes(proved):>11}  optimum {format_bytes(least):>11}"
                f"  plan {plan.predicted_peak / least:5.3f} x  {spent:6.1f} s{is_solved}",
                flush=True,
            )


if __name__ == "__main__":
    main()
