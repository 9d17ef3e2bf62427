"""Steps that go on by a size which values decide: one variant for each path, with eager's numbers,
whatever asks: ``numel()``, ``len()``, ``shape[0]``, a mask, or a module of PyTorch's."""

import copy

import pytest
import torch
from torch import nn

import treadle


class Experts(nn.Module):
    """Each row goes to one of them."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(6, 2), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.seen = 0


def routes(model, x, rows_of):
    weight, which = model.gate(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for at, expert in enumerate(model.experts):
        rows = rows_of(which == at)
        if rows is not None:
            y[rows] = expert(x[rows]) * weight[rows, None]
    return model.out(y).square().mean()


def by_numel(mask):
    rows = mask.nonzero().squeeze(1)
    return None if rows.numel() == 0 else rows


def by_length(mask):
    rows = torch.where(mask)[0]
    return rows if len(rows) else None


def by_shape(mask):
    return mask if mask.nonzero().shape[0] > 0 else None


def experts(rows_of):
    return lambda model, x: routes(model, x, rows_of)


def picked(model, x):
    return model.out(x)[x[:, 0] > 0]


def averages(model, x):
    return picked(model, x).square().sum() / max(len(picked(model, x)), 1)


def counts(model, x):
    rows = picked(model, x)
    model.seen += len(rows)
    return rows.square().sum() / (float(rows.shape[0]) + 1) + torch.tensor(len(rows)) / 2


def fills(model, x):
    rows = x[x[:, 0] > 0]
    if rows.shape[0] < 3:
        rows = torch.cat([rows, torch.zeros(3 - rows.shape[0], 6)])
    return model.out(rows).square().mean()


def takes_the_larger(model, x):
    above, below = x[x[:, 0] > 0], x[x[:, 0] <= 0]
    return model.out(above if above.shape[0] > below.shape[0] else below).square().sum()


def sums_listed(model, x):
    rows = [x[x.argmax(1) % 2 == each] for each in range(2)]
    found = [model.out(each).square().mean() for each in rows if each.numel()]
    return sum(found) / len(found)


def drops_dims(model, x):
    rows = picked(model, x).squeeze()
    return rows.sum() * rows.ndim


def batches():
    for seed in range(9):
        torch.manual_seed(seed)
        x = torch.randn(8, 6)
        if seed % 3 == 1:
            x[:, 0] = -x[:, 0].abs()
        yield x if seed % 3 < 2 else x[:1].expand(8, 6) + (torch.arange(8) == 3)[:, None] * 2.0


def trained(model, loss_of, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not options:
        return step
    return treadle.compile(
        step, model=model, optimizer=optimizer, options=treadle.Options(**options)
    )


def assert_as_eager(model, loss_of, **options):
    twin = copy.deepcopy(model)
    compiled = trained(model, loss_of, **({"codegen": False} | options))
    step = trained(twin, loss_of)
    for x in batches():
        torch.testing.assert_close(compiled(x), step(x), equal_nan=True)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert (ours.grad is None) == (theirs.grad is None)
    assert vars(model).get("seen") == vars(twin).get("seen")
    assert not any("eagerly" in each for each in compiled.recompiles), compiled.recompiles
    return compiled


@pytest.mark.parametrize(
    "loss_of",
    [
        *map(experts, [by_numel, by_length, by_shape]),
        averages,
        counts,
        fills,
        takes_the_larger,
        sums_listed,
        drops_dims,
    ],
)
def test_each_call_takes_its_own_path(loss_of):
    torch.manual_seed(0)
    compiled = assert_as_eager(Experts(), loss_of)
    known = list(compiled.recompiles)
    for x in batches():
        compiled(x)
    assert compiled.recompiles == known


def test_beside_generated_kernels():
    torch.manual_seed(0)
    assert_as_eager(Experts(), experts(by_length), codegen=True)


def test_an_adaptive_softmax_trains():
    torch.manual_seed(0)
    model = nn.AdaptiveLogSoftmaxWithLoss(6, 12, cutoffs=[4])

    def loss_of(model, x):
        return model(x, (x[:, 1] * 50).long().abs() % 12).loss

    assert assert_as_eager(model, loss_of).recompiles


def test_an_operation_that_fails_for_a_size_of_another_path():
    model = nn.Linear(6, 2)

    def step(x):
        rows = x[x[:, 0] > 0]
        best = rows.max(0).values if len(rows) else x.sum(0)
        return model(best)

    compiled = treadle.compile(step, model=model)
    for x in batches():
        torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.recompiles) == 1
