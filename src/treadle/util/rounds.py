"""A loop that runs its functions forwards, and back through its iterations.

::

    run:           while goes_on(*values, *others):  values = body(*values, *others)
    run_backward:  the same, keeping what each round begins with; then from the last round to the
                   first  grads, sums = backward(*values, *others, *grads, *sums)

A function takes one list and returns one. The results of the loop share no memory with its
arguments.
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


def _contiguous(values: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in values]
