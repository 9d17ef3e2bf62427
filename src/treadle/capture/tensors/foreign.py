"""Tensors that a captured step cannot contain: not dense, without their own memory, or in memory
that something else allocated."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from treadle.capture.functionalize import Functionalizer
from treadle.capture.python_state.reads.reads_graph import ReadsGraph
from treadle.capture.sources import ClosedOverTensor, Held, Source
from treadle.capture.symbolic.arrays.arrays import NdArray, overlaps
from treadle.capture.tensors.sparse_gradients import is_sparse
from treadle.compat.distributed.sharded_tensors import local_of
from treadle.graph.core.node_info import info, known_value
from treadle.graph.core.signature import Input
from treadle.graph.core.types import tensors_in
from treadle.util.errors import CaptureError, joined_with
from treadle.util.memory import memory_start

_LIFTS = frozenset(
    {
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.lift_fresh_copy.default,
        torch.ops.aten.detach.default,
    }
)
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})


def refuse_undense(graph: fx.Graph) -> None:
    """TR-127 for sparse and quantized tensors. Those that stand for sparse gradients go: what
    was to be computed of them was computed of their parts."""
    for node in reversed(list(graph.nodes)):
        if not node.users and any(map(is_sparse, tensors_in(known_value(node)))):
            graph.erase_node(node)
    for node in graph.nodes:
        for value in tensors_in(known_value(node)):
            if value.layout is torch.strided and value.dtype not in _QUANTIZED:
                continue
            kind = "a quantized" if value.layout is torch.strided else f"a {value.layout}"
            raise joined_with(RuntimeError, CaptureError)(
                f"the step creates {kind} tensor ({node.target})",
                code="TR-127",
                where=info(node).where,
                remedy=(
                    "compute with dense tensors in the step, or do this part outside and pass "
                    "the result"
                ),
            )


def refuse_foreign_writes(
    graph: fx.Graph,
    functionalizer: Functionalizer,
    sources: Sequence[tuple[Input, Source]],
    found: ReadsGraph,
    looked_at: Sequence[NdArray],
) -> None:
    """TR-112 for a write to a tensor of memory that something else outside the step has: an
    array of NumPy's, bytes. One that the run itself made is traced as a copy of it
    (``lift_fresh``), to which the write would go; of one that is held the run would see the array
    as it was. ``looked_at``: arrays of which the snapshot knows nothing."""
    inputs = zip(graph.find_nodes(op="placeholder"), sources, strict=True)
    for node, (_, source) in inputs:
        if not isinstance(source, ClosedOverTensor | Held):
            continue
        tensor = (
            source.tensor if isinstance(source, ClosedOverTensor) else local_of(source.place.get())
        )
        same = [node, *(user for user in node.users if user.target in _LIFTS)]
        written = next((user for user in same if functionalizer.is_written(user)), None)
        if written is None or tensor.untyped_storage().resizable():
            continue  # a storage of PyTorch's own making can be resized, and is the step's alone
        start = memory_start(tensor)
        known = found.has_memory_in(start, start + tensor.untyped_storage().nbytes())
        if known or any(overlaps([tensor, array]) for array in looked_at):
            raise CaptureError(
                f"the step writes to a tensor {list(tensor.shape)} in the memory of a NumPy "
                "array or of other bytes outside the step",
                code="TR-112",
                where=info(written).where,
                remedy="write to a copy: torch.tensor(array), or torch.from_numpy(array.copy())",
            )


def refuse_without_memory(tensor: Tensor, where: str) -> None:
    """TR-137 for a tensor whose memory is that of another one while a step is captured."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        raise CaptureError(
            "the step creates a plain tensor in another one's memory (as_subclass, an "
            "extension), but tensors have no values during capture",
            code="TR-137",
            where=where,
            remedy=(
                "compute with the tensor itself; detach() gives another tensor in the same memory"
            ),
        ) from None
