"""``scan`` and ``map`` as one operation of a graph, the body as the text of a graph.

::

    values, rows, starts  =  scan(carried, slices, others, ...)
                                 for x in slices:  values, row = body(*values, *x, *others)
    grads                 =  scan_backward(grads, starts, slices, others, ...)

``slices`` lie along the first dim, and so do ``rows``: what the body returns besides the carried
values. ``reverse``: from the last slice to the first. Texts are those of ``while_loop``. With a
``backward``, the results end with ``starts``: the carried values at the start of each slice. Like
any other results, they are in the plan, which may keep them or compute them again.

``backward`` is one slice with its gradients: ``(*values, *x, *others, *grads)`` to the gradients of
what ``differentiable`` names, of ``carried``, ``slices`` and ``others``. ``grads`` are those of the
carried values that have any, and of the rows that ``differentiable_rows`` names.
"""

import functools
from collections.abc import Sequence
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import (
    CallContext,
    CustomOp,
    Gradient,
    Gradients,
    no_second_derivative,
)
from treadle.graph.core.node_info import tensor_of
from treadle.graph.custom_ops.while_loops import bytes_of_round, run_by, summed_by
from treadle.graph.text.parsing import parse
from treadle.util import rounds


@functools.lru_cache(maxsize=256)
def _types_of_results(text: str) -> tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]:
    values = [tensor_of(node) for node in parse(text).returned if node is not None]
    return tuple((tuple(value.shape), value.dtype, value.device) for value in values)


def _run(
    carried: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    differentiable_rows: Sequence[bool],
    reverse: bool,
    body: str,
    backward: str,
) -> list[Tensor]:
    with torch.no_grad():
        return rounds.scan(
            run_by(body), carried, slices, others, reverse=reverse, keep=bool(backward)
        )


def _run_backward(
    grads: Sequence[Tensor],
    starts: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    reverse: bool,
    backward: str,
) -> list[Tensor]:
    function = summed_by(backward, sum(differentiable[len(starts) + len(slices) :]))
    with torch.no_grad():
        return rounds.scan_backward(
            function, grads, starts, slices, others, differentiable, reverse=reverse
        )


def _like(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _results(
    carried: Sequence[Tensor], slices: Sequence[Tensor], body: str, backward: str
) -> list[Tensor]:
    first = slices[0]
    rows = [
        first.new_empty((first.shape[0], *shape), dtype=dtype, device=device)
        for shape, dtype, device in _types_of_results(body)[len(carried) :]
    ]
    kept = carried if backward else ()
    starts = [value.new_empty((first.shape[0], *value.shape)) for value in kept]
    return [*map(_like, carried), *rows, *starts]


def _gradients_like(
    starts: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
) -> list[Tensor]:
    carried = [start.new_empty(start.shape[1:]) for start in starts]
    return list(map(_like, compress((*carried, *slices, *others), differentiable)))


Inputs = tuple[
    Sequence[Tensor],
    Sequence[Tensor],
    Sequence[Tensor],
    Sequence[bool],
    Sequence[bool],
    bool,
    str,
    str,
]


def _keep(ctx: CallContext, inputs: Inputs, output: Sequence[Tensor]) -> None:
    carried, slices, others, differentiable, rows, reverse, _, backward = inputs
    starts = output[len(carried) + len(rows) :]
    flags = [*differentiable[: len(carried)], *rows, *(False for _ in starts)]
    types = [(result.shape, result.dtype, result.device) for result in compress(output, flags)]
    ctx.save_for_backward(*starts, *slices, *others)
    ctx.rest = flags, types, len(starts), len(slices), tuple(differentiable), reverse, backward
    ctx.mark_non_differentiable(
        *(tensor for tensor, flag in zip(output, flags, strict=True) if not flag)
    )


def _gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    rest: tuple[Any, ...] = tuple(ctx.rest)
    given, types, starts, slices, flags, reverse, backward = rest
    tensors = ctx.saved_tensors  # asked for once: a checkpoint gives them once
    end = starts + slices
    incoming = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(compress(grads, given), types, strict=True)
    ]
    lists = tensors[:starts], tensors[starts:end], tensors[end:]
    remaining = iter(scan_backward(incoming, *map(list, lists), list(flags), reverse, backward))
    gradients = [next(remaining) if flag else None for flag in flags]
    parts = gradients[:starts], gradients[starts:end], gradients[end:]
    return (*parts, None, None, None, None, None)


def _held(body: str) -> int:
    """Of slices that run with PyTorch's kernels: what one of them does."""
    return bytes_of_round(body)


def _held_backward(
    starts: Sequence[Tensor],
    slices: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    backward: str,
) -> int:
    """Also the sums of a slice, beside those of the ones before."""
    sums = compress(others, differentiable[len(starts) + len(slices) :])
    return bytes_of_round(backward) + sum(
        tensor.dtype.itemsize * prod(tensor.shape) for tensor in sums
    )


SCAN = CustomOp(
    "scan(Tensor[] carried, Tensor[] slices, Tensor[] others, bool[] differentiable, "
    "bool[] differentiable_rows, bool reverse, str body, str backward) -> Tensor[]",
    fake=_results,
    kernel=_run,
    gradient=Gradient(_keep, _gradients),
    holds=_held,
)
SCAN_BACKWARD = CustomOp(
    "scan_backward(Tensor[] grads, Tensor[] starts, Tensor[] slices, Tensor[] others, "
    "bool[] differentiable, bool reverse, str backward) -> Tensor[]",
    fake=_gradients_like,
    kernel=_run_backward,
    gradient=no_second_derivative(
        "torch.scan or torch.map in a loop",
        "a Python loop with a fixed number of iterations has a second derivative",
    ),
    holds=_held_backward,
)
OPERATORS = (SCAN, SCAN_BACKWARD)
scan, scan_backward = (operator.op for operator in OPERATORS)
