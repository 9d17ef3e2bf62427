"""Masks that are proved to be a flag of the kernel, and those that stay, each with its reason."""

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import treadle
from testing import check_numbers, check_pass, trace
from treadle.algebra.extents import Size
from treadle.compat.fake import FakeTensorMode
from treadle.compiler.cleaning import clean, cleaned, cleaning_of
from treadle.graph.core.node_info import with_info
from treadle.graph.core.operators import arguments
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.lower.elements import Elements
from treadle.options import Options
from treadle.passes.attention.mask_patterns import Blocks, Documents, Pairs, Prefix, Window, mask_of
from treadle.passes.attention.proved_masks import ProveAttentionMasks, reports
from treadle.passes.cleanup.dce import RemoveDeadCode
from written_out import mask_words

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from architectures import tokens

aten = torch.ops.aten
PROVE = ProveAttentionMasks(Elements)
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
GPU = {EFFICIENT: EFFICIENT_BACKWARD, CUDNN: CUDNN_BACKWARD}
MIN = torch.finfo(torch.float32).min


def positions(rows, columns):
    return torch.arange(rows)[:, None], torch.arange(columns)[None]


def additive(allowed, never=-torch.inf, dtype=torch.float32):
    zero, never = (torch.full((), each, dtype=dtype) for each in (0.0, never))
    return torch.where(allowed, zero, never)


def operands(rows=5, columns=None, heads=2, head=8, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    columns = rows if columns is None else columns
    shapes = [(batch, heads, each, head) for each in (rows, columns, columns)]
    return tuple(torch.randn(*shape, dtype=dtype) for shape in shapes)


def attention(mask, *, causal=False):
    """A program that attends with the mask that ``mask(rows, columns)`` makes."""

    def program(q, k, v):
        bias = mask(q.shape[2], k.shape[2])
        return CPU(q, k, v, 0.0, causal, attn_mask=bias[None, None])[0]

    return program


def call_in(step, target=CPU):
    return next(iter(step.graph.find_nodes(op="call_function", target=target)))


@pytest.mark.parametrize("rows", [5, 130])
def test_causal_becomes_the_flag(rows):
    def program(q, k, v):
        i, j = positions(rows, rows)
        bias = additive(j <= i)
        y, logs = CPU(q, k, v, attn_mask=bias)
        return (y, *CPU_BACKWARD(y, q, k, v, y, logs, 0.0, False, attn_mask=bias))

    step = trace(program, *operands(rows))
    assert PROVE.run(step) == 2
    RemoveDeadCode().run(step)
    forward, backward = call_in(step), call_in(step, CPU_BACKWARD)
    for call in (forward, backward):
        given = arguments(call)
        assert given["attn_mask"] is None
        assert given["is_causal"] is True
    calls = [node.target for node in step.graph.nodes if node.op == "call_function"]
    assert {CPU, CPU_BACKWARD} < set(calls)
    assert aten.where.self not in calls
    assert aten.arange.default not in calls
    check_numbers(step, program, operands(rows))
    assert PROVE.run(step) == 0
    assert mask_words(step, forward, PROVE) == f"stays; {forward} has no mask"


def test_a_mask_of_all_true_goes():
    check_pass(
        PROVE,
        lambda q: CPU(q, q, q, attn_mask=torch.zeros(1, 1, 5, 5)),
        operands()[:1],
        after="""
            q: f32[2, 2, 5, 8]
            zeros: f32[1, 1, 5, 5] = zeros([1, 1, 5, 5], device=cpu, pin_memory=False)
            _scaled_dot_product_flash_attention_for_cpu: (f32[2, 2, 5, 8], f32[2, 2, 5]) = _scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=None)
            getitem: f32[2, 2, 5, 8] = _scaled_dot_product_flash_attention_for_cpu[0]
            getitem.1: f32[2, 2, 5] = _scaled_dot_product_flash_attention_for_cpu[1]
            return [getitem, getitem.1]
        """,  # noqa: E501
    )


FLAGS = {
    "less or equal": lambda i, j: additive(j <= i),
    "greater or equal": lambda i, j: additive(i >= j),
    "not greater": lambda i, j: additive(~(j > i)),
    "offsets": lambda i, j: additive((j + 3) - 3 <= i),
    "tril": lambda i, j: additive(torch.ones(len(i), j.shape[1], dtype=torch.bool).tril()),
    "tril of floats": lambda i, j: additive(torch.ones(len(i), j.shape[1]).tril() != 0),
    "triu of -inf": lambda i, j: torch.full((len(i), j.shape[1]), -torch.inf).triu(1),
    "least number": lambda i, j: additive(j <= i, MIN),
    "one minus": lambda i, j: (1.0 - (j <= i).float()) * MIN,
    "filled": lambda i, j: torch.zeros(len(i), j.shape[1]).masked_fill(j > i, -torch.inf),
    "padded": lambda i, j: torch.nn.functional.pad(additive(j <= i), (0, 3))[:, : j.shape[1]],
    "window as wide": lambda i, j: additive((j <= i) & (j > i - 5)),
    "and true": lambda i, j: additive((j <= i) & (i >= 0)),
    "or never": lambda i, j: additive((j <= i) | (j > 99)),
    "one document": lambda i, j: additive((j <= i) & (i * 0 == j * 0)),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_spellings_of_causal(name, rows):
    program = attention(lambda n, m: FLAGS[name](*positions(n, m)))
    inputs = operands(rows)
    step = trace(program, *inputs)
    assert mask_words(step, call_in(step), PROVE).partition(";")[0] in ("causal", "all true")
    run_passes(step, [PROVE, RemoveDeadCode()])
    given = arguments(call_in(step))
    assert given["attn_mask"] is None
    assert given["is_causal"] is (rows > 1)
    check_numbers(step, program, inputs)


ALL_TRUE = {
    "zeros": lambda i, j: torch.zeros(len(i), j.shape[1]),
    "no negative": lambda i, j: additive(i >= 0),
    "either": lambda i, j: additive((i <= j) | (j <= i)),
    "far": lambda i, j: additive((j < 99) & (i - j < 50)),
    "less or not": lambda i, j: additive((i + j < 4) | ~(j < 4 - i)),
}


@pytest.mark.parametrize("name", ALL_TRUE)
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (1, 4), (6, 2)])
def test_spellings_of_all_true(name, sizes):
    program = attention(lambda n, m: ALL_TRUE[name](*positions(n, m)))
    inputs = operands(*sizes)
    step = trace(program, *inputs)
    run_passes(step, [PROVE, RemoveDeadCode()])
    given = arguments(call_in(step))
    assert given["attn_mask"] is None
    assert given["is_causal"] is False
    check_numbers(step, program, inputs)


