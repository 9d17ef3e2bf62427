"""What each rewrite gains: a small step with and without it, in turns.

::

    python benchmarks/rewrites.py [cuda] [--rounds 100] [--only NAME]

Ratio of the medians, without over with: above 1 the rewrite wins. Every line is one rewrite, alone,
after or taken out of the passes of ``compiler/cleaning.py``, on a program in which it fires; or
what the scheduler does with products that are joined (``schedule/joined.py``).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import treadle
from treadle.compiler import cleaning
from treadle.graph.rewrite.passes import GraphPass
from treadle.passes.cleanup.constructors import CountConstants
from treadle.passes.cleanup.known_values import FoldConstants
from treadle.passes.products.batching import BatchProducts
from treadle.passes.products.joined_products import JoinProducts
from treadle.passes.products.narrow_weights import FoldWeightCast, ScaleInProduct
from treadle.passes.products.split_cat import SimplifySplitCat
from treadle.passes.products.sums import (
    DECOMPOSE_OUTER,
    DECOMPOSE_VECTORS,
    AccumulateProducts,
    AddBiasInProduct,
    SplitBias,
)
from treadle.passes.products.written_out import MULTIPLY_WRITTEN_OUT
from treadle.runtime.store.artifact import CallStep
from treadle.schedule.workers import WORKERS

Program = Callable[..., Tensor]
CALLS = 5


@dataclass(frozen=True)
class Case:
    """A program, the shapes and dtypes it is given, and the rewrite that fires in it: a pass, or
    the scheduler's if there is none."""

    name: str
    rewrite: GraphPass | None
    shapes: tuple[tuple[int, ...], ...]
    program: Program
    dtypes: tuple[torch.dtype, ...] = ()

    def inputs(self, device: str) -> list[Tensor]:
        """Made-up operands: normal numbers, or any whole ones."""
        dtypes = self.dtypes or (torch.float32,) * len(self.shapes)
        return [
            torch.randn(shape, device=device).to(dtype)
            if dtype.is_floating_point
            else torch.randint(-128, 128, shape, device=device).to(dtype)
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]


def cut_cat(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.cat([x.sin(), y.cos()], 1).split([x.shape[1], y.shape[1]], 1)
    return (a * 2).sum() + (b * 3).sum()


def nested_cat(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y], 1)
    return torch.cat([joined, joined[:, :8]], 1) * 2


def running_sum(x: Tensor) -> Tensor:
    return x * torch.cumsum(torch.ones_like(x), 1)


def table_of_sines(x: Tensor) -> Tensor:
    rates = torch.exp(torch.arange(x.shape[1], device=x.device) * -0.03)
    return x + (torch.arange(x.shape[0], device=x.device)[:, None] * rates).sin()


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


