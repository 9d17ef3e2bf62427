"""A transformer of many blocks with one foreign operation each: regions, kernels that they share,
and what the compile takes.

::

    python benchmarks/regions.py [--blocks 48] [--width 64]

Each line is a depth: regions of generated code and of PyTorch's kernels, generated functions and
their launches, breaks, seconds of the first compile, and seconds to find the regions again.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import treadle


@torch.library.custom_op("treadle_benchmark::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    """An operation that nothing is known of."""
    return torch.tanh(x)


@foreign.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


foreign.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].square()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Block(nn.Module):
    """Attention, and a feed-forward part with the foreign operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(foreign(F.gelu(self.up(self.second(x)))))


def measure(count: int, width: int, cache: Path) -> str:
    """One line for a model of ``count`` blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = treadle.Options(cache_dir=cache)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    x = torch.randn(2, 16, width)
    begin = time.perf_counter()
    step(x)
    compiled = time.perf_counter()
    regions = step.regions()
    found = time.perf_counter()
    native = sum(each.compiler == "native" for each in regions)
    numbers = step.summary()
    artifact = step.compiled.artifact
    functions = sum(len(each.functions) for each in artifact.sources)
    return (
        f"{count:3} blocks: {native} native and {len(regions) - native} eager regions, "
        f"{functions} functions in {artifact.kernel_count} launches, {numbers.fallbacks} breaks, "
        f"compile {compiled - begin:.1f} s, regions {found - compiled:.1f} s"
    )


def main() -> None:
    """Depths up to the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        for count in dict.fromkeys((3, 12, given.blocks)):
            print(measure(count, given.width, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
