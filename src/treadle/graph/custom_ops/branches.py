"""One of two graphs by a value of the step: what ``torch.cond`` runs if both would cost too much.

::

    taken    =  taken(condition)                      the condition of a cond, as a bool of no dims
    results  =  branch(taken, operands, yes, no)      yes(*operands) if taken else no(*operands)

``yes`` and ``no`` are texts of graphs as those of ``while_loop``: the host reads ``taken``, and
runs one of them. ``RunTakenBranches`` makes such calls where ``where`` stood.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.compat.operators.custom_op import CustomOp
from treadle.graph.core.node_info import tensor_of
from treadle.graph.custom_ops.while_loops import bytes_of_round, function_of
from treadle.graph.text.parsing import parse
from treadle.util.memory import with_own_memory


def _like(condition: Tensor) -> Tensor:
    return condition.new_empty(condition.shape)


def _same(condition: Tensor) -> Tensor:
    return condition.clone()


def _results(taken: Tensor, yes: str) -> list[Tensor]:
    values = [tensor_of(node) for node in parse(yes).returned if node is not None]
    return [torch.empty(value.shape, dtype=value.dtype, device=taken.device) for value in values]


def _run(taken: Tensor, operands: Sequence[Tensor], yes: str, no: str) -> list[Tensor]:
    function = function_of(yes if bool(taken) else no)
    with torch.no_grad():
        results = [result.contiguous() for result in function(*operands)]
    return with_own_memory(results, operands)


def _held(yes: str, no: str) -> int:
    """With PyTorch's kernels: what the larger of both does."""
    return max(bytes_of_round(yes), bytes_of_round(no))


TAKEN = CustomOp("taken(Tensor condition) -> Tensor", fake=_like, kernel=_same)
BRANCH = CustomOp(
    "branch(Tensor taken, Tensor[] operands, str yes, str no) -> Tensor[]",
    fake=_results,
    kernel=_run,
    holds=_held,
)
OPERATORS = (TAKEN, BRANCH)
taken, branch = (operator.op for operator in OPERATORS)
