"""Compares compiled steps with eager at awkward values.

::

    PYTHONPATH=src:tests python -m numerics.sweep [--all] [--device cuda] [--dtype float32]

``--all``: with every neighbour of every function. ``--only NAME``: what has that in its name.
``--explained``: also what may differ, for a reason that is known.
"""

import argparse
import contextlib
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import treadle
from numerics.sweep_deviations import unexplained
from numerics.sweep_functions import CONTRACTED, FUNCTIONS, NEIGHBOURS, grid, with_gradient
from numerics.sweep_operators import Sample, samples_of, swept
from numerics.sweep_values import (
    FLOATS,
    WHOLE,
    Deviation,
    compare,
    mild_rows,
    ones,
    pairs,
    rows,
    triples,
)
from treadle.compat.fake import FakeTensorMode

Call = Callable[..., Any]
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
_NO_KERNEL = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def inputs_of(kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The swept values of one kind."""
    match kind:
        case "one":
            return (ones(dtype),)
        case "two":
            return pairs(dtype)
        case "three":
            return triples(dtype)
        case "rows":
            return (rows(dtype),)
        case _:
            return (mild_rows(dtype),)


def strided(x: Tensor) -> Tensor:
    """The same values, one of two places in memory: PyTorch's loops over them have no lanes."""
    return torch.stack([x, x], -1)[..., 0]


def sweep(
    calls: Sequence[tuple[str, str, Call]], values: dict[str, tuple[Tensor, ...]], device: str
) -> list[Deviation]:
    """All ``calls`` (name, kind of values, function) as one compiled step, against eager."""
    known: list[tuple[str, str, Call]] = []
    eager: list[list[list[Tensor]]] = []
    for name, kind, call in calls:
        found = _eagerly(call, values[kind], device)
        if found is not None:
            known.append((name, kind, call))
            eager.append(found)
    kinds = list(values)

    def step(*flat: Tensor) -> list[Tensor]:
        given = dict(zip(kinds, _grouped(flat, [len(values[k]) for k in kinds]), strict=True))
        return [out for _, kind, call in known for out in tensors_in(call(*given[kind]))]

    compiled = treadle.compile(step, model=nn.Linear(1, 1).to(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = compiled(*(x.to(device) for kind in kinds for x in values[kind]))
    outputs = iter(flat)
    deviations: list[Deviation] = []
    for (name, kind, call), paths in zip(known, eager, strict=True):
        exact = _exactly(call, values[kind])
        for at in range(len(paths[0])):
            theirs = [path[at].cpu() for path in paths]
            truth = exact[at] if exact is not None else None
            bad = compare(name, next(outputs).cpu(), theirs, truth, values[kind])
            deviations += [bad] if bad else []
    return deviations


def _grouped(flat: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    groups, start = [], 0
    for count in counts:
        groups.append(flat[start : start + count])
        start += count
    return groups


def _eagerly(call: Call, values: Sequence[Tensor], device: str) -> list[list[Tensor]] | None:
    """What eager gives for values in a row, and for others; ``None`` where it has no kernel."""
    there = [x.to(device) for x in values]
    try:
        paths = [tensors_in(call(*there))]
        with FakeTensorMode() as mode:  # as capture calls it
            call(*map(mode.from_tensor, values))
    except _NO_KERNEL:
        return None
    with contextlib.suppress(*_NO_KERNEL):
        paths.append(tensors_in(call(*map(strided, there))))
    if device == "cpu":
        with torch.backends.mkldnn.flags(enabled=False):
            paths.append(tensors_in(call(*there)))
    return paths


def runs_eagerly(call: Call, values: Sequence[Tensor]) -> bool:
    """Whether PyTorch has a kernel for that."""
    return _eagerly(call, values, "cpu") is not None


def _exactly(call: Call, values: Sequence[Tensor]) -> list[Tensor] | None:
    if not values[0].is_floating_point() or values[0].dtype is torch.float64:
        return None
    with contextlib.suppress(*_NO_KERNEL):
        return tensors_in(call(*(x.double() for x in values)))
    return None


def operators(dtype: torch.dtype, device: str = "cpu", only: str = "") -> list[Deviation]:
    """Every operator with a formula."""
    samples: list[Sample] = [each for op in swept() for each in samples_of(op)]
    kept = [(s.name, s.kind, s.call) for s in samples if only in s.name]
    kinds = dict.fromkeys(kind for _, kind, _ in kept)
    return sweep(kept, {kind: inputs_of(kind, dtype) for kind in kinds}, device)


def functions(
    dtype: torch.dtype,
    device: str = "cpu",
    neighbours: bool = False,
    only: str = "",
    words: Sequence[str] = tuple(NEIGHBOURS),
) -> list[Deviation]:
    """Functions with their gradients, or with what is fused with them."""
    names = [name for name in FUNCTIONS if only in name]
    x, g = grid(ones(dtype))
    calls: list[tuple[str, str, Call]] = []
    for name in names:
        function = FUNCTIONS[name]
        if not neighbours:
            calls.append((name, "grid", lambda x, g, f=function: with_gradient(f, x, g)))
            continue
        for word in words:
            if name in CONTRACTED and word in ("- inf", "+ g", "g - y", "sum"):
                continue
            calls.append(
                (f"{name} {word}", word, lambda x, g, f=function, b=NEIGHBOURS[word]: b(f(x), g))
            )
    kinds = dict.fromkeys(kind for _, kind, _ in calls)
    return sweep(calls, {kind: (x.clone(), g.clone()) for kind in kinds}, device)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--explained", action="store_true")
    given = parser.parse_args()
    wanted = [d for d in (*FLOATS, *WHOLE) if given.dtype in str(d)]
    found: list[Deviation] = []
    for dtype in wanted:
        found += operators(dtype, given.device, given.only)
        if dtype.is_floating_point:
            found += functions(dtype, given.device, only=given.only)
            found += functions(dtype, given.device, True, given.only) if given.all else []
    found = unexplained(found, given.device) if not given.explained else list(map(str, found))
    for each in found:
        print(each)
    print(f"{len(found)} deviations")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
