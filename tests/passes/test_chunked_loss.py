"""The loss over a large vocabulary in chunks of rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import treadle
from large_vocabularies import (
    HANDLED,
    ROW,
    B,
    D,
    Model,
    T,
    V,
    batch,
    captured,
    make_step,
    plain,
    shifted_logits,
    values,
)
from testing import trace
from treadle.capture.step import capture
from treadle.compiler.chunks import fastest_chunk, versions_of
from treadle.compiler.cleaning import cleaned
from treadle.compiler.memory import plan_within, planned
from treadle.compiler.request import Target
from treadle.graph.analysis.alias import analyse
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, tensor_of, value_of, with_info
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.options import Options, from_environment
from treadle.passes.chunks import chunked_loss
from treadle.passes.chunks.chunked_loss import ChunkLoss, Logits, findings, largest_logits
from treadle.passes.chunks.rows import Grid, RowRange, boxes_of
from treadle.passes.cleanup.noops import RemoveNoOps
from treadle.passes.memory.choose import fastest_plan
from treadle.passes.memory.cost import flops_of, work_of
from treadle.passes.memory.fused import recompute_costs
from treadle.passes.memory.order import facts_of
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.util.errors import PlanError
from treadle.util.sizes import parse_bytes

aten = torch.ops.aten


@pytest.fixture
def small(monkeypatch):
    """A vocabulary of 97 is large."""
    monkeypatch.setattr(chunked_loss, "SMALLEST_VOCABULARY", 64)


def cut(step: StepGraph, most: int) -> StepGraph:
    result = step.copy()
    (report,) = run_passes(result, [ChunkLoss(most)])
    assert report.matches, findings(step, most)
    assert ChunkLoss(most).run(result) == 0, "a second run must find nothing to do"
    return result


def check(step: StepGraph, most: int, rows=(B, T)) -> StepGraph:
    """Cut, and equal to rounding; no chunk is larger than it may be, and no output shares bytes
    with another or an input that did not before."""
    made = cut(step, most)
    given = values(step, rows)
    for new, old in zip(run_step(made, given), run_step(step, given), strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, rtol=1e-5, atol=1e-6)
    for node in made.graph.nodes:
        if info(node).chunk is not None and node.target in (aten.mm.default, aten.addmm.default):
            wide = tensor_of(node).shape[-1] == V
            assert not wide or tensor_of(node).nbytes <= max(most, ROW)
    assert shared(made) == shared(step)
    return made


def shared(step: StepGraph) -> list[tuple[int, int]]:
    aliases = analyse(step)
    found = [*step.placeholders, *(node for node in step.returned if node is not None)]
    pairs = [(i, j) for i in range(len(found)) for j in range(i)]
    return [(i, j) for i, j in pairs if aliases.share(found[i], found[j])]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("loss", HANDLED)
def test_ordinary_losses_are_cut_and_equal(loss, half):
    step = captured(loss, Model(bias=half, tied=half), half=half)
    made = check(step, 5 * ROW // (1 + half))
    whole = [n for n in made.graph.nodes if n.op == "call_function" and _is_whole(n)]
    assert not whole, "logits exist as a whole"


def _is_whole(node) -> bool:
    """Whether a node is as large as the logits, and computed."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.shape[-1:] not in ((V,), (91,)):
        return False
    return (
        value.numel() > 11 * V
        and value.untyped_storage().nbytes() > 11 * V
        and D not in value.shape
    )


def returned(m, x, y):
    logits = m(x)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits


def classes_second(m, x, y):
    return F.cross_entropy(m(x).transpose(1, 2), y)


def normalised(m, x, y):
    logits = m(x).view(-1, V)
    return F.cross_entropy(logits / logits.std(), y.view(-1))


def scaled_by_the_loss(m, x, y):
    logits = m(x).view(-1, V)
    return F.cross_entropy(logits / logits.square().sum().sqrt(), y.view(-1))


def dropped(m, x, y):
    return F.cross_entropy(F.dropout(m(x), 0.1).view(-1, V), y.view(-1))


def picked_rows(m, x, y):
    logits = m(x).view(-1, V)
    return F.cross_entropy(logits[torch.arange(0, 21, 2)], y.view(-1)[::2])


def sum_of_some_rows(m, x, y):
    return m(x).sum(1).square().mean()


def every_second(m, x, y):
    return F.cross_entropy(m(x)[:, ::2].reshape(-1, V), y[:, ::2].reshape(-1))


