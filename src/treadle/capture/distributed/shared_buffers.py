"""Buffers that a step writes, on many ranks: afterwards all ranks have the first rank's values.

::

    before:  ...; return loss, mean'                              mean' -> running_mean
    after:   ...; s = broadcast(mean', 0, "0"); w = wait_tensor(s); return loss, w

A buffer that no step writes is the same on all ranks from the start, and is not sent.
"""

import torch
from torch import fx

from treadle.capture.distributed.gradient_sync import RankGroup
from treadle.compat.distributed.collectives import collective_op
from treadle.graph.core.node_info import tensor_of
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.core.values import emit

aten = torch.ops.aten


def send_written_buffers(step: StepGraph, group: RankGroup) -> None:
    """Insert the collectives, in the order of the outputs."""
    (output,) = step.graph.find_nodes(op="output")
    returned = list(step.returned)
    inputs = step.signature.inputs
    for at, (value, entry) in enumerate(step.outputs()):
        if value is None or entry.writes is None or inputs[entry.writes].role is not Role.BUFFER:
            continue
        with step.graph.inserting_before(output):
            returned[at] = _sent(value, group)
    output.args = (tuple(returned),)


def _sent(value: fx.Node, group: RankGroup) -> fx.Node:
    if tensor_of(value).is_complex():
        real = emit(value, aten.view_as_real.default, value)
        return emit(value, aten.view_as_complex.default, _sent(real, group))
    started = emit(value, collective_op("broadcast"), value, 0, group.name)
    return emit(value, collective_op("wait_tensor"), started)
