"""Awkward values of every dtype, and what it means that a result is eager's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
RTOL = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def ones(dtype: torch.dtype) -> Tensor:
    """For a function of one number."""
    if dtype is torch.bool:
        return torch.tensor([True, False] * 8)
    if not dtype.is_floating_point:
        return _whole(dtype, [0, 1, 2, 3, 7, 8, 100, torch.iinfo(dtype).max])
    of = torch.finfo(dtype)
    tiny = of.smallest_normal
    some = [0.0, tiny * of.eps, tiny / 2, tiny, 1e-3, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0]
    some += [20.0, 21.0, 88.7, 88.8, 104.0, 1000.0, of.max / 2, of.max, math.inf]
    signed = [sign * each for each in some for sign in (1, -1)]
    return torch.tensor([*signed, math.nan], dtype=torch.float64).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of fewer values; the second one is not zero where it is whole."""
    values = _few(dtype, 11)
    second = values
    if not dtype.is_floating_point and dtype is not torch.bool:
        second = values[values != 0]
    x, y = torch.cartesian_prod(values, second).t().contiguous()
    return x, y


def triples(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """All triples of still fewer."""
    few = _few(dtype, 5)
    x, y, z = torch.cartesian_prod(few, few, few).t().contiguous()
    return x, y, z


def rows(dtype: torch.dtype) -> Tensor:
    """Rows of five, with two awkward values in each."""
    first, second = pairs(dtype)
    rest = torch.tensor([1, 2, 0.5]).to(dtype).expand(len(first), 3)
    return torch.cat([first[:, None], rest, second[:, None]], 1)


def mild_rows(dtype: torch.dtype) -> Tensor:
    """The same, of numbers whose squares are no infinities."""
    found = rows(dtype)
    if not dtype.is_floating_point:
        return found
    most = torch.finfo(dtype).max ** 0.25
    return torch.where(found.isfinite(), found.clamp(-most, most), found)


def _few(dtype: torch.dtype, count: int) -> Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        return _whole(dtype, [0, 1, 2, 3, 7, torch.iinfo(dtype).max][: max(3, count // 2)])
    of = torch.finfo(dtype)
    some = [0.0, math.inf, 1.0, 0.3, of.max, 20.0, of.smallest_normal * of.eps, 2.0, 3.0, 0.5, 88.8]
    signed = [sign * each for each in some[:count] for sign in (1, -1)]
    return torch.tensor([*signed, math.nan], dtype=torch.float64).to(dtype)


def _whole(dtype: torch.dtype, some: list[int]) -> Tensor:
    signs = (1, -1) if torch.iinfo(dtype).min < 0 else (1,)
    return torch.tensor([sign * each for each in some for sign in signs], dtype=dtype)


@dataclass(frozen=True)
class Deviation:
    """Places where a result is nobody's; ``kinds``: nan, inf, zero (its sign) or number."""

    name: str
    dtype: torch.dtype
    count: int
    kinds: frozenset[str]
    example: str

    def __str__(self) -> str:
        kinds = " and ".join(sorted(self.kinds))
        return f"{self.name} of {self.dtype}, {kinds}, {self.count} times: {self.example}"


def compare(
    name: str,
    found: Tensor,
    eager: Sequence[Tensor],
    exact: Tensor | None,
    inputs: Sequence[Tensor],
) -> Deviation | None:
    """Where ``found`` is the result of none of PyTorch's kernels for other layouts (``eager``).

    NaN stands where theirs does, infinities and zeros have their sign, and other numbers are
    theirs to rounding, or nearer to those of float64 (``exact``).
    """
    bad = torch.ones(found.shape, dtype=torch.bool)
    for each in eager:
        bad &= ~_alike(found, each, exact)
    if not bad.any():
        return None
    place = int(bad.flatten().nonzero()[0])
    row = place * len(inputs[0]) // max(found.numel(), 1) if inputs else 0
    given = ", ".join(f"{each[row].tolist()}" for each in inputs)
    theirs = " or ".join(f"{each.flatten()[place].item()}" for each in eager)
    example = f"of {given}: {found.flatten()[place].item()}, eager {theirs}"
    kinds = frozenset(_kind(x, y) for x, y in zip(found[bad], eager[0][bad], strict=True))
    return Deviation(name, found.dtype, int(bad.sum()), kinds, example)


def _kind(found: Tensor, eager: Tensor) -> str:
    x, y = float(found), float(eager)
    if math.isnan(x) or math.isnan(y):
        return "nan"
    if math.isinf(x) or math.isinf(y):
        return "inf"
    return "zero" if x == y == 0 else "number"


def _alike(found: Tensor, eager: Tensor, exact: Tensor | None) -> Tensor:
    if found.dtype != eager.dtype or found.shape != eager.shape:
        return torch.zeros(found.shape, dtype=torch.bool)
    if not found.dtype.is_floating_point:
        return found == eager
    of = torch.finfo(found.dtype)
    x, y = found.double(), eager.double()
    special = (x.isnan() & y.isnan()) | ((x == y) & (x.signbit() == y.signbit()))
    near = _near(x, y, RTOL[found.dtype], of) | _at_the_end(x, y, RTOL[found.dtype], of)
    if exact is not None and exact.shape == found.shape:
        z = exact.double()
        both = x.isfinite() & y.isfinite() & z.isfinite()
        near |= both & (_near(x, z, RTOL[found.dtype], of) | ((x - z).abs() <= 4 * (y - z).abs()))
    return special | (near & ((x != 0) | (y != 0)))


def _near(x: Tensor, y: Tensor, rtol: float, of: torch.finfo) -> Tensor:
    least = 4 * of.smallest_normal * of.eps
    return x.isfinite() & y.isfinite() & ((x - y).abs() <= rtol * y.abs() + least)


def _at_the_end(x: Tensor, y: Tensor, rtol: float, of: torch.finfo) -> Tensor:
    """One of them is infinite and the other one nearly."""
    large = (x.abs() >= of.max * (1 - rtol)) & (y.abs() >= of.max * (1 - rtol))
    return large & (x.sign() == y.sign())