def rows_with_rows(m, x, y):
    logits = m(x).view(-1, V)
    return (logits @ logits.t()).mean()


REFUSED = [
    (returned, "is returned"),
    (classes_second, "moves rows behind other dims"),
    (normalised, "mixes rows: all dims"),
    (scaled_by_the_loss, "known after all rows"),
    (dropped, "not known to work row by row"),
    (picked_rows, "not known to work row by row"),
    (sum_of_some_rows, "sums over some dims of rows alone"),
    (every_second, "skips elements"),
    (rows_with_rows, "multiplies rows with rows"),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("loss", "reason"), REFUSED, ids=[each.__name__ for each, _ in REFUSED])
def test_what_is_left_alone_says_why(loss, reason):
    step = captured(loss)
    before = str(step.graph)
    finding = findings(step, ROW)[0]
    assert reason in finding.reason
    assert finding.chunks == 0
    if loss is not rows_with_rows:  # whose gradient alone can be cut
        assert ChunkLoss(ROW).run(step) == 0
        assert str(step.graph) == before


@pytest.mark.usefixtures("small")
def test_findings_are_data():
    step = captured(plain)
    (finding,) = findings(step, 5 * ROW)
    assert (finding.chunks, finding.rows, finding.reason) == (5, 5, "")
    (finding,) = findings(step, B * T * ROW)
    assert "one chunk" in finding.reason
    assert findings(captured(plain, Model(width=48)), ROW) == (), "a layer, and no vocabulary"


def test_a_small_vocabulary_is_not_looked_at():
    assert findings(captured(plain), ROW) == ()
    assert largest_logits(captured(plain)) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("most", [1, 2 * ROW, 10 * ROW, 20 * ROW, 21 * ROW - 1])
def test_rows_that_no_chunks_divide(most):
    check(captured(plain), most)


@pytest.mark.usefixtures("small")
def test_one_row_is_one_chunk():
    (finding,) = findings(captured(plain, rows=(1, 1), skip=("row-of-dots",)), 1)
    assert "one chunk" in finding.reason
    check(captured(plain, rows=(1, 2)), 1, rows=(1, 2))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("most", "chunks"), [(7 * ROW, 3), (14 * ROW, 2), (4 * ROW, 6)])
def test_rows_that_are_cut_stay_with_their_sequence(most, chunks):
    step = captured(shifted_logits)
    assert findings(step, most)[0].chunks == chunks
    check(step, most)


