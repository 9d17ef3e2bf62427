"""Random programs out of what the rewrites touch, before and after all passes of the clean stage.

python tests/passes/test_generated_graphs.py --examples 5000

Compared: the numbers of every output (bit for bit where no product changed; else no farther from
float64 than a few times what eager is), its strides, which outputs share memory with each other or
with inputs, and that each pass finds nothing in a second run.
"""

import argparse
import collections
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from testing import trace
from treadle.compiler.cleaning import CLEAN, FUSE, OPTIONAL
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.text.printing import show

aten = torch.ops.aten
PRODUCTS = frozenset({
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mul.Tensor,
    aten.sum.dim_IntList,
})  # fmt: skip
"""Products, and what they may become."""

Instruction = tuple[str, int, int, int]
"""An operation, and three numbers to choose its operands by."""
Apply = Callable[["Pool", int, int, int], Iterator[Tensor]]
NUMBERS = (0.0, 0.5, 1.0, 2.0, -3.0, 0.1)


class Pool:
    """The values of a program so far."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.values = list(inputs)
        self.dtype = inputs[0].dtype

    def pick(self, at: int, fits: Callable[[Tensor], bool] = lambda _: True) -> Tensor | None:
        """One of those that fit, the later ones under low numbers."""
        found = [each for each in reversed(self.values) if fits(each)]
        return found[at % len(found)] if found else None


def cut(x: Tensor, dim: int, length: int) -> tuple[Tensor, ...]:
    if not x.shape[dim]:  # one piece; of fake tensors PyTorch 2.11 only knows that by its size
        return torch.split(x, [0], dim)
    return torch.split(x, max(length % 4, 1), dim)


def pointwise(pool: Pool, i: int, j: int, _k: int) -> Iterator[Tensor]:
    x = pool.pick(i)
    assert x is not None
    yield (torch.sin, torch.neg, torch.clone, lambda x: x * 0.5, lambda x: x + 1)[j % 5](x)


def add(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i)
    assert x is not None
    y = pool.pick(j, lambda y: y.shape == x.shape or (y.ndim == 1 and y.shape == x.shape[-1:]))
    if y is not None:
        yield y + x if k % 2 else x + y


def product(pool: Pool, i: int, j: int, _k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim in (2, 3))
    if x is not None:
        y = pool.pick(j, lambda y: y.ndim == 2 and y.shape[0] == x.shape[-1])
        if y is not None:
            yield torch.matmul(x, y)


def two_products(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim == 2)
    y = None if x is None else pool.pick(j, lambda y: y.ndim == 2 and y.shape[0] == x.shape[-1])
    if x is not None and y is not None:
        turn = torch.t if k % 3 == 0 else torch.neg if k % 3 == 1 else torch.clone
        yield turn(x @ y) + turn(x.sin() @ y)


def addmm(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim == 2)
    y = None if x is None else pool.pick(j, lambda y: y.ndim == 2 and y.shape[0] == x.shape[-1])
    if x is not None and y is not None:
        ends = (x.shape[0], y.shape[1])
        b = pool.pick(k, lambda b: b.shape in (ends, ends[1:]))
        if b is not None:
            yield torch.addmm(b, x, y)


def biased(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    """Some are returned, or a factor of the next one, and nothing else."""
    x = pool.pick(i, lambda x: x.ndim in (2, 3))
    y = None if x is None else pool.pick(j, lambda y: y.ndim == 2 and y.shape[0] == x.shape[-1])
    if x is not None and y is not None:
        row = y.new_full((y.shape[1],), 0.25).cos()
        total = torch.matmul(x, y) + row
        yield total if k % 3 == 0 else torch.matmul(total, y.t())


def joined_products(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim in (2, 3))
    y = None if x is None else pool.pick(j, lambda y: y.ndim == 2 and y.shape[0] == x.shape[-1])
    if x is not None and y is not None:
        if k % 2 or x.ndim == 3:
            yield torch.cat([torch.matmul(x, y), torch.matmul(x, y[:, :1].sin())], -1)
        else:
            yield torch.cat([x @ y, x.sin() @ y])


def turn(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim == 2)
    if x is not None:
        yield (x.t(), x.t().t(), x.reshape(-1), x.reshape(-1).reshape(x.shape), x[None])[j % 5]


def split(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim > 0)
    if x is not None:
        yield from cut(x, j % x.ndim, k)[:4]


def split_and_cat(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim > 0)
    if x is not None:
        pieces = cut(x, j % x.ndim, k)
        yield torch.cat(pieces[:: -1 if k % 5 == 0 else 1], j % x.ndim)


def cat(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim > 0)
    if x is not None:
        dim = k % x.ndim
        ends = [n for d, n in enumerate(x.shape) if d != dim]
        y = pool.pick(
            j,
            lambda y: y.ndim == x.ndim and [n for d, n in enumerate(y.shape) if d != dim] == ends,
        )
        assert y is not None
        if x.shape[dim] + y.shape[dim] <= 24:
            yield torch.cat([x, y], dim)


def slice_of(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim > 0)
    if x is not None:
        dim = j % x.ndim
        start = k % (x.shape[dim] + 1)
        yield x.narrow(dim, start, (j + k) % (x.shape[dim] - start + 1))


def stack(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim < 3)
    y = None if x is None else pool.pick(j, lambda y: y.shape == x.shape)
    if x is not None and y is not None:
        stacked = torch.stack([x, y], k % (x.ndim + 1))
        yield stacked
        yield stacked.select(k % (x.ndim + 1), j % 2)


def unbind(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    x = pool.pick(i, lambda x: x.ndim > 1 and 0 not in x.shape)
    if x is not None:
        rows = torch.unbind(x, j % x.ndim)
        yield torch.stack(rows, j % x.ndim)
        yield rows[k % len(rows)]


def constant(pool: Pool, i: int, j: int, k: int) -> Iterator[Tensor]:
    number, shape = NUMBERS[i % len(NUMBERS)], ((3,), (2, 3), (5, 0), (1, 7))[j % 4]
    filled = torch.full(shape, number, dtype=pool.dtype)
    yield torch.cumsum(filled, k % len(shape))
    yield filled


def counting(pool: Pool, i: int, _j: int, _k: int) -> Iterator[Tensor]:
    yield torch.arange(i % 6, dtype=pool.dtype)


OPERATIONS: dict[str, Apply] = {
    each.__name__: each
    for each in (
        *(
            pointwise,
            add,
            product,
            two_products,
            addmm,
            biased,
            joined_products,
            turn,
            split,
            split_and_cat,
        ),
        *(cat, slice_of, stack, unbind, constant, counting),
    )
}
SIZES = st.sampled_from([0, 1, 2, 3, 5])
CHOICE = st.integers(0, 60)
PROGRAMS = st.tuples(
    st.tuples(SIZES, SIZES),
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), CHOICE, CHOICE, CHOICE),
        min_size=2,
        max_size=14,
    ),
    st.lists(CHOICE, min_size=1, max_size=3),
)
Case = tuple[tuple[int, int], list[Instruction], list[int]]


def program_of(case: Case) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    _, instructions, returned = case

    def program(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        pool = Pool((x, y, z))
        for name, *numbers in instructions:
            pool.values += list(OPERATIONS[name](pool, *numbers))
        made = Pool(tuple(pool.values[3:]) or (x.neg(),))
        return [each for at in returned if (each := made.pick(at)) is not None]

    return program


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    (m, n), _, _ = case
    made = torch.Generator().manual_seed(m * 7 + n)
    return tuple(torch.randn(shape, generator=made) for shape in ((m, n), (n, m), (n,)))  # type: ignore[return-value]


def products_in(step: StepGraph) -> collections.Counter[object]:
    return collections.Counter(n.target for n in step.graph.nodes if n.target in PRODUCTS)


def shared_pairs(step: StepGraph) -> set[tuple[int, int]]:
    """Which outputs share memory: with each other, and with inputs (as negative numbers)."""
    aliases = analyse(step)
    outputs = [node for node in step.returned if node is not None]
    others = [*enumerate(outputs), *((-1 - i, node) for i, node in enumerate(step.placeholders))]
    return {
        (i, j)
        for i, left in enumerate(outputs)
        for j, right in others
        if i != j and aliases.share(left, right)
    }


def difference(case: Case, fired: collections.Counter[str], *, optional: bool) -> str:
    """What is wrong after the passes; empty if nothing is. ``fired``: which of them did work."""
    program, inputs = program_of(case), inputs_of(case)
    step = trace(program, *inputs)
    before = step.copy()
    for each in (*CLEAN, *FUSE, *(OPTIONAL if optional else ())):
        (report,) = run_passes(step, [each])
        fired[report.name] += report.matches > 0
        if each.run(step):
            return f"{each} found something in a second run"
    if shared_pairs(step) - shared_pairs(before):
        return "outputs share memory that did not"
    exact = program(*(each.double() for each in inputs))
    eager, ours = run_step(before, inputs), run_step(step, inputs)
    same = products_in(step) == products_in(before)
    for at, (new, old, wanted) in enumerate(zip(ours, eager, exact, strict=True)):
        assert new is not None
        assert old is not None
        if _strides(step, at) != _strides(before, at):
            return f"output {at} has other strides"
        if same and not torch.equal(new, old):
            return f"output {at} has other bits"
        allowed = 8 * _far(old, wanted) + 1e-5 * (1 + _far(wanted, wanted * 0))
        if new.shape != old.shape or _far(new, wanted) > allowed:
            return f"output {at} is {_far(new, wanted)} from float64, eager {_far(old, wanted)}"
    return ""


def _strides(step: StepGraph, at: int) -> list[int]:
    node = step.returned[at]
    assert node is not None
    value = value_of(node)
    return [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1] * bool(
        value.numel()
    )


def _far(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right).abs().max()) if left.numel() else 0.0


@settings(max_examples=100, deadline=None)
@given(PROGRAMS, st.booleans())
def test_generated_graphs(case, optional):
    assert difference(case, collections.Counter(), optional=optional) == ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=1000)
    examples = parser.parse_args().examples
    found: collections.Counter[str] = collections.Counter()
    fired: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()

    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=HealthCheck
    )
    @given(PROGRAMS, st.booleans())
    def run(case: Case, optional: bool) -> None:
        fired["examples"] += 1
        words = difference(case, fired, optional=optional)
        if words:
            found[words] += 1
            print(words, case, show(trace(program_of(case), *inputs_of(case))), sep="\n")

    run()
    for name, count in fired.items():
        print(f"{name}: {count}")
    print(f"{sum(found.values())} differences in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
