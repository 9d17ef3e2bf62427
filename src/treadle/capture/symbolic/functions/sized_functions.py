"""Functions whose kernels take a size as a plain number, as functions of tensors that have that
size: in a step for many sizes.

::

    linspace(a, b, len(x))      a + (b - a) * i / (n - 1)        i: arange(n)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treadle.capture.symbolic.size_numbers import is_size

_MADE_AS = frozenset({"dtype", "device"})


def sized_instead_of(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Callable[..., object] | None:
    """What to call in place of ``func``, which is given sizes; ``None``: ``func`` itself. Whole
    numbers are left to it: CPUs and GPUs round them in different orders."""
    if func is not torch.linspace:
        return None
    named = dict(zip(("start", "end", "steps"), args, strict=False)) | dict(kwargs)
    bounds = named.get("start"), named.get("end")
    is_plain = all(type(bound) in (int, float) for bound in bounds)
    others = named.keys() - {"start", "end", "steps"} - _MADE_AS
    dtype = named.get("dtype") or torch.get_default_dtype()
    rounds = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    is_sized = is_size(named.get("steps"))
    return _linspace if is_plain and rounds and is_sized and not others else None


def _linspace(start: float, end: float, steps: int, **made: Any) -> Tensor:
    """From the nearer end, as PyTorch counts, and rounded once."""
    dtype = made.get("dtype") or torch.get_default_dtype()
    at = torch.arange(steps, dtype=torch.float64, device=made.get("device"))
    last = at[-1:]
    width = (end - start) / last.clamp(min=1)
    from_start, from_end = start + width * at, end - width * (last - at)
    is_near = (2 * at < last) | (last == 0)
    return torch.where(is_near, from_start, from_end).to(dtype)
