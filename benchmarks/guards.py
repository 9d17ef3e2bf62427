"""What a call pays for knowing that nothing it depends on has changed, before anything runs.

    python benchmarks/guards.py

The wanted bound is 100 µs a call for transformers' GPT-2 with 12 layers.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treadle

WANTED_US = 100.0


def gpt2(
    layers: int = 12, *, width: int = 16, vocabulary: int = 61, length: int = 8
) -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]:
    """Layers of tiny width: many modules, little arithmetic."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=2, vocab_size=vocabulary, n_positions=length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, (torch.randint(vocabulary, (2, length)),)


def small() -> tuple[Callable[..., Tensor], nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]:
    """One layer, and a loss that a dict of settings scales."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"scale": 2.0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * settings["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, (torch.randn(2, 4), torch.randn(2, 4))


CASES = {"GPT-2, 12 layers": gpt2, "one layer": small}


def check_us(make: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Median and 90th percentile of ``Step.prepare`` for a variant that is known; and seconds of
    the processor for the first one, which is captured and compiled to PyTorch's kernels."""
    torch.manual_seed(0)
    function, model, optimizer, batch = make()
    step = treadle.compile(
        function, model=model, optimizer=optimizer, options=treadle.Options(codegen=False)
    )
    begun = time.process_time()
    step.prepare(*batch)
    first = time.process_time() - begun
    for _ in range(3):
        step(*batch)
    known = len(step.recompiles)
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        step.prepare(*batch)
        times.append((time.perf_counter() - start) * 1e6)
        step(*batch)  # between two checks everything is written once
    assert len(step.recompiles) == known, step.recompiles
    return statistics.median(times), statistics.quantiles(times, n=10)[-1], first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in CASES.items():
        median, slow, first = check_us(make, given.repeats)
        verdict = "within" if median <= WANTED_US else "over"
        print(
            f"{name:18} {median:8.1f} µs a call (90 %: {slow:.1f}), "
            f"{verdict} the wanted {WANTED_US:.0f} µs; the first: {first:.1f} s of the processor"
        )


if __name__ == "__main__":
    main()
