"""The loss over a large vocabulary in chunks, inside micro-batches."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import treadle
from large_vocabularies import HANDLED, ROW, D, Model, T, V, captured, make_step, plain, values
from testing import trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, tensor_of
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import from_environment
from treadle.passes.chunks import chunked_loss
from treadle.passes.chunks.chunked_loss import ChunkLoss, findings
from treadle.passes.chunks.micro_batches import MicroBatch
from treadle.passes.memory.order import Order, facts_of
from treadle.passes.memory.rematerialise import build, recompute

aten = torch.ops.aten

EMBEDDING = aten.embedding_dense_backward.default
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


def test_a_sum_goes_on_in_its_own_memory():
    """Of the gradient of a weight there is one buffer, whatever chunk of whatever micro-batch."""
    made = in_parts(captured(plain, Model(), (ROWS, T)), 2, 4 * ROW)
    sums = [
        node
        for node in made.graph.find_nodes(op="call_function", target=aten.addmm.default)
        if tensor_of(node).shape == (V, D)
    ]
    assert len(sums) == 4 + 4 + 2 - 1, "two, two and one row of 7, in chunks of 4 rows"
    for before, node in itertools.pairwise(sums):
        assert node.args[0] is before
        assert [*before.users] == [node]


@pytest.mark.parametrize("wide", [False, True])
def test_products_of_16_bits_are_added_up_in_32(wide):
    made = in_parts(captured(plain, Model(), (ROWS, T), half=True), 2, 2 * ROW, wide=wide)
    sums = [node for node in made.graph.nodes if _is_sum(node)]
    assert len(sums) > ROWS
    assert {tensor_of(node).dtype for node in sums} == {torch.float32}
    assert wide == any(node.target is aten.addmm.dtype for node in sums)


def _is_sum(node: fx.Node) -> bool:
    products = (aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.addmm.dtype)
    return node.target in products and tensor_of(node).shape == (V, D)


@pytest.mark.parametrize(("length", "sums"), [(16, 1), (17, 3)])
def test_a_sum_that_is_larger_than_its_rows_is_made_once(length, sums):
    """The gradient of an embedding: six rows of some tokens each, of a table of 97."""
    made = captured(plain, Model(), (6, length))
    given = values(made, (6, length))
    expected = run_step(made, given)
    run_passes(made, [MicroBatch(2)])
    assert len(made.graph.find_nodes(op="call_function", target=EMBEDDING)) == sums
    for new, old in zip(run_step(made, given), expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


def test_a_large_sum_of_rows_that_are_not_in_one_piece():
    """Rows that are not joined are added up, however large the sum is."""

    def loss(m, x, y):
        return F.cross_entropy(m(x.t().reshape(-1)), y.t().reshape(-1))

    made = captured(loss, Model(), (6, 3))
    given = values(made, (6, 3))
    expected = run_step(made, given)
    assert run_passes(made, [MicroBatch(2)])[0].matches == 1
    assert len(made.graph.find_nodes(op="call_function", target=EMBEDDING)) == 3
    for new, old in zip(run_step(made, given), expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"beta": 0.5}, "scales or stretches what it adds to"),
        ({"alpha": 2}, "scales or stretches what it adds to"),
        ({"row": True}, "scales or stretches what it adds to"),
    ],
)
def test_what_chunks_cannot_be_added_to(changed, reason):
    row = changed.pop("row", False)

    def program(h, w, total):
        logits = torch.mm(h, w.t())
        gradient = torch.exp(logits)
        return torch.addmm(total, gradient.t(), h, **changed), gradient.sum()

    inputs = torch.randn(21, D), torch.randn(V, D), torch.randn(D if row else (V, D))
    step = trace(program, *inputs)
    assert findings(step, ROW)[0].reason.endswith(reason)


def test_chunks_are_added_to_what_is_there():
    def program(h, w, total):
        gradient = torch.exp(torch.mm(h, w.t()))
        return torch.addmm(total, gradient.t(), h), gradient.sum()

    inputs = [torch.randn(rows, D, dtype=torch.float64) for rows in (21, V, V)]
    made = trace(program, *inputs)
    assert ChunkLoss(5 * ROW).run(made) == 1
    first = next(n for n in made.graph.nodes if n.target is aten.addmm.default)
    assert first.args[0] is made.placeholders[2]
    for new, old in zip(run_step(made, inputs), program(*inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-10)


# Compiled.


LARGE = 4099


def labels_that_count(m, x, y):
    return F.cross_entropy(m(x).view(-1, LARGE), y.view(-1))


def smoothed(m, x, y):
    return F.cross_entropy(m(x).view(-1, LARGE), y.view(-1), label_smoothing=0.1)


def rows_of_tokens(rows):
    torch.manual_seed(1)
    x, y = torch.randint(LARGE, (rows, T)), torch.randint(LARGE, (rows, T))
    y[0, 1:] = -100  # one row counts less than the others
    y[rows // 2] = -100  # and one not at all
    return x, y


def trained(tmp_path, loss, model, rows, **changed):
    """Losses and parameters after three steps, and the step."""
    model = copy.deepcopy(model)
    step, optimizer = make_step(model, loss)
    if changed:
        chosen = replace(from_environment(), cache_dir=tmp_path, **changed)
        step = treadle.compile(step, model=model, optimizer=optimizer, options=chosen)
    batch = rows_of_tokens(rows)
    return [step(*batch).detach() for _ in range(3)], [*model.parameters()], step, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", [labels_that_count, smoothed])
def test_compiled_steps_equal_eager(tmp_path, loss, tied, dtype):
    torch.manual_seed(0)
    model = Model(vocabulary=LARGE, bias=not tied, tied=tied).to(dtype)
    exact = {"rtol": 1e-9, "atol": 1e-10}
    close = exact if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    expected, other, _, _ = trained(tmp_path, loss, model, ROWS)
    most = 4 * LARGE * dtype.itemsize
    given = {"micro_batch": 2, "chunk_logits": most}
    found, mine, step, batch = trained(tmp_path, loss, model, ROWS, **given)
    for new, old in zip((*found, *mine), (*expected, *other), strict=True):
        torch.testing.assert_close(new, old, **close)
    assert step.summary().micro_batches.startswith("3 micro-batches of at most 2 of 5 rows")
    assert step.measure(*batch).peak_bytes <= step.compiled.artifact.peak_bytes


def test_a_budget_takes_smaller_chunks_in_micro_batches(tmp_path):
    model = Model(vocabulary=LARGE, tied=True)
    expected, other, _, _ = trained(tmp_path, labels_that_count, model, 64)
    given = {"micro_batch": 16, "memory": 0.0}
    found, mine, step, batch = trained(tmp_path, labels_that_count, model, 64, **given)
    for new, old in zip((*found, *mine), (*expected, *other), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    assert step.measure(*batch).peak_bytes <= step.compiled.artifact.peak_bytes
    whole = trained(tmp_path, labels_that_count, model, 64, **given, chunk_logits=0)[2]
    assert step.compiled.artifact.peak_bytes < whole.compiled.artifact.peak_bytes


def least(tmp_path, **changed):
    """The smallest peak of a plan."""
    model = Model(vocabulary=LARGE, tied=True)
    step, optimizer = make_step(model, labels_that_count)
    plan = treadle.plan(
        step,
        *rows_of_tokens(64),
        model=model,
        optimizer=optimizer,
        memory="1KiB",
        options=replace(from_environment(), cache_dir=tmp_path, **changed),
        points=2,
    )
    return plan.peak_bytes


def test_micro_batches_take_less_memory_than_the_whole_batch(tmp_path):
    """They do not with their logits whole: then the gradients' sums are there beside these."""
    whole, plain_, cut = (
        least(tmp_path, micro_batch=rows, chunk_logits=chunk)
        for rows, chunk in ((None, None), (16, 0), (16, None))
    )
    assert cut < whole
    assert cut < plain_ - 8 * T * LARGE * 4
