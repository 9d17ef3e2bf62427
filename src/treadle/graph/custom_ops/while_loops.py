"""``torch.while_loop`` as one operation of a graph, its two functions as texts of graphs.

::

    values  =  while_loop(carried, others, ...)      while condition(*values, *others):
                                                         values = body(*values, *others)
    grads   =  while_loop_backward(grads, carried, others, ...)

The number of iterations is known at run time: each iteration evaluates the condition on the host.
The texts are those of ``show(step, exact=True)``, so that what names such an operation can run
wherever its text is: in a cache, in a saved step. ``backward`` is one round with its gradients:
``(*values, *others, *grads)`` to the gradients of what ``differentiable`` names, of ``carried`` and
then of ``others``. Each iteration needs its initial values. They are recomputed, and kept while the
gradients go back through the iterations: the bytes of ``carried`` for each iteration, which no plan
can know. ``bytes_of_round`` are those of one iteration.

``loop_value`` stands for a value of any iteration while the functions of ``loop``, a function of
``torch``, are traced.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from math import prod

import torch
from torch import Tensor, fx

from treadle.compat.operators.custom_op import (
    CallContext,
    CustomOp,
    Gradient,
    Gradients,
    no_second_derivative,
)
from treadle.compat.tensors import storage_of
from treadle.graph.core.node_info import known_value
from treadle.graph.core.types import tensors_in
from treadle.graph.text.parsing import parse
from treadle.util import rounds

Function = Callable[..., tuple[Tensor, ...]]


@functools.lru_cache(maxsize=256)
def function_of(text: str) -> Function:
    """The graph of a text as a function of its inputs, run with PyTorch's kernels."""
    step = parse(text)
    return fx.GraphModule(torch.nn.Module(), step.graph)


@functools.lru_cache(maxsize=256)
def bytes_of_round(text: str) -> int:
    """The most that one run of the graph of a text holds at once, beside its inputs: of each memory
    from its first value on to the last use of one."""
    step = parse(text)
    nodes = list(step.graph.nodes)
    uses = {operand: at for at, node in enumerate(nodes) for operand in node.all_input_nodes}
    memory = {node: set(map(storage_of, tensors_in(known_value(node)))) for node in nodes}
    sizes: dict[int, int] = {}
    ends: dict[int, int] = {}
    keys = {key for node in step.placeholders for key in memory[node]}
    for at, node in enumerate(nodes):
        for tensor in tensors_in(known_value(node)):
            sizes[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            ends[storage_of(tensor)] = max(ends.get(storage_of(tensor), at), uses.get(node, at))
    held: set[int] = set()
    most = 0
    for at, node in enumerate(nodes):
        held |= memory[node] - keys
        most = max(most, sum(map(sizes.__getitem__, held)))
        held = {key for key in held if ends[key] > at}
    return most


def run_by(text: str) -> rounds.Function:
    """The graph of a text for ``treadle.util.rounds``, run with PyTorch's kernels."""
    function = function_of(text)
    return lambda operands: function(*operands)


def summed_by(text: str, sums: int) -> rounds.Function:
    """The same, with the last ``sums`` results added to what it is given last."""
    function = function_of(text)

    def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
        first = len(tensors) - sums
        results = function(*tensors[:first])
        end = len(results) - sums
        added = zip(tensors[first:], results[end:], strict=True)
        return [*results[:end], *(total + result for total, result in added)]

    return summed


def _run(
    carried: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    condition: str,
    body: str,
    backward: str,
) -> list[Tensor]:
    with torch.no_grad():
        return rounds.run(run_by(condition), run_by(body), carried, others)


def _run_backward(
    grads: Sequence[Tensor],
    carried: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    condition: str,
    body: str,
    backward: str,
) -> list[Tensor]:
    sums = sum(differentiable[len(carried) :])
    with torch.no_grad():
        functions = run_by(condition), run_by(body), summed_by(backward, sums)
        return rounds.run_backward(*functions, grads, carried, others, differentiable)


def _like(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _results(carried: Sequence[Tensor]) -> list[Tensor]:
    return list(map(_like, carried))


def _gradients_like(
    carried: Sequence[Tensor], others: Sequence[Tensor], differentiable: Sequence[bool]
) -> list[Tensor]:
    return list(map(_like, compress((*carried, *others), differentiable)))


Inputs = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[bool], str, str, str]


def _keep(ctx: CallContext, inputs: Inputs, output: Sequence[Tensor]) -> None:
    carried, others, differentiable, *texts = inputs
    ctx.save_for_backward(*carried, *others)
    ctx.rest = len(carried), tuple(differentiable), *texts
    fixed = [tensor for tensor, flag in zip(output, differentiable, strict=False) if not flag]
    ctx.mark_non_differentiable(*fixed)


def _gradients(ctx: CallContext, grads: Sequence[Tensor | None]) -> Gradients:
    count, flags, *texts = ctx.rest
    assert isinstance(count, int)
    assert isinstance(flags, tuple)
    tensors = ctx.saved_tensors  # asked for once: a checkpoint gives them once
    carried, others = tensors[:count], tensors[count:]
    incoming = [
        torch.zeros_like(value) if grad is None else grad
        for grad, value in compress(zip(grads, carried, strict=True), flags)
    ]
    remaining = iter(
        while_loop_backward(incoming, list(carried), list(others), list(flags), *texts)
    )
    gradients = [next(remaining) if flag else None for flag in flags]
    return gradients[:count], gradients[count:], None, None, None, None


def _held(condition: str, body: str) -> int:
    """Of rounds that run with PyTorch's kernels: what one of them does."""
    return max(bytes_of_round(condition), bytes_of_round(body))


def _held_backward(
    carried: Sequence[Tensor],
    others: Sequence[Tensor],
    differentiable: Sequence[bool],
    body: str,
    backward: str,
) -> int:
    """Also what each round began with, of which one is counted: how many there are is not known."""
    sums = compress(others, differentiable[len(carried) :])
    begins = sum(tensor.dtype.itemsize * prod(tensor.shape) for tensor in (*carried, *sums))
    return begins + max(bytes_of_round(body), bytes_of_round(backward))


LOOP_VALUE = CustomOp(
    "loop_value(Tensor like, str loop) -> Tensor", fake=_like, kernel=lambda like, loop: _like(like)
)
WHILE_LOOP = CustomOp(
    "while_loop(Tensor[] carried, Tensor[] others, bool[] differentiable, str condition, "
    "str body, str backward) -> Tensor[]",
    fake=_results,
    kernel=_run,
    gradient=Gradient(_keep, _gradients),
    holds=_held,
)
WHILE_LOOP_BACKWARD = CustomOp(
    "while_loop_backward(Tensor[] grads, Tensor[] carried, Tensor[] others, "
    "bool[] differentiable, str condition, str body, str backward) -> Tensor[]",
    fake=_gradients_like,
    kernel=_run_backward,
    gradient=no_second_derivative(
        "torch.while_loop",
        "a Python loop with a fixed number of iterations has a second derivative",
    ),
    holds=_held_backward,
)
OPERATORS = (LOOP_VALUE, WHILE_LOOP, WHILE_LOOP_BACKWARD)
loop_value, while_loop, while_loop_backward = (operator.op for operator in OPERATORS)