STAYS = {
    "sliding window": (lambda i, j: additive((j <= i) & (j > i - 3)), "sliding window of 3"),
    "both sides": (lambda i, j: additive((i - j).abs() <= 2), "window of 2 behind and 2 ahead"),
    "future": (lambda i, j: additive(j <= i + 1), "causal, 1 ahead"),
    "strict, and so the first row is empty": (lambda i, j: additive(j < i), "causal, -1 ahead"),
    "anticausal": (lambda i, j: additive(j >= i), "up to 0 behind"),
    "prefix": (lambda i, j: additive((j <= i) | (j < 2)), "causal, with a prefix of 2"),
    "blocks": (lambda i, j: additive((j <= i) & (i // 2 == j // 2)), "causal, in blocks of 2"),
    "nothing": (lambda i, j: additive(j < 0), "lets no pair through"),
    "checkered": (lambda i, j: additive((i + j) % 2 == 0), "none of the patterns"),
    "distances": (lambda i, j: (j - i).float(), "adds"),
    "half": (lambda i, j: additive(j <= i, -0.5), "adds -0.5 to scores"),
    "large": (lambda i, j: additive(j <= i, -1e9), "adds -1000000000.0 to scores"),
    "not a number": (lambda i, j: additive(j <= i, torch.nan), "adds nan to scores"),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    mask, reason = STAYS[name]
    step = trace(attention(lambda n, m: mask(*positions(n, m))), *operands())
    assert reason in mask_words(step, call_in(step), PROVE)
    assert PROVE.run(step) == 0
    (report,) = reports(step, PROVE)
    assert report.becomes == "stays"
    assert report.reason


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3)])
def test_another_number_of_keys(sizes):
    """The kernels of PyTorch's do not agree on what causal means there."""
    step = trace(
        attention(lambda n, m: FLAGS["less or equal"](*positions(n, m))), *operands(*sizes)
    )
    assert "of another number of keys" in mask_words(step, call_in(step), PROVE)
    assert PROVE.run(step) == 0


def test_aligned_at_the_last_key():
    step = trace(
        attention(lambda n, m: additive(positions(n, m)[1] <= positions(n, m)[0] + (m - n))),
        *operands(3, 5),
    )
    assert "causal, 2 ahead" in mask_words(step, call_in(step), PROVE)
    assert PROVE.run(step) == 0


def test_numbers_that_the_graph_holds():
    """A literal of the step that became a tensor while it was traced."""

    def program(q, k, v):
        zero = torch.tensor(0.0)
        i, j = positions(5, 5)
        return CPU(q, k, v, attn_mask=torch.where(j <= i, zero, MIN)[None, None])[0]

    step = trace(program, *operands())
    assert step.graph.find_nodes(op="get_attr")
    assert PROVE.run(step) == 1
    assert arguments(call_in(step))["is_causal"] is True


def test_half_precision_has_no_number_out_of_reach():
    def program(q):
        bias = additive(positions(5, 5)[1] <= positions(5, 5)[0], -65504.0, torch.float16)
        return CPU(q, q, q, attn_mask=bias)[0]

    step = trace(program, operands(dtype=torch.float16)[0])
    assert "adds -65504.0" in mask_words(step, call_in(step), PROVE)


def test_an_input_is_no_formula():
    def program(q, bias):
        return CPU(q, q, q, attn_mask=bias)[0]

    step = trace(program, operands()[0], torch.zeros(5, 5))
    assert "an input" in mask_words(step, call_in(step), PROVE)
    assert PROVE.run(step) == 0


def batch_mask(allowed):
    def program(q, given):
        i, j = (each[None, None] for each in positions(5, 5))
        return CPU(q, q, q, attn_mask=additive(allowed(i, j, given)))[0]

    return program


BATCH = {
    "padding": (lambda i, j, x: (j <= i) & (x[:, None, None] != 0), "causal & given[b, j]"),
    "documents": (
        lambda i, j, x: (j <= i) & (x[:, None, :, None] == x[:, None, None]),
        "causal, per document by given",
    ),
    "all documents": (
        lambda i, j, x: x[:, None, :, None] == x[:, None, None],
        "all true, per document by given",
    ),
    "queries": (lambda i, j, x: (j <= i) & (x[:, None, :, None] > 0), "causal & given[b, i]"),
    "either": (lambda i, j, x: (j <= i) | (x[:, None, None] > 0), "all true & given[b, j]"),
}


@pytest.mark.parametrize("name", BATCH)
def test_what_the_batch_decides_stays(name):
    allowed, pattern = BATCH[name]
    step = trace(batch_mask(allowed), operands()[0], torch.ones(2, 5, dtype=torch.int64))
    (report,) = reports(step, PROVE)
    assert report.mask == pattern
    assert "no kernel to call takes that" in report.reason
    assert PROVE.run(step) == 0


def test_what_the_batch_has_no_say_in_goes():
    step = trace(
        batch_mask(lambda i, j, x: (j <= i) | ((x[:, None, None] > 0) & (j < 0))),
        operands()[0],
        torch.ones(2, 5, dtype=torch.int64),
    )
    assert mask_words(step, call_in(step), PROVE) == "causal; is_causal"
    step = trace(
        batch_mask(lambda i, j, x: (x[:, None, None] > 0) | (x[:, None, None] <= 0)),
        operands()[0],
        torch.ones(2, 5, dtype=torch.int64),
    )
    assert mask_words(step, call_in(step), PROVE) == "all true; no mask"


# What is said of a mask is true of every pair.


@st.composite
def allowed(draw, depth=3):
    """A condition on ``i`` and ``j`` as a program."""
    kind = draw(st.integers(0, 6)) if depth else draw(st.integers(0, 2))
    number = draw(st.integers(-6, 6))
    if kind == 0:
        return lambda i, j: j <= i + number
    if kind == 1:
        return lambda i, j: j < number
    if kind == 2:
        size = abs(number) + 1
        return lambda i, j: i // size == j // size
    one = draw(allowed(depth - 1))
    if kind == 3:
        return lambda i, j: ~one(i, j)
    two = draw(allowed(depth - 1))
    if kind == 4:
        return lambda i, j: one(i, j) | two(i, j)
    return lambda i, j: one(i, j) & two(i, j)


def pattern_at(pattern, i, j):
    match pattern:
        case Window(behind, ahead):
            low = behind is None or i - j <= behind
            return low and (ahead is None or j - i <= ahead)
        case Prefix(length):
            return j <= i or j < length
        case Blocks(size, within):
            return i // size == j // size and pattern_at(within, i, j)


@given(allowed(), st.sampled_from([(4, 4), (6, 6), (3, 6), (6, 3), (1, 5), (5, 1)]))
@settings(max_examples=150, deadline=None)
def test_every_pattern_is_true_of_every_pair(condition, sizes):
    program = attention(lambda n, m: additive(condition(*positions(n, m)).expand(n, m)))
    inputs = operands(*sizes, heads=1, head=2, batch=1)
    step = trace(program, *inputs)
    given = arguments(call_in(step))
    expected = condition(*positions(*sizes)).expand(*sizes)
    try:
        pattern = mask_of(
            given["attn_mask"], Pairs.of(given["query"], given["key"]), Elements()
        ).pattern
    except treadle.TreadleError:
        pattern = None
    else:
        for row, column in itertools.product(*map(range, sizes)):
            assert pattern_at(pattern, row, column) == expected[row, column]
    PROVE.run(step)
    call, causal = call_in(step), torch.ones(sizes, dtype=torch.bool).tril()
    if isinstance(pattern, Blocks):
        check_numbers(step, program, inputs, exact=False)
    elif arguments(call)["attn_mask"] is None:
        assert torch.equal(expected, causal if arguments(call)["is_causal"] else causal | ~causal)
    elif sizes[0] == sizes[1]:  # nothing that can be a flag is missed among such small formulas
        assert not torch.equal(expected, causal)
        assert not expected.all()


def test_words_of_patterns():
    assert str(Documents("ids", Window(None, 0))) == "causal, per document by ids"
    assert str(Window(3, None)) == "up to 3 behind"


# Sizes that the call decides.


class Attends(nn.Module):
    """Attention under the mask that ``mask(rows)`` makes."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (each.unflatten(2, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]))


def of_any_size(mask):
    """The call of attention in a step that serves 2 to 40 rows, compared with eager at some."""
    torch.manual_seed(0)
    model = Attends(mask)
    twin = copy.deepcopy(model)

    def training(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    (function, optimizer), (eager, _) = training(model), training(twin)
    shapes = treadle.dynamic({"x": (None, "time", None)}, time=(2, 40))
    step = treadle.compile(function, model=model, optimizer=optimizer, shapes=shapes)
    for rows in (7, 2, 11, 40, 23):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-4, atol=1e-5)
    cleaned = clean(step.compiled.captured.step)
    return cleaned, call_in(cleaned)


def test_proofs_for_sizes_that_the_call_decides():
    step, call = of_any_size(lambda n: positions(n, n)[1] <= positions(n, n)[0])
    given = arguments(call)
    assert isinstance(Pairs.of(given["query"], given["key"]).query.extent, Size)
    assert mask_words(step, call, PROVE) == "causal; is_causal"


def test_a_window_as_wide_as_the_size():
    step, call = of_any_size(
        lambda n: (positions(n, n)[1] <= positions(n, n)[0]) & (positions(n, n)[1] + n > 0)
    )
    assert mask_words(step, call, PROVE) == "causal; is_causal"


def test_a_window_that_is_wide_enough_for_some_sizes_alone():
    step, call = of_any_size(
        lambda n: (
            (positions(n, n)[1] <= positions(n, n)[0])
            & (positions(n, n)[1] > positions(n, n)[0] - 9)
        )
    )
    assert "sliding window of 9" in mask_words(step, call, PROVE)


# Models.


def llama(**config):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False, **config,
        )
    )  # fmt: skip


def gpt2(**config):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **config,
        )
    )  # fmt: skip


def training(model, optimizer):
    def step(**batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        gradients = [each.grad.clone() for each in model.parameters()]
        optimizer.zero_grad()
        return loss.detach(), gradients

    return step


@pytest.mark.parametrize("make", [llama, gpt2])
def test_models_train_as_in_eager(make):
    torch.manual_seed(0)
    model = make().train()
    twin = copy.deepcopy(model)
    one, two = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    step, eager = (
        treadle.compile(training(model, one), model=model, optimizer=one),
        training(twin, two),
    )
    for _ in range(2):
        batch = tokens()
        torch.testing.assert_close(step(**batch), eager(**batch), rtol=1e-5, atol=1e-6)
    captured = step.compiled.captured.step
    assert {each.becomes for each in reports(clean(captured), PROVE)} == {"is_causal"}
    after_cleaning = cleaned(captured, Options())
    assert {each.reason.partition(" ")[2] for each in reports(after_cleaning, PROVE)} == {
        "has no mask"
    }
    assert not any(node.target is aten.where.self for node in after_cleaning.graph.nodes)
    assert PROVE.run(after_cleaning) == 0


# GPUs, on fake tensors.


STRIDES = {
    "tokens": lambda n, heads, head: ((n * heads * head, head, heads * head, 1), 0),
    "heads": lambda n, heads, head: ((n * heads * head, n * head, head, 1), 0),
    "one of three": lambda n, heads, head: ((3 * n * heads * head, head, 3 * heads * head, 1), 64),
    "columns": lambda n, heads, head: ((n * heads * head, n * head, 1, n), 0),
    "odd start": lambda n, heads, head: ((n * heads * head, head, heads * head, 1), 3),
    "odd rows": lambda n, heads, head: ((n * heads * head + n, head, heads * head + 1, 1), 0),
}


def gpu_step(
    mask=lambda i, j: j <= i,
    *,
    rows=32,
    heads=4,
    head=64,
    dtype=torch.bfloat16,
    dropout=0.0,
    wants=(True, True, True, False),
    layout="tokens",
    reads_logs=False,
    columns=None,
    kernel=EFFICIENT,
    never=None,
):
    """Attention and its gradients as kernels on a GPU there is not, with a mask as PyTorch hands
    it to the kernel: -inf where it is false, -65504 to cuDNN's."""
    if never is None:
        never = -65504.0 if kernel is CUDNN else -torch.inf
    columns = rows if columns is None else columns

    def operand(n):
        strides, offset = STRIDES[layout](n, heads, head)
        whole = torch.empty(9 * n * heads * head, device="cuda", dtype=dtype)
        return aten.as_strided.default(whole, (2, heads, n, head), strides, offset)

    def program(q, k, v, g):
        i = aten.unsqueeze.default(torch.arange(rows, device="cuda"), 1)
        j = aten.unsqueeze.default(torch.arange(columns, device="cuda"), 0)
        zero, hidden = (
            aten.scalar_tensor.default(n, dtype=dtype, device="cuda") for n in (0.0, never)
        )
        bias = aten.where.self(mask(i, j), zero, hidden)
        bias = aten.expand.default(bias, [2, heads, rows, columns])
        if kernel is CUDNN:
            y, logs, cq, ck, mq, mk, seed, offset, _ = CUDNN(
                q, k, v, bias, True, dropout, False, scale=0.125
            )
            gradients = CUDNN_BACKWARD(
                g, q, k, v, y, logs, seed, offset, bias, cq, ck, mq, mk, dropout, False, scale=0.125
            )
        else:
            y, logs, seed, offset = EFFICIENT(q, k, v, bias, True, dropout, False, scale=0.125)
            gradients = EFFICIENT_BACKWARD(
                g, q, k, v, bias, y, logs, seed, offset, dropout, list(wants), False, scale=0.125
            )
        found = [aten.clone.default(y), *[each for each in gradients if each is not None]]
        return (*found, logs) if reads_logs else tuple(found)

    mode = FakeTensorMode()
    with mode:
        inputs = [operand(rows), operand(columns), operand(columns), operand(rows)]
        graph = make_fx(program)(*inputs).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    for node in [each for each in graph.nodes if each.op == "call_function"]:
        with_info(node, phase="forward")
        if not node.users:
            graph.erase_node(node)  # the gradient of the mask, which is none
    (output,) = graph.find_nodes(op="output")
    signature = Signature(
        tuple(Input(Role.BATCH, name) for name in names),
        tuple(Output(f"out{i}") for i in range(len(output.args[0]))),
    )
    return StepGraph(graph, signature)


def layouts(step):
    values = [node.meta["val"] for node in step.returned]
    return [(each.shape, each.stride(), each.dtype, each.device) for each in values]


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("kernel", GPU)
def test_gpu_calls_get_the_flag(layout, kernel):
    step = gpu_step(layout=layout, kernel=kernel)
    before = layouts(step)
    assert {each.becomes for each in reports(step, PROVE)} == {"is_causal"}
    run_passes(step, [PROVE, RemoveDeadCode()])
    for target in (kernel, GPU[kernel]):
        given = arguments(call_in(step, target))
        assert given["attn_bias"] is None
        assert given["is_causal"] is True
    assert aten.where.self not in {node.target for node in step.graph.nodes}
    assert layouts(step) == before
    assert PROVE.run(step) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("never", [-torch.inf, -65504.0])
@pytest.mark.parametrize("kernel", GPU)
def test_what_counts_as_never(kernel, never, dtype):
    step = gpu_step(kernel=kernel, never=never, dtype=dtype)
    hides = never == -torch.inf or kernel is CUDNN
    assert {each.becomes for each in reports(step, PROVE)} == {"is_causal" if hides else "stays"}
    near = gpu_step(kernel=kernel, never=-65000.0, dtype=dtype)
    assert PROVE.run(near) == 0


@pytest.mark.parametrize("kernel", GPU)
def test_all_true_masks_of_gpus_go(kernel):
    step = gpu_step(lambda i, j: (j < 99) & (i < 99), columns=48, kernel=kernel)
    run_passes(step, [PROVE, RemoveDeadCode()])
    for target in (kernel, GPU[kernel]):
        given = arguments(call_in(step, target))
        assert (given["attn_bias"], given["is_causal"]) == (None, False)


@pytest.mark.parametrize("kernel", GPU)
def test_eager_rounding_keeps_the_kernel_of_gpus(kernel):
    step = gpu_step(kernel=kernel)
    each = ProveAttentionMasks(Elements, eager=True)
    assert "rounds elsewhere" in mask_words(step, call_in(step, kernel), each)
    assert each.run(step) == 0
    cpu = trace(attention(lambda n, m: FLAGS["tril"](*positions(n, m))), *operands())
    assert each.run(cpu) == 1


@pytest.mark.parametrize("kernel", GPU)
def test_dropout_keeps_the_mask(kernel):
    step = gpu_step(kernel=kernel, dropout=0.1)
    for target in (kernel, GPU[kernel]):
        assert "has dropout" in mask_words(step, call_in(step, target), PROVE)
    assert PROVE.run(step) == 0


def test_a_gradient_of_the_mask_keeps_it():
    step = gpu_step(wants=(True, True, True, True))
    for target in (EFFICIENT, EFFICIENT_BACKWARD):
        assert "gives a gradient of" in mask_words(step, call_in(step, target), PROVE)
    assert PROVE.run(step) == 0


def test_other_keys_on_gpus():
    step = gpu_step(columns=48)
    assert "of another number of keys" in mask_words(step, call_in(step, EFFICIENT), PROVE)
    assert PROVE.run(step) == 0


def test_rounding_reaches_the_pass():
    assert ProveAttentionMasks(Elements, eager=True) in cleaning_of(Options(numerics="eager"))
    assert PROVE in cleaning_of(Options())


def test_what_is_no_call_of_attention():
    step = trace(lambda x: x.exp(), torch.ones(3))
    assert reports(step, PROVE) == ()


def test_long_chains_of_conditions_end():
    def mask(n, m):
        i, j = positions(n, m)
        allowed = j <= i
        for k in range(70):
            other = i // 2 + k < j
            allowed = [allowed & ~other, allowed | other, allowed ^ other][k % 3]
        return additive(allowed)

    step = trace(attention(mask), *operands())
    assert PROVE.run(step) == 0
    (report,) = reports(step, PROVE)
    assert report.reason
