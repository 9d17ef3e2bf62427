"""PyTorch's operator database as cases: each operator in each dtype, forward, and gradients.

A case is named by its operator, its variant and what is asked of it (``addmm grad-float32``), and
everything about it is decided by that name: its inputs, its shard, how its kernels are made.
"""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

FORWARD = (torch.float32, torch.int64, torch.bool, torch.complex64)
UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
            "new_empty_strided")  # fmt: skip
"""Operators whose results have no numbers: types alone are compared."""


@dataclass(frozen=True)
class Case:
    """One operator in one dtype; ``grad``: with its gradients."""

    op: OpInfo
    dtype: torch.dtype
    grad: bool

    @property
    def name(self) -> str:
        variant = f".{self.op.variant_test_name}" if self.op.variant_test_name else ""
        asked = "grad-" if self.grad else ""
        return f"{self.op.name}{variant} {asked}{str(self.dtype).removeprefix('torch.')}"

    @property
    def digest(self) -> int:
        """The same in every process."""
        return zlib.crc32(self.name.encode())

    @property
    def filled(self) -> bool:
        return self.op.name not in UNFILLED

    def samples(self, most: int) -> list[SampleInput]:
        """The first sample, and others spread over the rest; those of the database, with numbers
        that the name of the case decides."""
        torch.manual_seed(self.digest)
        found = list(self.op.sample_inputs("cpu", self.dtype, requires_grad=self.grad))
        if len(found) <= most:
            return found
        start = self.digest % len(found)
        places = [0, *((start + at * len(found) // most) % len(found) for at in range(most))]
        return [found[at] for at in list(dict.fromkeys(places))[:most]]


def every_case() -> Iterator[Case]:
    """All cases that the database says hold on a CPU."""
    for op in op_db:
        yield from (Case(op, d, False) for d in FORWARD if op.supports_dtype(d, "cpu"))
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
            yield Case(op, torch.float32, True)


def shard(cases: Iterator[Case], number: int, of: int) -> list[Case]:
    """Shard ``number`` (from 1) of ``of``: by name, so that a new operator moves no other."""
    return [case for case in cases if case.digest // 7 % of == number - 1]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return list(itertools.chain.from_iterable(map(tensors_of, value)))
    return []


def copied(value: Any) -> Any:
    """The same values in tensors of their own, laid out alike, leaves of their own graphs."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.detach().clone().requires_grad_(value.requires_grad)
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return copy.copy_(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value


def widened(value: Any) -> Any:
    """Float32 as float64, complex64 as complex128: what the numbers are measured against."""
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    if isinstance(value, torch.Tensor):
        made = value.detach().to(wide.get(value.dtype, value.dtype))
        return made.clone().requires_grad_(value.requires_grad)
    if isinstance(value, torch.dtype):
        return wide.get(value, value)
    if isinstance(value, dict):
        return {key: widened(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(widened, value))
    return value


def distance(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the size of what it is a difference of."""
    worst = 0.0
    for a, b in zip(ours, exact, strict=True):
        if a.is_floating_point() or a.is_complex():
            both = a.detach().to(torch.complex128), b.detach().to(torch.complex128)
            finite = torch.isfinite(both[0]) & torch.isfinite(both[1])
            if finite.any():
                scale = both[1][finite].abs().max().clamp(min=1e-6)
                worst = max(worst, float((both[0] - both[1])[finite].abs().max() / scale))
    return worst
