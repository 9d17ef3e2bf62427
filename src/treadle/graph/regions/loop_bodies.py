"""The functions of a ``while_loop`` or ``scan`` as graphs that are compiled like a step.

::

    before:  carried_0, other_0 -> mul(t(carried_0), other_0)
    after:   carried_0, other_0 -> clone(mul(t(carried_0), other_0), contiguous)

    before:  carried_0, other_0, grad_0 -> mul(grad_0, other_0), mul(grad_0, carried_0)
    after:   carried_0, other_0, grad_0, sum_0 -> mul(grad_0, other_0),
                                                  add(sum_0, mul(grad_0, carried_0))

The output of one iteration is the input of the next: contiguous. Gradients of ``others`` are added
to those of later iterations in the function itself, if possible by the kernel that computes them.

An index that depends on an iteration is known only in that iteration, but the step's index check
runs before all iterations. So operations that read or write at such an index stay PyTorch kernels,
which check it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treadle.graph.analysis.index_bounds import index_bounds_in
from treadle.graph.core.node_info import NodeInfo, describe, tensor_of, with_info
from treadle.graph.core.operators import operation_name
from treadle.graph.core.signature import Input, Role, Signature, StepGraph
from treadle.graph.custom_ops.branches import branch
from treadle.graph.custom_ops.scans import scan, scan_backward
from treadle.graph.custom_ops.while_loops import while_loop, while_loop_backward
from treadle.graph.text.parsing import parse
from treadle.util.reasons import ReasonCode

aten = torch.ops.aten
_KNOWN = NodeInfo(phase="forward")
WITH_BODIES = frozenset((while_loop, while_loop_backward, scan, scan_backward, branch))
"""The operators that run functions of their own."""


@dataclass(frozen=True, slots=True)
class LoopBody:
    """One function of a loop. ``sums``: how many of its last results are added up over rounds."""

    text: str
    sums: int = 0

    def step(self) -> StepGraph:
        """A new graph, ready to be cleaned, planned and lowered."""
        step = parse(self.text)
        (output,) = step.graph.find_nodes(op="output")
        results: list[fx.Node] = list(output.args[0])
        first = len(results) - self.sums
        results[first:] = _summed(step, output, results[first:])
        output.args = (tuple(_contiguous(step.graph, output, result) for result in results),)
        for lookup in index_bounds_in(step.graph):
            name = operation_name(lookup.user.target)
            why = f"an index of {name} is known in its round only, and PyTorch's kernel looks at it"
            with_info(lookup.user, eager=ReasonCode.REFUSED.because(why))
        names = [f"sum_{at}" for at in range(self.sums)]
        inputs = (*step.signature.inputs, *(Input(Role.BATCH, name) for name in names))
        return StepGraph(step.graph, Signature(inputs, step.signature.outputs))


def bodies_of(op: str, args: Sequence[Any]) -> tuple[LoopBody, ...]:
    """The functions that the call of ``op`` runs: the condition, the body, and the gradients of a
    round if it goes back; the body of a scan, or its gradients; both branches of a condition; none
    of anything else."""
    if op == str(while_loop):
        *_, condition, body, _ = args
        return LoopBody(condition), LoopBody(body)
    if op == str(while_loop_backward):
        _, carried, _, differentiable, condition, body, backward = args
        sums = sum(differentiable[len(carried) :])
        return LoopBody(condition), LoopBody(body), LoopBody(backward, sums)
    if op == str(scan):
        return (LoopBody(args[-2]),)
    if op == str(scan_backward):
        _, starts, slices, _, differentiable, _, backward = args
        return (LoopBody(backward, sum(differentiable[len(starts) + len(slices) :])),)
    if op == str(branch):
        *_, yes, no = args
        return LoopBody(yes), LoopBody(no)
    return ()


def _summed(step: StepGraph, output: fx.Node, results: Sequence[fx.Node]) -> list[fx.Node]:
    """The results added to inputs of their own."""
    last = step.placeholders[-1]
    nodes: list[fx.Node] = []
    for at, result in enumerate(results):
        value = tensor_of(result)
        with step.graph.inserting_after(last):
            last = step.graph.placeholder(f"sum_{at}")
        describe(last, value.new_empty(value.shape), NodeInfo())
        with step.graph.inserting_before(output):
            added = step.graph.call_function(aten.add.Tensor, (last, result))
        describe(added, aten.add.Tensor(tensor_of(last), value), _KNOWN)
        nodes.append(added)
    return nodes


def _contiguous(graph: fx.Graph, output: fx.Node, result: fx.Node) -> fx.Node:
    value: Tensor = tensor_of(result)
    if value.is_contiguous():
        return result
    form: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(output):
        contiguous = graph.call_function(aten.clone.default, (result,), form)
    describe(contiguous, aten.clone.default(value, **form), _KNOWN)
    return contiguous
