"""What library calls hold beside their results, where a formula says it: beside a measurement."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.graph.custom_ops.ctc import ctc_loss, ctc_loss_backward
from treadle.graph.custom_ops.while_loops import while_loop, while_loop_backward
from treadle.graph.text.parsing import parse
from treadle.lower.workspace import workspace_of
from treadle.runtime.meter import measure_each
from treadle.targets.cpu import CPU
from treadle.targets.cuda import CUDA

HOST = torch.device("cpu")
aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("times", "batch", "classes", "longest"), [
    (50, 4, 20, 12), (23, 1, 5, 1), (97, 8, 30, 40),
])  # fmt: skip
def test_the_tables_of_the_ctc_loss(times, batch, classes, longest, joined, dtype):
    lengths = torch.randint(1, longest + 1, (batch,))
    lengths[0] = longest
    shape = (int(lengths.sum()),) if joined else (batch, longest)
    targets = torch.randint(1, classes, shape)
    log_probs = torch.randn(times, batch, classes, dtype=dtype).log_softmax(-1)
    given = log_probs, targets, torch.full((batch,), times), lengths, 0, False
    losses = torch.ones(batch, dtype=dtype)
    runs = [lambda: ctc_loss(*given), lambda: ctc_loss_backward(losses, *given)]
    with torch.no_grad():
        forward, backward = measure_each(runs, HOST)
    found = forward - losses.nbytes, backward - log_probs.nbytes  # results are no workspace
    promised = (
        workspace_of(ctc_loss, given, CPU),
        workspace_of(ctc_loss_backward, (losses, *given), CPU),
    )
    if joined:
        assert all(
            each <= bound <= batch * each for each, bound in zip(found, promised, strict=True)
        )
    else:
        assert found == promised


def test_sizes_that_vary_count_at_their_largest_and_ask_nothing():
    """One compile serves every length: the bound is a plain number, no question depends on it."""
    model = nn.Linear(6, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, targets, lengths):
        times = torch.full((4,), 12)
        loss = F.ctc_loss(model(x).log_softmax(-1), targets, times, lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    shapes = treadle.dynamic({"x": ("time",)}, time=(12, 40))
    compiled = treadle.compile(step, model=model, optimizer=optimizer, shapes=shapes)
    for time in (20, 12, 40, 31):
        x = torch.randn(time, 4, 6)
        targets, lengths = torch.randint(1, 9, (4, 5)), torch.tensor([3, 5, 2, 4])
        assert compiled(x, targets, lengths).isfinite()
    assert compiled.recompiles == ["compiled for time in 12..40"]


def test_a_loop_holds_what_one_round_does(tmp_path):
    """Forward exactly, however many rounds; backward besides what each round began with."""
    model = nn.Linear(64, 64)

    def step(x, rounds):
        body = lambda i, h: (i + 1, model(h).tanh() * h.exp())  # noqa: E731
        start = torch.zeros((), dtype=torch.int64), x
        return torch.while_loop(lambda i, h: i < rounds, body, start)[1].sum()

    def train(x, rounds):
        loss = step(x, rounds)
        loss.backward()
        return loss.detach()

    options = treadle.Options(cache_dir=tmp_path)
    compiled = treadle.compile(train, model=model, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        compiled(torch.randn(16, 64), torch.tensor(3))
    texts = parse(compiled.graph("captured"))
    (node,) = texts.graph.find_nodes(op="call_function", target=while_loop)
    _, _, flags, *functions = node.args
    x, weights = torch.randn(16, 64) * 0.1, [each.detach() for each in model.parameters()]
    for rounds in (2, 5):
        carried = [torch.zeros((), dtype=torch.int64), x]
        others = [torch.tensor(rounds), *weights]
        given = carried, others, flags, *functions
        backward = [torch.ones_like(x)], *given
        runs = [lambda g=given: while_loop(*g), lambda g=backward: while_loop_backward(*g)]
        with torch.no_grad():
            for run in runs:
                run()  # reads the texts
            found, found_backward = measure_each(runs, HOST)
        begun = sum(each.nbytes for each in carried)
        results = sum(each.nbytes for each in (x, *weights))
        assert found - begun <= workspace_of(while_loop, given, CPU) <= found
        bound = workspace_of(while_loop_backward, backward, CPU) + rounds * begun
        assert bound // 2 <= found_backward - results <= bound


def test_the_flash_kernel_rounds_up_and_spreads_shared_heads():
    query, shared = torch.empty(2, 6, 130, 40), torch.empty(2, 3, 130, 40)
    sums = 4 * 2 * 6 * 256 * (64 + 1)
    each = aten._scaled_dot_product_flash_attention_backward.default
    assert workspace_of(each, (query, query, query), CUDA) == sums
    spread = 2 * query.dtype.itemsize * query.numel()
    assert workspace_of(each, (query, query, shared), CUDA) == sums + spread
    turned = [each.transpose(1, 2) for each in (query, query, shared)]
    windows = aten._flash_attention_backward.default
    assert workspace_of(windows, turned, CUDA) == sums + spread
