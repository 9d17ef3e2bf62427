"""On a real GPU: the variants of a step share their memory. Eight shapes in any order, each of them
recorded and replayed; what is allocated stays within what the step promises."""

import copy
import gc
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.compat.switches import clear_workspaces

ROWS = (3, 16, 33, 64, 100, 256, 500, 1024)
WIDTH = 64


class Deep(nn.Module):
    """Many small kernels: it is bound by launching."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(12))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def compiled(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    each = treadle.Options(dynamic=False)  # what one compile makes of them: ``test_dynamic``
    return step, treadle.compile(step, model=model, optimizer=optimizer, options=each, **options)


def batch(rows):
    return torch.randn(rows, WIDTH, device="cuda")


def recorded(step):
    return [each for each in step.summary().variants if each.is_recorded]


def order(seed, rounds):
    """Every shape in every round, in any order."""
    mixed = random.Random(seed)
    return [rows for _ in range(rounds) for rows in mixed.sample(ROWS, len(ROWS))]


@pytest.mark.parametrize("seed", range(3))
def test_eight_shapes_in_any_order_stay_within_the_promise(seed):
    torch.manual_seed(seed)
    model = Deep().cuda()
    _, step = compiled(model)
    eager, _ = compiled(copy.deepcopy(model))
    for rows in order(seed, rounds=9):
        x = batch(rows)
        torch.testing.assert_close(step(x), eager(x), rtol=5e-3, atol=1e-3)
    assert len(recorded(step)) == len(ROWS), step.explain()
    clear_workspaces()  # the eager twin's
    before = torch.cuda.memory_allocated()  # of the twin, and all that stays between calls
    torch.cuda.reset_peak_memory_stats()
    for rows in order(seed + 100, rounds=3):
        step(batch(rows))
    torch.cuda.synchronize()
    gc.collect()
    peak = torch.cuda.max_memory_allocated()
    assert torch.cuda.memory_allocated() <= before, "nothing comes to what is held"
    summary = step.summary()
    others = sum(p.untyped_storage().nbytes() for p in _eager_tensors(eager))
    assert peak - others <= 1.01 * summary.peak_of_any_call_bytes
    assert len({each.executable.frame.memory._block.data_ptr() for each in _variants(step)}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_shapes_that_come_while_others_are_recorded(seed):
    """The arena grows, and recordings hold addresses in the one that was."""
    torch.manual_seed(seed)
    model = Deep().cuda()
    _, step = compiled(model)
    eager, _ = compiled(copy.deepcopy(model))
    for known in range(1, len(ROWS) + 1):
        mixed = random.Random(seed)
        for _ in range(5):
            for rows in mixed.sample(ROWS[:known], known):
                x = batch(rows)
                torch.testing.assert_close(step(x), eager(x), rtol=5e-3, atol=1e-3)
    assert len(recorded(step)) == len(ROWS), step.explain()


def test_first_calls_hold_no_gradients_of_the_call_before():
    """Each shape's first call keeps what it overwrites, and gradients that the step clears, where
    a failure finds them: not on the device. Memory of a smaller arena goes back to it."""
    torch.manual_seed(0)
    compiled(Deep().cuda())[1](batch(3))  # the first compile on a machine measures the GPU's rates
    clear_workspaces()
    gc.collect()
    already = torch.cuda.memory_allocated()  # such as cuDNN's state of dropout
    width = 2048  # tensors of 10 MiB and more: below, the allocator reserves 20 MiB for a few
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = treadle.Options(dynamic=False)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    gc.collect()
    torch.cuda.empty_cache()
    for rows in (64, 1024, 8192, 256):
        x = torch.randn(rows, width, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        step(x)
        promised = step.summary().peak_of_any_call_bytes
        assert torch.cuda.max_memory_allocated() - already <= 1.02 * promised, rows
        assert torch.cuda.memory_reserved() <= 1.3 * promised, rows


def workspace():
    """Bytes that cuBLAS takes once and for all, which no plan counts."""
    square = torch.ones(WIDTH, WIDTH, device="cuda")
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    product = square @ square
    return torch.cuda.memory_allocated() - before - product.untyped_storage().nbytes()


def test_a_budget_is_for_all_variants():
    torch.manual_seed(0)
    library = workspace()
    model = Deep().cuda()
    _, plain = compiled(copy.deepcopy(model))
    plain(batch(ROWS[-1]))
    budget = plain.summary().peak_predicted_bytes + (300 << 10)
    del plain
    gc.collect()
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    own = sum(p.untyped_storage().nbytes() for p in model.parameters())
    _, step = compiled(model, memory=budget)
    for rows in order(0, rounds=12):
        step(batch(rows))
    torch.cuda.reset_peak_memory_stats()
    for rows in order(1, rounds=12):
        step(batch(rows))
    torch.cuda.synchronize()
    assert step.summary().peak_of_any_call_bytes <= budget
    assert torch.cuda.max_memory_allocated() - before + own <= 1.01 * budget + library
    assert recorded(step), step.explain()


def _variants(step):
    return list(step._dispatcher.variants)


def _eager_tensors(step):
    """The parameters and the state of the eager twin."""
    cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    optimizer = cells["optimizer"].cell_contents
    yield from cells["model"].cell_contents.parameters()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
