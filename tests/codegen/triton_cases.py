"""Kernels with tensors to run them on, by their sizes."""

import math

import torch
import triton_kernels as make
from torch import Tensor
from triton_run import Case

from treadle.loop.expr import ReduceKind
from treadle.loop.kernel import KernelKind

NAN = float("nan")


def poison(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What an element holds that nobody wrote."""
    return torch.full((n,), NAN if dtype.is_floating_point else 77, dtype=dtype)


def softmax_case(rows: int, cols: int) -> Case:
    x = 3 * torch.randn(rows * cols)
    x[5] = -math.inf
    return Case(
        f"softmax {rows}x{cols}",
        [make.softmax(rows, cols)],
        {"x": x, "y": poison(rows * cols)},
    )


def layer_norm_case(rows: int, cols: int, dtype: torch.dtype) -> Case:
    tensors = {
        "x": torch.randn(rows * cols).to(dtype),
        "w": torch.randn(cols),
        "b": torch.randn(cols),
        "y": poison(rows * cols, dtype),
        "mean": poison(rows),
        "rstd": poison(rows),
    }
    return Case(f"layer norm {rows}x{cols} {dtype}", [make.layer_norm(rows, cols, dtype)], tensors)


def adamw_tensors(n: int, suffix: str) -> dict[str, Tensor]:
    return {
        "g" + suffix: torch.randn(n),
        "m" + suffix: torch.randn(n),
        "v" + suffix: torch.rand(n),
        "p" + suffix: torch.randn(n),
        "step": torch.tensor([3.0]),
    }


def reductions_case(rows: int, cols: int, kind: KernelKind) -> Case:
    x = torch.randn(rows * cols)
    x[torch.randint(rows * cols, (3,))] = NAN
    x[: cols // 2] = -math.inf
    outer = rows if kind is KernelKind.ROWS else cols
    tensors = {"x": x, "i": torch.randint(-9, 9, (rows * cols,)), "any": poison(outer, torch.bool)}
    for each in ReduceKind:
        arg = each in (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
        tensors[f"f_{each}"] = poison(outer, torch.int64 if arg else torch.float32)
        tensors[f"i_{each}"] = poison(outer, torch.int64)
    kernel = make.every_reduction(rows, cols, kind)
    return Case(f"reductions {rows}x{cols} {kind}", [kernel], tensors)


def column_sums_case(rows: int, cols: int) -> Case:
    tensors = {
        "g": torch.randn(rows * cols).bfloat16(),
        "x": torch.randn(rows * cols),
        "dw": poison(cols),
        "db": poison(cols),
    }
    return Case(f"column sums {rows}x{cols}", [make.column_sums(rows, cols)], tensors)


def norm_backward_case(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Case:
    x = torch.randn(rows * cols)
    x[torch.randint(rows * cols, (1,))] = NAN
    tensors = {
        "g": torch.randn(rows * cols).to(dtype),
        "x": x,
        "r": torch.rand(rows),
        "w": torch.randn(cols).bfloat16(),
        "again": poison(rows * cols, torch.bfloat16),
        "dx": poison(rows * cols),
        "mean": poison(rows),
        "m": poison(cols, torch.bfloat16),
        **{name: poison(cols) for name in ("n", "db", "top")},
    }
    kernel = make.norm_backward(rows, cols, dtype)
    return Case(f"norm backward {rows}x{cols}", [kernel], tensors)


def one_hot_case(rows: int, cols: int) -> Case:
    label = torch.randint(cols, (rows,))
    label[:5] = torch.tensor([-1, -100, cols, 2**32, -(2**63)])
    tensors = {"label": label, "a": torch.randn(rows), "b": torch.randn(cols)}
    kernel = make.one_hot(rows, cols)
    return Case(f"one hot {rows}x{cols}", [kernel], {**tensors, "y": poison(rows * cols)})


def embedding_case(rows: int, cols: int) -> Case:
    ids = torch.randint(0, 11, (rows,))
    ids[0] = 0
    tensors = {"ids": ids, "table": torch.randn(11 * cols), "y": poison(rows * cols)}
    return Case(f"embedding {rows}x{cols}", [make.embedding(rows, cols, 11)], tensors)


def total_norm_case(n: int) -> Case:
    tensors = {"g": torch.randn(n), "y": poison(n), "scale": poison(1)}
    return Case(f"total norm {n}", [make.total_norm(n)], tensors)


def transpose_case(rows: int, cols: int) -> Case:
    n = rows * cols
    return Case(
        f"transpose {rows}x{cols}",
        [make.transpose(rows, cols)],
        {"x": torch.randn(n), "y": poison(n)},
    )