def three_linears(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    joined = torch.cat([x @ u, x @ v, x @ w], 1)
    return joined.t() @ joined


def mixed_pieces(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([x @ u, x @ v, x.sin()], 1)
    return joined.t() @ joined


def joined_rows(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x @ w, y @ w])


def cast_rows(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.to(x.dtype).t()


def cast_columns(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.to(x.dtype)


def packed_columns(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    numbers = torch.stack([w & 15, w >> 4], 1).flatten(0, 1)
    return x @ ((numbers.to(x.dtype) - 8) * s)


def scaled_rows(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x @ w.to(x.dtype).t()) * s


def pairs_of_rows(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] * y).sum(-1).relu()


def pairs_in_heads(x: Tensor, y: Tensor) -> Tensor:
    """Rows lie between batch and heads, as in state space models."""
    return (x[:, :, None] * y[:, None]).sum(-1).relu()


def values_in_heads(x: Tensor, y: Tensor) -> Tensor:
    return (x[..., None] * y[:, None]).sum(2).relu()


F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
CASES = (
    *(
        Case(
            f"pairs of {m} and {n} rows of {k}",
            MULTIPLY_WRITTEN_OUT,
            ((m, k), (n, k)),
            pairs_of_rows,
        )
        for m, n, k in ((256, 256, 32), (128, 256, 64), (1024, 1024, 64))
    ),
    *(
        Case(
            f"{name}, {b} x 64 x 24 x {k}",
            MULTIPLY_WRITTEN_OUT,
            ((b, 64, *middle), (b, 64, 24, k)),
            each,
        )
        for name, each, middle, k in (
            ("pairs in heads", pairs_in_heads, (24, 64), 64),
            ("values in heads", values_in_heads, (64, 24), 64),
        )
        for b in (1, 16)
    ),
    *(
        Case(f"{name}, {m} x {k}", None, ((m, k), *[(k, k)] * count), each)
        for name, count, each in (
            ("three Linears joined", 3, three_linears),
            ("a mixed cat", 2, mixed_pieces),
        )
        for m, k in ((64, 64), (512, 64), (4096, 64), (1024, 250), (1024, 256), (512, 512))
    ),
    *(
        Case(
            f"products one under the other, {m} x {k}", None, ((m, k), (m, k), (k, k)), joined_rows
        )
        for m, k in ((256, 64), (512, 64), (4096, 64), (512, 512))
    ),
    *(
        Case(
            f"{kind} to {wide}, {m} x {k} x {n}, {name}",
            FoldWeightCast(),
            ((m, k), at(k, n)),
            each,
            (wide, kind),
        )
        for name, each, at in (
            ("by rows", cast_rows, lambda k, n: (n, k)),
            ("by columns", cast_columns, lambda k, n: (k, n)),
        )
        for wide, kind in ((F32, I8), (F32, BF16), (BF16, I8))
        for m, k, n in ((1, 512, 512), (2, 512, 512), (1, 1024, 4096), (2, 1024, 4096))
    ),
    *(
        Case(
            f"4 bits to {wide}, {m} x {k} x {n}",
            FoldWeightCast(),
            ((m, k), (k // 2, n), (n,)),
            packed_columns,
            (wide, torch.uint8, wide),
        )
        for wide in (F32, BF16)
        for m, k, n in ((1, 512, 512), (2, 512, 512), (1, 1024, 4096), (2, 1024, 4096))
    ),
    *(
        Case(
            f"scaled int8, {m} x {k} x {n}",
            ScaleInProduct(),
            ((m, k), (n, k), (n,)),
            scaled_rows,
            (BF16, I8, BF16),
        )
        for m, k, n in (
            (1, 512, 512),
            (8, 512, 512),
            (1, 1024, 4096),
            (8, 1024, 4096),
            (8, 4096, 4096),
        )
    ),
    Case("split of a cat", SimplifySplitCat(), ((512, 256), (512, 256)), cut_cat),
    Case("cat of a cat", SimplifySplitCat(), ((512, 256), (512, 256)), nested_cat),
    Case("table of sines", FoldConstants(), ((512, 256),), table_of_sines),
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


@contextmanager
def joining(joins: bool):
    """Inside, products are written where they are joined, or nowhere."""
    never = {"joins": 0}
    changed = {name: each if joins else replace(each, **never) for name, each in WORKERS.items()}
    with mock.patch.dict(WORKERS, changed):
        yield


def scheduled(case: Case, inputs: list[Tensor], *, rewrite: bool) -> Callable[[], object]:
    options = treadle.Options(cache_dir=Path(tempfile.mkdtemp()))  # this is no part of its keys
    step = treadle.compile(
        case.program, model=nn.Linear(1, 1).to(inputs[0].device), options=options
    )
    with joining(rewrite), torch.no_grad():
        for _ in range(3):
            step(*inputs)
    steps = step.compiled.artifact.steps
    placed = any(isinstance(each, CallStep) and each.into is not None for each in steps)
    assert placed == rewrite, case.name
    return lambda: step(*inputs)


def compiled(case: Case, inputs: list[Tensor], *, rewrite: bool) -> Callable[[], object]:
    if case.rewrite is None:
        return scheduled(case, inputs, rewrite=rewrite)
    others = tuple(each for each in cleaning.CLEAN if each != case.rewrite)
    firing = Firing(case.rewrite, [])
    passes = (*others, firing) if rewrite else others
    skip = ("FoldConstants",) if isinstance(case.rewrite, FoldConstants) else ()  # not in CLEAN
    options = treadle.Options(cache_dir=Path(tempfile.mkdtemp()), skip=skip)  # not of its passes
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
        inputs = case.inputs(given.device)
        try:
            runs = [compiled(case, inputs, rewrite=each) for each in (False, True)]
        except (AssertionError, treadle.TreadleError) as error:  # rewrites for CPUs, on GPUs
            print(f"| {case.name} | | | {error} |", flush=True)
            continue
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