@pytest.mark.usefixtures("small")
def test_a_chunk_without_rows_is_refused():
    assert "no rows" in findings(captured(shifted_logits), ROW)[0].reason


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ignored", [slice(0, 5), slice(0, 21)], ids=["a chunk", "all"])
def test_labels_that_do_not_count(ignored):
    step = captured(plain)
    given = values(step)
    given[-1].view(-1)[ignored] = -100
    made = run_step(cut(step, 5 * ROW), given)
    expected = run_step(step, given)
    assert expected[0].isnan() == (ignored.stop == 21)
    for new, old in zip(made, expected, strict=True):
        torch.testing.assert_close(new, old, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small")
def test_a_weight_that_is_infinite_and_not_wanted():
    weight = torch.ones(V)
    weight[0] = torch.inf

    def loss(m, x, y):
        given = y.clamp(min=1).view(-1)
        return F.cross_entropy(m(x).view(-1, V), given, weight=weight, ignore_index=1)

    check(captured(loss), 5 * ROW)


@pytest.mark.usefixtures("small")
def test_a_forward_pass_alone():
    def program(h, w, y):
        return F.cross_entropy(h @ w.t(), y)

    inputs = torch.randn(21, D), torch.randn(V, D), torch.randint(V, (21,))
    step = trace(program, *inputs)
    made = cut(step, 5 * ROW)
    torch.testing.assert_close(run_step(made, inputs)[0], program(*inputs))
    assert {info(n).phase for n in made.graph.nodes if n.op == "call_function"} == {"forward"}


@pytest.mark.usefixtures("small")
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(2, 24),
    most=st.integers(1, 24),
    reduction=st.sampled_from(["mean", "sum"]),
    kept=st.sampled_from([V, V - 3]),
    cap=st.booleans(),
    bias=st.booleans(),
)
def test_random_losses_equal_eager(rows, most, reduction, kept, cap, bias):
    def program(h, w, b, y):
        logits = h @ w.t() + 0 if not bias else torch.addmm(b, h, w.t())
        logits = logits[:, :kept]
        logits = 5 * torch.tanh(logits / 5) if cap else logits
        loss = F.cross_entropy(logits, y, reduction=reduction)
        return loss, *torch.autograd.grad(loss, [h, w])

    torch.manual_seed(rows)
    leaves = [torch.randn(each).requires_grad_() for each in ((rows, D), (V, D), (V,))]
    inputs = (*leaves, torch.randint(kept, (rows,)))
    step = cleaned(trace(program, *inputs), Options())
    result = step.copy()
    changed = ChunkLoss(most * ROW).run(result)
    assert changed == (rows > most)
    expected = program(*inputs)
    for new, old in zip(run_step(result, inputs), expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
def test_never_less_accurate_than_the_product_as_a_whole(half):
    """Against numbers of 64 bits: the gradients of the weights, and of their bias."""
    model = Model(bias=True)
    step = captured(plain, model, (16, 64), half=half)
    given = values(step, (16, 64))
    exact = _exact(step, given)
    whole, made = run_step(step, given), run_step(cut(step, 64 * ROW // (1 + half)), given)
    for wanted, old, new in zip(exact, whole, made, strict=True):
        if wanted is not None and wanted.numel() > 1:
            before, after = ((each.double() - wanted).norm() for each in (old, new))
            assert after <= 1.05 * before + 1e-6 * wanted.norm()


def _exact(step: StepGraph, given):
    """The step of the parts that chunks are of, each number of 16 or 32 bits as one of 64, with
    gradients of logits rounded as they are."""
    wide = [g.double() if g.is_floating_point() else g for g in given]

    def program(module):
        for node in module.graph.nodes:
            dtype = node.kwargs.get("dtype")
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                node.update_kwarg("dtype", torch.float64)
            if node.target is aten._log_softmax_backward_data.default:
                node.update_arg(3, torch.float64)
        return module

    copy = step.copy()
    program(copy)
    return run_step(copy, wide)


def options(folder: Path, **changed) -> Options:
    return replace(from_environment(), cache_dir=folder, **changed)


LARGE = 4099


def large_plain(m, x, y):
    return F.cross_entropy(m(x).view(-1, LARGE).float(), y.view(-1))


def trained(tmp_path, *, half=False, steps=3, **changed):
    torch.manual_seed(0)
    model = Model(vocabulary=LARGE, bias=True, tied=True)
    step, optimizer = make_step(model, large_plain, half=half)
    if changed:
        chosen = options(tmp_path, **changed)
        step = treadle.compile(step, model=model, optimizer=optimizer, options=chosen)
    given = batch((4, 32), LARGE)
    losses = [step(*given).item() for _ in range(steps)]
    return losses, list(model.parameters()), step, given


def without_workspaces(step):
    """The peak that a step promises, less what its library calls hold while they run: some CPUs sum
    products of 16 bits in a copy of 32."""
    line = step.compiled.log.notes.timeline
    return line.reserve + sum(line.inputs) + line.constants + line.arena + max(line.calls)


@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
def test_three_steps_equal_eager_and_take_less_memory(tmp_path, half):
    logits = 4 * 32 * LARGE * 4
    losses, parameters, _, _ = trained(tmp_path, half=half)
    found = {}
    for most in (0, logits // 16):
        again, other, step, given = trained(tmp_path, half=half, chunk_logits=most)
        assert again == pytest.approx(losses, rel=1e-4 if half else 1e-5)
        for new, old in zip(other, parameters, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-2 if half else 1e-4, atol=1e-4)
        assert step.measure(*given).peak_bytes <= 1.01 * step.compiled.artifact.peak_bytes
        found[most] = without_workspaces(step)
    # (In 16 bits logits are half as large, and the sum of the weight's gradient is not.)
    assert found[0] < (1.1 if half else 2.1) * logits, "one kernel makes the loss and the gradient"
    assert found[logits // 16] < found[0] - logits // (8 if half else 2)


def test_a_budget_takes_smaller_chunks(tmp_path):
    whole = trained(tmp_path, steps=1, memory=0.0, chunk_logits=0)[2].compiled.artifact.peak_bytes
    small = trained(tmp_path, steps=1, memory=0.0)[2].compiled.artifact.peak_bytes
    assert small < whole - 4 * 32 * LARGE * 4 // 2
    between = (whole + small) // 2
    losses, _, step, _ = trained(tmp_path, memory=between)
    assert step.compiled.artifact.peak_bytes <= between
    assert losses == pytest.approx(trained(tmp_path)[0], rel=1e-5)
    with pytest.raises(PlanError, match="TR-202") as refused:
        trained(tmp_path, steps=1, memory=small // 2)
    _, named, _ = refused.value.remedy.split('"')
    assert small <= parse_bytes(named) <= 1.01 * small


def step_of(rows=(4, 32), **changed):
    model = Model(vocabulary=LARGE, bias=True, tied=True)
    step, optimizer = make_step(model, large_plain)
    given = {"models": {"m": model}, "optimizers": {"o": optimizer}, "kwargs": {}}
    found = capture(step, args=batch(rows, LARGE), **given)
    chosen = Options(**changed)
    return cleaned(found.step, chosen), Target("cpu", chosen)


def test_the_peak_shows_one_chunk():
    """Less than two chunks of logits beside what the step has without any."""
    sizes = {}
    logits = 4 * 32 * LARGE * 4
    for most in (0, logits // 8, logits // 32):
        step, target = step_of(chunk_logits=most)
        memory, _ = plan_within(step, target)
        sizes[most] = planned(memory.step, target).plan.peak_bytes
    assert sizes[0] - sizes[logits // 8] > 0.6 * logits
    assert sizes[logits // 8] - sizes[logits // 32] < 2 * logits // 8


def test_sums_of_chunks_are_one_piece_of_memory():
    step, target = step_of(chunk_logits=LARGE * 4 * 32)
    memory, _ = plan_within(step, target)
    plan = planned(memory.step, target).plan
    sums = [each.outputs[0] for each in plan.steps if getattr(each, "out", "") == "aten.addmm.out"]
    wide = [name for name in sums if plan.buffers[name].shape == (LARGE, D)]
    assert len(wide) == 3
    assert len({plan.offsets[name] for name in wide}) == 1


@pytest.mark.usefixtures("small")
def test_products_of_16_bits_give_32_where_the_library_can():
    def program(h, w, y):
        x = aten._log_softmax((h @ w.t()).float(), 1, False)
        loss, weight = aten.nll_loss_forward(x, y, None, 1, -100)
        g = aten.nll_loss_backward(torch.ones_like(loss), x, y, None, 1, -100, weight)
        g = aten._log_softmax_backward_data(g, x, 1, torch.float32).bfloat16()
        return loss, g @ w, g.t() @ h

    with FakeTensorMode():
        h, w = (torch.empty(n, D, device="cuda", dtype=torch.bfloat16) for n in (21, V))
        graph = make_fx(program)(h, w, torch.empty(21, device="cuda").long()).graph
    for node in graph.nodes:
        with_info(node, phase="forward")
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    inputs = tuple(Input(Role.BATCH, name) for name in ("h", "w", "y"))
    step = StepGraph(graph, Signature(inputs, tuple(Output(f"out{i}") for i in range(3))))
    run_passes(step, [RemoveNoOps(), ChunkLoss(7 * V * 2, wide_products=True)])
    products = [n for n in step.graph.nodes if "out_dtype" in n.kwargs]
    assert [n.target for n in products] == [aten.mm.dtype, *[aten.addmm.dtype] * 2]
    assert all(tensor_of(n).dtype is torch.float32 for n in products)
    assert all(flops_of(n) == 2 * 7 * V * D for n in products)
    assert all(work_of(n)[2] is torch.bfloat16 for n in products)
    assert tensor_of(step.returned[2]).dtype is torch.bfloat16


def test_versions_of_a_step():
    step, target = step_of()
    (only,) = versions_of(step, target)
    assert only.first == (), "small logits stay as they are"
    step, target = step_of(memory=0.5)
    first, *smaller = versions_of(step, target)
    assert first.first == ()
    quarter = 32 * 4 * LARGE
    assert [each.first for each in smaller] == [(ChunkLoss(quarter),)], "a sixteenth has 8 rows"
    step, target = step_of(memory=0.5, numerics="eager", chunk_logits=1)
    assert [each.first for each in versions_of(step, target)] == [()], "eager's own sums"


def test_each_chunk_is_estimated_to_read_the_weights_again():
    times = []
    for rows in (128, 64, 32):
        step, _ = step_of()
        ChunkLoss(rows * 4 * LARGE).run(step)
        times.append(recompute_costs(facts_of(step), H200).once)
    assert times[0] < times[1] < times[2]


def chunks_on(device, rows, width, classes, dtype=torch.bfloat16):
    row_bytes = classes * dtype.itemsize
    logits = Logits(rows, row_bytes, width * classes, dtype)
    return -(-rows * row_bytes // fastest_chunk(logits, device))


def test_the_fastest_chunk_is_a_matter_of_the_device():
    assert chunks_on(CPU_MODEL, 1 << 15, 768, 50257) > chunks_on(H200, 1 << 15, 768, 50257)
    assert chunks_on(H200, 1 << 22, 1 << 17, 64) == 8, "no chunk is smaller than 64 MiB"
    assert chunks_on(H200, 1 << 20, 2048, 128256, torch.float32) == 64, "that is enough to compile"


def test_all_micro_batches_together_have_so_many_chunks():
    logits = Logits(1 << 20, 128256 * 4, 2048 * 128256, torch.float32)
    for times, chunks in ((1, 64), (4, 16), (16, 4), (100, 1)):
        nbytes = fastest_chunk(replace(logits, times=times), H200)
        assert -(-logits.nbytes // nbytes) == chunks


@pytest.mark.parametrize("device", [H200, CPU_MODEL], ids=["h200", "cpu"])
def test_weights_are_cast_once_for_all_chunks(device):
    """Between the first product of a chunk and the second, nobody else reads them: a second cast
    would be a kernel of its own."""
    model = Model(vocabulary=LARGE)
    step = captured(large_plain, model, (4, 32), half=True)
    ChunkLoss(32 * 2 * LARGE).run(step)
    graph = fastest_plan(step, device).step.graph
    chunks = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [tensor_of(n).shape for n in chunks].count((32, LARGE)) == 4, "logits of four chunks"
    casts = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    weights = [n for n in casts if n.all_input_nodes[0].op == "placeholder"]
    assert [tensor_of(n).shape for n in weights].count((LARGE, D)) == 1


MEASURED = replace(H200, bandwidth=2.0**42, flops={**H200.flops, torch.bfloat16: 2.0**49.75})
"""The ceilings that an H200 itself was measured to have, on small products that stay cool."""


@pytest.mark.parametrize("device", [H200, MEASURED], ids=["nominal", "measured"])
def test_chunks_are_cut_where_they_cost_next_to_nothing(device):
    """As measured: four cost the first 1.1 % of a step of its head alone; two would cost the others
    2.6, 6 and 12 %."""
    assert chunks_on(device, 32768, 2048, 128256) == 4
    assert chunks_on(device, 8192, 1024, 151936) == 1
    assert chunks_on(device, 16384, 1024, 32000) == 1
    assert chunks_on(device, 16384, 768, 50257) == 1


def test_a_real_vocabulary():
    model = Model(vocabulary=50257, width=4)

    def loss(m, x, y):
        return F.cross_entropy(m(x).view(-1, 50257), y.view(-1))

    step, optimizer = make_step(model, loss)
    given = {"models": {"m": model}, "optimizers": {"o": optimizer}, "kwargs": {}}
    graph = cleaned(capture(step, args=batch(), **given).step, Options())
    made = cut(graph, 50257 * 4 * 8)
    inputs = values(graph)
    for new, old in zip(run_step(made, inputs), run_step(graph, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-6)


def test_sizes_that_calls_decide_are_left_alone(tmp_path):
    model = Model(vocabulary=LARGE)
    step, optimizer = make_step(model, large_plain)
    compiled = treadle.compile(
        step,
        model=model,
        optimizer=optimizer,
        shapes=treadle.dynamic({"x": (None, "time"), "y": (None, "time")}, time=(2, 64)),
        options=options(tmp_path, chunk_logits=LARGE * 4 * 8),
    )
    x, y = batch((2, 16), LARGE)
    assert compiled(x, y).isfinite()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 60), st.integers(0, 2)
)
def test_boxes_hold_every_row_once(outer, middle, inner, most, start):
    grid = Grid(outer, middle, inner)
    boxes = boxes_of(grid, most)
    rows = RowRange(1, min(start, middle - 1), middle)
    each = (rows.stop - rows.start) * inner
    spans = [box.of(rows, grid) for box in boxes if box.inside(rows)[0] < box.inside(rows)[1]]
    assert [i for low, high in spans for i in range(low, high)] == list(range(outer * each))
    whole = RowRange(1, 0, middle)
    sizes = [high - low for low, high in (box.of(whole, grid) for box in boxes)]
    assert max(sizes) <= max(most, inner)
