"""``torch.associative_scan`` while a step is traced: formulas in the graph, of logarithmic depth.

::

    y = scan(x):    z    = scan(f(x[0::2], x[1::2]))         pairs: half as many
                    y[1::2] = z
                    y[0]    = x[0];   y[2::2] = f(z[:-1], x[2::2])

So ``f`` runs on about twice as many slices as there are, in two calls for each halving. Gradients
are those of these operations. Slices lie along the first dim: for ``generic`` functions ``vmap``
takes it off, ``pointwise`` ones get it.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treadle.capture.control_flow.bodies import Pure, unfit
from treadle.capture.python_state.flatten import flatten_containers, unflatten

_NAME = "associative_scan"
_MODES = ("pointwise", "generic")

Combine = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""Combines slices with as many later ones."""


def associative_scan(
    combine_fn: Callable[[object, object], object],
    xs: object,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> object:
    """The running combinations of the slices of ``xs`` along ``dim``."""
    leaves, spec = flatten_containers(xs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _require_fit(leaves, tensors, dim, combine_mode)
    dim %= tensors[0].ndim

    def combined(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
        result = combine_fn(unflatten(list(left), spec), unflatten(list(right), spec))
        found, structure = flatten_containers(result)
        if str(structure) != str(spec):
            raise unfit(_NAME, "its function does not return the containers that it receives")
        return [_alike(new, old) for new, old in zip(found, left, strict=True)]

    moved = [tensor.movedim(dim, 0) for tensor in tensors]
    ordered = [tensor.flip(0) for tensor in moved] if reverse else moved
    with Pure(_NAME, "its function", always=True):
        results = _scanned(combined if combine_mode == "pointwise" else _vmapped(combined), ordered)
    results = [tensor.flip(0) for tensor in results] if reverse else results
    return unflatten([tensor.movedim(0, dim) for tensor in results], spec)


def _require_fit(leaves: Sequence[object], tensors: Sequence[Tensor], dim: int, mode: str) -> None:
    if mode not in _MODES:
        raise unfit(_NAME, f"combine_mode is {mode!r}, and not one of {', '.join(_MODES)}")
    if not tensors or len(tensors) != len(leaves):
        raise unfit(_NAME, "its inputs are not tensors")
    if any(not -tensor.ndim <= dim < tensor.ndim for tensor in tensors):
        raise unfit(_NAME, f"an input has no dim {dim}")
    if len({operator.index(tensor.shape[dim]) for tensor in tensors}) > 1:
        raise unfit(_NAME, "its inputs are not tensors of one length")


def _alike(new: object, old: Tensor) -> Tensor:
    if not isinstance(new, Tensor) or (new.dtype, new.shape) != (old.dtype, old.shape):
        shown = f"{new.dtype} {list(new.shape)}" if isinstance(new, Tensor) else repr(new)
        raise unfit(_NAME, f"its function returns {shown} for {old.dtype} {list(old.shape)}")
    return new


def _vmapped(combine: Combine) -> Combine:
    def of_slices(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.vmap(combine)(list(left), list(right)))

    return of_slices


def _scanned(combine: Combine, xs: Sequence[Tensor]) -> list[Tensor]:
    """The scan of slices along the first dim."""
    count = operator.index(xs[0].shape[0])
    if count < 2:
        return list(xs)
    last = count - count % 2
    pairs = combine([x[0:last:2] for x in xs], [x[1:last:2] for x in xs])
    odd = _scanned(combine, pairs)
    first = [x[:1] for x in xs]
    if count < 3:
        return [torch.cat(each) for each in zip(first, odd, strict=True)]
    before = (count - 1) // 2
    later = combine([z[:before] for z in odd], [x[2::2] for x in xs])
    even = [torch.cat(each) for each in zip(first, later, strict=True)]
    return [_interleaved(*each) for each in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """``even[0], odd[0], even[1], odd[1], ...``; of ``even`` there may be one more."""
    count = operator.index(odd.shape[0])
    both = torch.stack([even[:count], odd], 1).flatten(0, 1)
    return both if operator.index(even.shape[0]) == count else torch.cat([both, even[count:]])
