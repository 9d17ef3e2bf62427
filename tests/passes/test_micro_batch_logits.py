"""The loss over a large vocabulary in chunks, inside micro-batches."""

import pytest
import torch

from large_vocabularies import HANDLED, ROW, Model, T, V, captured, values
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.chunks import chunked_loss
from treadle.passes.chunks.chunked_loss import ChunkLoss, findings
from treadle.passes.chunks.micro_batches import MicroBatch

aten = torch.ops.aten

ROWS = 5


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A vocabulary of 97 is large."""
    monkeypatch.setattr(chunked_loss, "SMALLEST_VOCABULARY", 64)


def in_parts(step: StepGraph, rows: int, most: int, *, wide: bool = False) -> StepGraph:
    """Micro-batches of at most so many rows, whose logits have at most so many bytes at once."""
    made = step.copy()
    split, cut = run_passes(made, [MicroBatch(rows, wide), ChunkLoss(most, wide)])
    assert split.matches == 1
    assert cut.matches == -(-ROWS // rows), findings(made, most)
    assert ChunkLoss(most, wide).run(made) == 0, "a second run must find nothing to do"
    return made


def logits_of(step: StepGraph) -> list[int]:
    """Bytes of what is as wide as the vocabulary, and has rows."""
    return [
        tensor_of(node).nbytes
        for node in step.graph.nodes
        if info(node).chunk is not None
        and node.target in (aten.mm.default, aten.addmm.default)
        and tensor_of(node).shape[-1] == V
    ]


def check(step: StepGraph, rows: int, most: int) -> StepGraph:
    made = in_parts(step, rows, most)
    assert logits_of(made)
    assert max(logits_of(made)) <= most
    given = values(step, (ROWS, T))
    for new, old in zip(run_step(made, given), run_step(step, given), strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, rtol=1e-5, atol=1e-6)
    return made


@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("loss", HANDLED)
def test_ordinary_losses_are_cut_in_each_micro_batch(loss, half):
    step = captured(loss, Model(bias=half, tied=half), (ROWS, T), half=half)
    check(step, 2, 4 * ROW // (1 + half))
