"""Generated Triton whose sizes each call says: one text, right for all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
import triton_cases as cases
import triton_kernels as make
from torch import Tensor
from triton_run import Case, Job, buffers_of, compare, rendered, results_of, scratch_tensors

from treadle.algebra.extents import Size, at
from treadle.loop.kernel import Kernel, KernelKind, LoopForm
from treadle.loop.program import Buffer
from treadle.runtime.store.artifact import step_at
from treadle.schedule.workers import PROGRAMS

pytest.importorskip("triton")


def dim(name: str, most: int, sample: int) -> Size:
    return Size.dim(name, 2, most, sample)


@dataclass(frozen=True)
class Sized:
    """``kernel`` of ``sizes``, which calls say within these; ``case`` of plain ones."""

    form: LoopForm
    kernel: Callable[..., Kernel]
    case: Callable[..., Case]
    most: tuple[int, ...]
    calls: tuple[tuple[int, ...], ...]

    def sizes(self) -> list[int]:
        samples = (5, 7) if len(self.most) == 2 else (11,)
        pairs = zip("nm", self.most, samples, strict=False)
        return [dim(name, most, sample) if most else 6 for name, most, sample in pairs]


def of_kind(kind: KernelKind) -> tuple[Callable[..., Kernel], Callable[..., Case]]:
    return (
        lambda rows, cols: make.every_reduction(rows, cols, kind),
        lambda rows, cols: cases.reductions_case(rows, cols, kind),
    )


def embedding(rows: int, cols: int) -> Kernel:
    return make.embedding(rows, cols, 11)


def adamw_case(n: int) -> Case:
    return Case("adamw", [make.adamw(n)], cases.adamw_tensors(n, ""))


SIZED = {
    "persistent": Sized(
        LoopForm.PERSISTENT, make.softmax, cases.softmax_case, (8, 300),
        ((2, 3), (3, 2), (5, 97), (8, 16), (7, 256), (8, 300)),
    ),
    "split rows": Sized(
        LoopForm.SPLIT, make.softmax, cases.softmax_case, (8, 40_000),
        ((2, 3), (3, 2049), (2, 4096), (2, 30_011)),
    ),
    "largest and sum": Sized(
        LoopForm.LOOPED, make.softmax, cases.softmax_case, (2000, 40_000),
        ((3, 2), (2, 4097), (3, 8192), (2, 12_289)),
    ),
    "every reduction": Sized(
        LoopForm.PERSISTENT, *of_kind(KernelKind.ROWS), (8, 100), ((2, 3), (7, 97), (8, 64)),
    ),
    "every reduction, few rows": Sized(
        LoopForm.LOOPED, *of_kind(KernelKind.COLUMNS), (9, 600_000), ((2, 3), (9, 1100), (7, 1024)),
    ),
    "every reduction, looped": Sized(
        LoopForm.LOOPED, *of_kind(KernelKind.ROWS), (4000, 20_000), ((2, 3), (2, 3001), (3, 1024)),
    ),
    "every reduction, columns": Sized(
        LoopForm.SPLIT, *of_kind(KernelKind.COLUMNS), (300, 8), ((3, 2), (97, 3), (128, 8)),
    ),
    "column sums": Sized(
        LoopForm.SPLIT, make.column_sums, cases.column_sums_case, (4000, 0),
        ((2, 6), (3, 6), (97, 6), (1024, 6), (4000, 6)),
    ),
    "norm": Sized(
        LoopForm.SWEPT, make.norm_backward, cases.norm_backward_case, (9000, 0),
        ((2, 6), (3, 6), (97, 6), (256, 6)),
    ),
    "one hot": Sized(
        LoopForm.TILED, make.one_hot, cases.one_hot_case, (40, 40), ((5, 3), (31, 37), (16, 32)),
    ),
    "embedding": Sized(
        LoopForm.TILED, embedding, cases.embedding_case, (40, 0), ((2, 6), (31, 6), (32, 6)),
    ),
    "transpose": Sized(
        LoopForm.TILED, make.transpose, cases.transpose_case, (90, 90),
        ((2, 3), (9, 33), (70, 5), (64, 80)),
    ),
    "total norm": Sized(
        LoopForm.SPLIT, make.total_norm, cases.total_norm_case, (90_000,),
        ((2,), (3,), (2048,), (40_009,)),
    ),
    "adamw": Sized(
        LoopForm.FLAT, make.adamw, adamw_case, (9000,), ((2,), (3,), (1024,), (4099,)),
    ),
}  # fmt: skip


def pattern(sized: Sized) -> tuple[list[Kernel], dict[str, Buffer]]:
    """The kernels of all sizes, and their buffers."""
    case = sized.case(*sized.calls[0])
    return [sized.kernel(*sized.sizes())], buffers_of(case.tensors)


def jobs_of(sized: Sized) -> tuple[list[Case], list[Job]]:
    kernels, buffers = pattern(sized)
    source, launches, everything = rendered(kernels, buffers)
    found = [sized.case(*call) for call in sized.calls]
    jobs: list[Job] = []
    for case, call in zip(found, sized.calls, strict=True):
        sizes = dict(zip("nm", call, strict=False))
        here = {name: at_sizes(buffer, sizes) for name, buffer in everything.items()}
        tensors = {**case.tensors, **scratch_tensors(case.tensors, here)}
        jobs.append(Job(source, [step_at(launch, sizes) for launch in launches], tensors))
    return found, jobs


def at_sizes(buffer: Buffer, sizes: Mapping[str, int]) -> Buffer:
    return replace(buffer, shape=tuple(at(n, sizes) for n in buffer.shape))


def test_one_text_agrees_with_the_interpreter_for_every_size(tmp_path, interpreted):
    """The smallest, primes, multiples of 16, the largest."""
    torch.manual_seed(0)
    expected, jobs = [], []
    for sized in SIZED.values():
        found, theirs = jobs_of(sized)
        expected += found
        jobs += theirs
    compare(expected, results_of(jobs, tmp_path, interpreted))


@pytest.mark.parametrize("name", SIZED)
def test_the_form_is_that_of_the_largest_size(name):
    kernels, _ = pattern(SIZED[name])
    forms = [PROGRAMS.choose(part).form for each in kernels for part in PROGRAMS.prepared(each)]
    assert SIZED[name].form in forms


def text_of(kernel: Kernel, tensors: Mapping[str, Tensor]) -> str:
    source, _, _ = rendered([kernel], buffers_of(tensors))
    return source.text


SOFTMAX = """\
def softmax_f0_0(b0, b1, S_m, S_n):
    program = tl.program_id(0)
    r = program * 2 + tl.arange(0, 2)[:, None]
    mr = r < S_n
    c = 0 + tl.arange(0, 512)[None, :]
    mc = c < S_m
    x0 = tl.load(b0 + (S_m * r + c), mask=mr & mc, other=0)
    x1 = tl.where(mc, x0, tl.full((), float("-inf"), tl.float32))
    x2 = tl.broadcast_to(x1, [2, 512])
    x3 = tl.reduce(x2, 1, _top, keep_dims=True)
    x4 = x0 - x3
    x5 = tl.exp(x4)
    x6 = tl.where(mc, x5, tl.full((), 0.0, tl.float32))
    x7 = tl.broadcast_to(x6, [2, 512])
    x8 = tl.sum(x7, axis=1, keep_dims=True)
    x9 = tl.div_rn(x5, x8)
    tl.store(b1 + (S_m * r + c), x9, mask=mr & mc)
"""


def test_the_text_of_rows_as_many_and_as_long_as_the_call_says():
    kernel = make.softmax(dim("n", 64, 5), dim("m", 300, 7))
    text = text_of(kernel, {"x": torch.zeros(1), "y": torch.zeros(1)})
    function, entry = text.split("@triton.jit\n")[-1].split("\nFUNCTIONS")
    assert function == SOFTMAX
    assert '"programs": lambda S_m, S_n: (((S_n + 1) // 2)),' in entry
    assert "\"sizes\": ('S_m', 'S_n')," in entry


def test_what_may_need_64_bits_is_made_of_64_bits():
    tensors = {"x": torch.zeros(1), "y": torch.zeros(1)}
    narrow = text_of(make.softmax(dim("n", 64, 5), 7), tensors)
    wide = text_of(make.softmax(dim("n", 2**30, 5), 7), tensors)
    assert ".to(tl.int64)" not in narrow
    assert "S_n = S_n.to(tl.int64)" in wide
