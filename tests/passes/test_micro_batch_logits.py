"""The loss over a large vocabulary in chunks, inside micro-batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from large_vocabularies import HANDLED, ROW, D, Model, T, V, captured, plain, values
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.chunks import chunked_loss
from treadle.passes.chunks.chunked_loss import ChunkLoss, findings
from treadle.passes.chunks.micro_batches import MicroBatch
from treadle.passes.memory.order import Order, facts_of
from treadle.passes.memory.rematerialise import build, recompute

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


def again_while_there(order: Order) -> list[str]:
    """What is computed a second time although a later forward pass reads the first."""
    facts = order.facts
    first = {i: k for k, i in enumerate(order.origin) if not order.again[k]}
    phases = [max(facts.phases[i], int(a)) for i, a in zip(order.origin, order.again, strict=True)]
    last = [-1] * len(phases)
    for k in range(len(phases) - 1, -1, -1):
        if phases[k] == 0:
            reader = max(last[k], k) if facts.views[order.origin[k]] else k
            for operand in order.operands[k]:
                last[operand] = max(last[operand], reader)
    seconds = ((k, i) for k, i in enumerate(order.origin) if order.again[k] and i in first)
    return [str(facts.nodes[i]) for k, i in seconds if last[first[i]] > k]


class Deep(Model):
    """With a layer that the loss is not computed from in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.out(self.norm(F.gelu(self.layer(self.embed(x)))))


def test_weights_are_converted_once_for_all_micro_batches():
    """A backward pass would otherwise convert them a second time while those of the forward passes
    to come are there."""
    step = captured(plain, Deep(), (ROWS, T), half=True)
    made = in_parts(step, 2, 2 * ROW)
    facts = facts_of(made)
    kept = [i for i, node in enumerate(facts.nodes) if node.target is aten.gelu.default]
    order = recompute(facts, kept)
    assert not again_while_there(order)
    dropped = build(order)
    assert any(info(node).recomputed for node in dropped.graph.nodes)
    given = values(step, (ROWS, T))
    for new, old in zip(run_step(dropped, given), run_step(made, given), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
