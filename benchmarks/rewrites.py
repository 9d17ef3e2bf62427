"""What each rewrite gains: a small step with and without it, in turns.

::

    python benchmarks/rewrites.py [cuda] [--rounds 100] [--only NAME]

Ratio of the medians, without over with: above 1 the rewrite wins. Every line is one rewrite, alone,
after or taken out of the passes of ``compiler/cleaning.py``, on a program in which it fires.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import treadle
from treadle.compiler import cleaning
from treadle.graph.passes import GraphPass
from treadle.passes.batching import BatchProducts
from treadle.passes.constructors import CountConstants
from treadle.passes.joined_products import JoinProducts
from treadle.passes.joining import JoinPieces
from treadle.passes.products import (
    DECOMPOSE_OUTER,
    DECOMPOSE_VECTORS,
    AccumulateProducts,
    AddBiasInProduct,
    SplitBias,
)

Program = Callable[..., Tensor]
CALLS = 5


@dataclass(frozen=True)
class Case:
    """A program, the shapes it is given, and the rewrite that fires in it."""

    name: str
    rewrite: GraphPass
    shapes: tuple[tuple[int, ...], ...]
    program: Program


def cut_cat(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.cat([x.sin(), y.cos()], 1).split([x.shape[1], y.shape[1]], 1)
    return (a * 2).sum() + (b * 3).sum()


def nested_cat(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y], 1)
    return torch.cat([joined, joined[:, :8]], 1) * 2


def running_sum(x: Tensor) -> Tensor:
    return x * torch.cumsum(torch.ones_like(x), 1)


def sum_of_products(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ v + y @ w) * 2


def three_products(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return x @ v + y @ w + (x @ w) * 1


def outer(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).tanh() * 0.5


def stored_bias(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return (x @ w + b) @ v


def read_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w).relu() * 2


def column(x: Tensor, y: Tensor) -> Tensor:
    return (x.sin() @ y) * 2


def projections(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (x @ u) * (x @ v) + (x @ w).sin()


def joined_columns(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x @ v, x @ w], 1).sin()


def stored_columns(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x @ v, x @ w], 1) @ torch.cat([v, w], 1).t()


CASES = (
    Case("split of a cat", JoinPieces(), ((512, 256), (512, 256)), cut_cat),
    Case("cat of a cat", JoinPieces(), ((512, 256), (512, 256)), nested_cat),
    Case("running sum of ones", CountConstants(), ((512, 512),), running_sum),
    *(
        Case(
            f"sum of products, {m} x {k} x {m}",
            AccumulateProducts(),
            ((m, k), (m, k), (k, m), (k, m)),
            sum_of_products,
        )
        for m, k in ((64, 64), (512, 64), (512, 512))
    ),
    Case("outer product", DECOMPOSE_OUTER, ((1024, 1), (1, 1024)), outer),
    *(
        Case(
            f"bias of a stored sum, {m} x {k} x {m}",
            AddBiasInProduct(),
            ((m, k), (k, m), (m,), (m, 16)),
            stored_bias,
        )
        for m, k in ((64, 64), (512, 64), (512, 512))
    ),
    *(
        Case(
            f"bias for a formula, {m} x {k} x {m}",
            SplitBias(),
            ((m, k), (k, m), (m,)),
            read_bias,
        )
        for m, k in ((64, 64), (512, 64), (512, 512))
    ),
    *(
        Case(f"cat of products, {m} x {k}, {name}", JoinProducts(), ((m, k), (k, k), (k, k)), each)
        for name, each in (("for a formula", joined_columns), ("stored", stored_columns))
        for m, k in ((512, 64), (4096, 64), (1024, 256))
    ),
    Case("column of dots", DECOMPOSE_VECTORS, ((4096, 256), (256, 1)), column),
    Case("row of dots", DECOMPOSE_VECTORS, ((1, 256), (256, 4096)), column),
    *(
        Case(
            f"three products of {m} x {k}",
            BatchProducts(),
            ((m, k), (k, k), (k, k), (k, k)),
            projections,
        )
        for m, k in ((8, 32), (64, 64), (1024, 256))
    ),
)


@dataclass(frozen=True)
class Firing(GraphPass):
    """A pass that notes how often it found something."""

    inner: GraphPass
    found: list[int]

    def run(self, step: treadle.StepGraph) -> int:
        self.found.append(self.inner.run(step))
        return self.found[-1]


@contextmanager
def only(passes: tuple[GraphPass, ...]):
    """Inside, steps are cleaned by ``passes``."""
    before = cleaning.CLEAN, cleaning.FUSE
    cleaning.CLEAN, cleaning.FUSE = passes, ()
    try:
        yield
    finally:
        cleaning.CLEAN, cleaning.FUSE = before


def compiled(case: Case, inputs: list[Tensor], *, rewrite: bool) -> Callable[[], object]:
    others = tuple(each for each in cleaning.CLEAN if each != case.rewrite)
    firing = Firing(case.rewrite, [])
    passes = (*others, firing) if rewrite else others
    options = treadle.Options(cache_dir=Path(tempfile.mkdtemp()))  # passes are no part of its keys
    model = nn.Linear(1, 1).to(inputs[0].device)
    step = treadle.compile(case.program, model=model, options=options)
    with only(passes), torch.no_grad():
        for _ in range(3):
            step(*inputs)
    assert bool(firing.found) == rewrite, case.name
    assert all(firing.found), f"{case.name}: it finds nothing"
    return lambda: step(*inputs)


def seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    wait()
    return (time.perf_counter() - begin) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    given = parser.parse_args()
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    print("| rewrite | without, µs | with, µs | ratio |")
    print("|---|---|---|---|")
    for case in CASES:
        if given.only not in case.name:
            continue
        inputs = [torch.randn(shape, device=given.device) for shape in case.shapes]
        runs = [compiled(case, inputs, rewrite=each) for each in (False, True)]
        times: list[list[float]] = [[], []]
        with torch.no_grad():
            for _ in range(given.rounds):
                for taken, run in zip(times, runs, strict=True):
                    taken.append(seconds(run, wait))
        without, having = (1e6 * statistics.median(each) for each in times)
        print(
            f"| {case.name} | {without:.0f} | {having:.0f} | {without / having:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
