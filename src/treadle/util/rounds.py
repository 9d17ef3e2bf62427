"""A loop that runs its functions forwards, and back through its iterations.

::

    run:           while goes_on(*values, *others):  values = body(*values, *others)
    run_backward:  the same, keeping what each round begins with; then from the last round to the
                   first  grads, sums = backward(*values, *others, *grads, *sums)

    scan:          for x in slices:  values, row = body(*values, *x, *others)
    scan_backward: from the last slice to the first
                   grads, row of grads, sums = backward(*starts, *x, *others, *grads, *row, *sums)

A function takes one list and returns one. The results of the loop share no memory with its
arguments. Slices and rows lie along the first dim of one tensor.
"""

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from treadle.util.memory import with_own_memory

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Tensors in, tensors out."""


def run(
    goes_on: Function, body: Function, carried: Sequence[Tensor], others: Sequence[Tensor]
) -> list[Tensor]:
    """The values after the last round."""
    values, others = _contiguous(carried), _contiguous(others)
    while goes_on([*values, *others])[0]:
        values = _contiguous(body([*values, *others]))
    return with_own_memory(values, (*carried, *others))


def run_backward(
    goes_on: Function,
    body: Function,
    backward: Function,
    grads: Sequence[Tensor],
    carried: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
) -> list[Tensor]:
    """The gradients of what ``differentiable`` names of ``carried`` and then of ``others``;
    ``grads``: of the results. Those of ``others`` are summed over the rounds."""
    others, count = _contiguous(others), len(grads)
    rounds = _begins(goes_on, body, carried, others)
    ours = compress(others, differentiable[len(carried) :])
    contiguous = [*_contiguous(grads), *(torch.zeros_like(tensor) for tensor in ours)]
    while rounds:
        contiguous = _contiguous(backward([*rounds.pop(), *others, *contiguous]))
    return [*with_own_memory(contiguous[:count], (*grads, *carried, *others)), *contiguous[count:]]


def scan(
    body: Function,
    carried: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    *,
    reverse: bool,
    keep: bool,
) -> list[Tensor]:
    """The values after the last slice, the rows of all slices and, where ``keep``, what each slice
    began with. ``reverse``: the last slice is the first."""
    values, slices, others = _contiguous(carried), _with_dense_rows(slices), _contiguous(others)
    rows = _Rows(slices)
    for at in rows.places(reverse):
        results = body([*values, *(tensor[at] for tensor in slices), *others])
        rows.put(at, [*results[len(values) :], *(values if keep else ())])
        values = _contiguous(results[: len(values)])
        del results  # the next slice does not hold its rows
    return [*with_own_memory(values, (*carried, *slices, *others)), *rows.tensors]


def scan_backward(
    backward: Function,
    grads: Sequence[Tensor],
    starts: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    *,
    reverse: bool,
) -> list[Tensor]:
    """The gradients of what ``differentiable`` names of the carried, of ``slices`` and of
    ``others``; ``starts``: the carried values that each slice began with; ``grads``: of the values
    after the last slice and of the rows. Those of ``others`` are summed over the slices."""
    starts, slices = _with_dense_rows(starts), _with_dense_rows(slices)
    others = _contiguous(others)
    first = len(starts) + len(slices)
    count = sum(differentiable[: len(starts)])
    values, given = _contiguous(grads[:count]), _with_dense_rows(grads[count:])
    sums = [torch.zeros_like(tensor) for tensor in compress(others, differentiable[first:])]
    rows = _Rows(slices)
    for at in rows.places(not reverse):
        inputs = [tensor[at] for tensor in (*starts, *slices)]
        incoming = [*values, *(tensor[at] for tensor in given)]
        results = backward([*inputs, *others, *incoming, *sums])
        end = len(results) - len(sums)
        values, sums = _contiguous(results[:count]), _contiguous(results[end:])
        rows.put(at, results[count:end])
        del results, incoming
    return [*with_own_memory(values, (*grads, *starts, *slices, *others)), *rows.tensors, *sums]


class _Rows:
    """Tensors that are made row by row, as many as ``slices`` have."""

    def __init__(self, slices: Sequence[Tensor]) -> None:
        self._count = len(slices[0])
        self.tensors: list[Tensor] = []

    def places(self, backwards: bool) -> range:
        """Of the rows, in the order in which they are made."""
        return range(self._count)[:: -1 if backwards else 1]

    def put(self, at: int, rows: Sequence[Tensor]) -> None:
        """These are the rows ``at`` this place."""
        if len(self.tensors) < len(rows):
            self.tensors = [row.new_empty((self._count, *row.shape)) for row in rows]
        for tensor, row in zip(self.tensors, rows, strict=True):
            tensor[at].copy_(row)


def _begins(
    goes_on: Function, body: Function, carried: Sequence[Tensor], others: Sequence[Tensor]
) -> list[list[Tensor]]:
    """What each round begins with."""
    starts: list[list[Tensor]] = []
    values = _contiguous(carried)
    while goes_on([*values, *others])[0]:
        starts.append(values)
        values = _contiguous(body([*values, *others]))
    return starts


def _with_dense_rows(values: Sequence[Tensor]) -> list[Tensor]:
    return [tensor if tensor[0].is_contiguous() else tensor.contiguous() for tensor in values]


def _contiguous(values: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in values]
