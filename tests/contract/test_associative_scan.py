"""``torch.associative_scan`` in whole steps: formulas of logarithmic depth, with gradients."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

import treadle
from treadle import Options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)


def in_a_row(combine, xs, dim, reverse=False, combine_mode="pointwise"):
    """What it means, slice by slice."""
    single = isinstance(xs, torch.Tensor)
    keys = None if single else list(xs)
    columns = [xs] if single else [xs[key] for key in keys]
    made = (lambda row: row[0]) if single else (lambda row: dict(zip(keys, row, strict=True)))
    taken = (lambda row: [row]) if single else (lambda row: [row[key] for key in keys])
    slices = list(zip(*(column.unbind(dim) for column in columns), strict=True))
    slices = slices[::-1] if reverse else slices
    carry, rows = made(slices[0]), [slices[0]]
    for row in slices[1:]:
        carry = combine(carry, made(row))
        rows.append(taken(carry))
    rows = rows[::-1] if reverse else rows
    return made([torch.stack(list(column), dim) for column in zip(*rows, strict=True)])


def sums(model, x, scan):
    return scan(torch.add, model.first(x), 0).square().mean()


def products_backwards(model, x, scan):
    return scan(lambda a, b: a * b, model.gate(x).sigmoid() + 0.5, 1, reverse=True).sum()


def recurrence(model, x, scan):
    """``h[t] = g[t] h[t - 1] + x[t]``, the scan of linear state-space models."""

    def combine(left, right):
        return {
            "g": left["g"] * right["g"],
            "h": right["g"] * left["h"] + right["h"],
        }

    xs = {"g": model.gate(x).sigmoid(), "h": model.first(x)}
    return scan(combine, xs, -2)["h"].square().mean()


def matrices(model, x, scan):
    """A function of whole slices: ``vmap`` takes the dim of the scan off."""
    angles = model.first(x)
    turned = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    turned = turned.unflatten(-1, (2, 2))
    return (scan(lambda a, b: b @ a, turned, 0, combine_mode="generic") * 0.7).sum()


def largest(model, x, scan):
    return scan(torch.maximum, model.first(x), 0, combine_mode="generic").sum()


LOSSES = [sums, products_backwards, recurrence, matrices, largest]


def pair(loss, tmp_path, **options):
    torch.manual_seed(0)
    mine = Net().double()
    twin = copy.deepcopy(mine)

    def step_of(model, scan):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x):
            value = loss(model, x, scan)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return train, optimizer

    (ours, optimizer), (theirs, _) = step_of(mine, associative_scan), step_of(twin, in_a_row)
    chosen = Options(cache_dir=tmp_path, strict=True, **options)
    return (
        treadle.compile(ours, model=mine, optimizer=optimizer, options=chosen),
        theirs,
        mine,
        twin,
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 32, 33])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda each: each.__name__)
def test_values_and_gradients_are_those_slice_by_slice(loss, rows, tmp_path):
    step, theirs, mine, twin = pair(loss, tmp_path)
    for _ in range(2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(step(x), theirs(x), rtol=1e-10, atol=1e-12)
        for ours, other in zip(mine.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-12)


def test_operations_grow_with_the_logarithm(tmp_path):
    counts = []
    for rows in (64, 1024):
        step, *_ = pair(recurrence, tmp_path)
        compiled = step.prepare(torch.randn(rows, 4, dtype=torch.float64))
        counts.append(len(compiled.step.graph.nodes))
    assert counts[1] < 2 * counts[0]


def test_lengths_that_change(tmp_path):
    step, theirs, *_ = pair(sums, tmp_path)
    for rows in (3, 8, 5, 8, 3):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(step(x), theirs(x), rtol=1e-10, atol=1e-12)


REFUSED = {
    "not tensors": lambda x: associative_scan(torch.add, [x, 3], 0),
    "no dim 2": lambda x: associative_scan(torch.add, x, 2),
    "not tensors of one length": lambda x: associative_scan(
        lambda a, b: (a[0] + b[0], a[1] + b[1]), (x, x[1:]), 0
    ),
    "combine_mode is 'tree'": lambda x: associative_scan(torch.add, x, 0, combine_mode="tree"),
    "does not return the containers": lambda x: associative_scan(lambda a, b: (a, b), x, 0),
    "returns torch.int64": lambda x: associative_scan(lambda a, b: (a + b).long(), x, 0),
    "has a side effect": lambda x: associative_scan(lambda a, b: a + torch.rand_like(b), x, 0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_have_words(reason, tmp_path):
    model = Net()
    step = treadle.compile(
        lambda x: REFUSED[reason](model.first(x)).sum(),
        model=model,
        options=Options(cache_dir=tmp_path),
    )
    with pytest.raises(treadle.CaptureError, match=reason) as found:
        step(torch.randn(4, 4))
    assert found.value.code == "TR-151"
    assert __file__ in found.value.where
