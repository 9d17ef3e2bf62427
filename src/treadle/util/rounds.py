"""A loop whose functions are looked at each time, forwards and back through its rounds.

::

    run:           while goes_on(*values, *others):  values = body(*values, *others)
    run_backward:  the same, keeping what each round begins with; then from the last round to the
                   first  grads, sums = backward(*values, *others, *grads, *sums)

A function takes one list and gives one. What the loop gives shares no memory with what it was
given.
"""

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Tensors in, tensors out."""


def run(
    goes_on: Function, body: Function, carried: Sequence[Tensor], others: Sequence[Tensor]
) -> list[Tensor]:
    """The values after the last round."""
    values, others = _contiguous(carried), _contiguous(others)
    while goes_on([*values, *others])[0]:
        values = _contiguous(body([*values, *others]))
    return _own(values, (*carried, *others))


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
    made = [*_contiguous(grads), *(torch.zeros_like(each) for each in ours)]
    while rounds:
        made = _contiguous(backward([*rounds.pop(), *others, *made]))
    return [*_own(made[:count], (*grads, *carried, *others)), *made[count:]]


def _begins(
    goes_on: Function, body: Function, carried: Sequence[Tensor], others: Sequence[Tensor]
) -> list[list[Tensor]]:
    """What each round begins with."""
    found: list[list[Tensor]] = []
    values = _contiguous(carried)
    while goes_on([*values, *others])[0]:
        found.append(values)
        values = _contiguous(body([*values, *others]))
    return found


def _contiguous(values: Sequence[Tensor]) -> list[Tensor]:
    return [each.contiguous() for each in values]


def _own(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The values, those copied that have the memory of an input or of one before."""
    taken = {each.untyped_storage().data_ptr() for each in inputs}
    found: list[Tensor] = []
    for each in values:
        address = each.untyped_storage().data_ptr()
        found.append(each.clone() if address in taken and address else each)
        taken.add(address)
    return found
