"""Sizes that values decide, complex numbers, and custom operators in whole steps: as in eager."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle import Options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(3, 3, 5, dtype=torch.cfloat))

    def forward(self, x):
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x)[:, :, :5], self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1])


def check(tmp_path, make, loss_of, batches, optimizer=torch.optim.SGD, **options):
    """Losses, parameters and buffers after each batch, as eager has them."""
    torch.manual_seed(0)
    mine = make()
    twin = copy.deepcopy(mine)

    def step_of(model):
        chosen = optimizer(model.parameters(), lr=0.02)

        def step(*batch):
            loss = loss_of(model, *batch)
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            return loss.detach()

        return step, chosen

    (ours, chosen), (theirs, _) = step_of(mine), step_of(twin)
    options = Options(cache_dir=tmp_path, **({"codegen": False} | options))
    step = treadle.compile(ours, model=mine, optimizer=chosen, options=options)
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        got = step(*batch)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, theirs(*batch), rtol=1e-4, atol=1e-5, equal_nan=True)
    for (name, a), b in zip(mine.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
    assert not step.recompiles
    return step


def rows(picked):
    """A batch whose first column is positive in these rows alone."""
    x = torch.randn(5, 6)
    x[:, 0] = -x[:, 0].abs()
    x[picked, 0] *= -1
    return x


PICKED = [[0, 2], [], [1, 2, 3, 4], [0, 1, 2, 3, 4]]


def picks_rows(model, x):
    return model(x)[x[:, 0] > 0].square().sum()


def averages_rows(model, x):
    keep = x[:, 0] > 0
    return F.cross_entropy(model(x)[keep], x.abs().long().sum(1)[keep] % 4)


def runs_rows_through_the_model(model, x):
    at = torch.nonzero(x[:, 0] > 0).squeeze(1)
    return torch.zeros(5, 4).index_add(0, at, model(x[at])).square().mean()


def counts_values(model, x):
    values, where = torch.unique(x.abs().long(), return_inverse=True)
    counted = torch.bincount(where.flatten(), minlength=3)
    return model(x).sum() * counted.shape[0] + values.sum()


def repeats_rows(model, x):
    return model(x.repeat_interleave((x[:, 0] > 0).long(), 0)).square().sum()


@pytest.mark.parametrize(
    "loss",
    [picks_rows, averages_rows, runs_rows_through_the_model, counts_values, repeats_rows],
)
def test_sizes_that_values_decide(loss, tmp_path):
    step = check(tmp_path, Net, loss, [(rows(picked),) for picked in PICKED])
    assert "TR-150" in step.explain()
    assert "known only at run time; each counts with its upper bound" in step.explain()


def test_sizes_that_values_decide_beside_generated_kernels(tmp_path):
    check(tmp_path, Net, averages_rows, [(rows(picked),) for picked in PICKED], codegen=True)


def test_picked_rows_are_results(tmp_path):
    model = Net()
    step = treadle.compile(
        lambda x: model(x)[x[:, 0] > 0].detach(), model=model, options=Options(cache_dir=tmp_path)
    )
    for picked in PICKED:
        x = rows(picked)
        torch.testing.assert_close(step(x), model(x)[x[:, 0] > 0])


def test_sizes_that_values_decide_beside_declared_ones_are_refused(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = picks_rows(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = treadle.compile(
        train,
        model=model,
        optimizer=optimizer,
        shapes=treadle.dynamic({"x": ("rows", None)}, rows=(2, 9)),
        options=Options(cache_dir=tmp_path),
    )
    with pytest.raises(treadle.CaptureError, match="TR-150"):
        step(rows([1]))


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adamax],
)
def test_complex_parameters(optimizer, tmp_path):
    batches = [(torch.randn(2, 3, 16),) for _ in range(3)]
    check(tmp_path, Spectral, lambda m, x: m(m(x)).square().mean(), batches, optimizer)


def rotary(model, x):
    angles = torch.outer(torch.arange(5.0), torch.ones(3))
    turned = torch.view_as_complex(model.first(x).view(5, 3, 2)) * torch.polar(
        torch.ones(5, 3), angles
    )
    turned.imag.mul_(0.5)
    return model.second(torch.view_as_real(turned).flatten(1)).square().mean()


def test_complex_values_between_generated_kernels(tmp_path):
    step = check(tmp_path, Net, rotary, [(torch.randn(5, 6),) for _ in range(3)], codegen=True)
    assert "TR-311" in step.explain()


@torch.library.custom_op("treadle_tests::accumulate", mutates_args=("total", "scale"))
def accumulate(
    total: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, by: float = 2.0
) -> torch.Tensor:
    total.add_(x)
    scale.mul_(by)
    return total.sum()


@accumulate.register_fake
def _(total, x, scale, by=2.0):
    return total.new_empty(())


def accumulates(model, x):
    h = model(x)
    scale = torch.ones(4)
    total = accumulate(model.seen[1], h.detach().mean(0), scale, by=3.0)
    return (h * model.seen.sum(0) * scale).square().mean() + total


def test_custom_operators_that_write_to_their_arguments(tmp_path):
    check(tmp_path, Net, accumulates, [(torch.randn(5, 6),) for _ in range(3)])


@pytest.mark.parametrize("rows", [(3, 0, 3), (0, 3)])
def test_batches_without_rows(rows, tmp_path):
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(
        train, model=model, optimizer=optimizer, options=Options(cache_dir=tmp_path)
    )
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for n in rows:
        x = torch.randn(n, 6)
        loss = twin(x).square().sum()
        loss.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x), loss.detach())
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_pads_of_rows_that_are_picked_by_value(tmp_path):
    def padded(model, x):
        picked = model(x)[x[:, 0] > 0]
        ends = F.pad(picked.softmax(-1).cumsum(-1), (1, 0), value=0.5)
        return (F.pad(ends, (-1, 2, 1, 0)) ** 2).sum() + (ends[:, 1:] - ends[:, :-1]).mean()

    batches = [(rows(picked),) for picked in ([0, 2], [1], [0, 1, 2, 3, 4])]
    check(tmp_path, Net, padded, batches)


BY_ROWS = {
    "factor": lambda total, n: total * (1.0 / n),
    "quotient": lambda total, n: total / (3 * n - 1),
    "power": lambda total, n: total * 2 ** (1.0 / n),
    "whole": lambda total, n: total * (12 // n),
}


@pytest.mark.parametrize("scaled", BY_ROWS.values(), ids=BY_ROWS)
def test_numbers_that_no_rows_do_not_have(tmp_path, scaled):
    """``1 / n`` of the ``n`` rows that a mask picks: nothing divides by none of them."""

    def loss_of(model, x, mask):
        picked = model(x)[mask]
        return scaled(picked.square().sum(), picked.size(0))

    batches = [(torch.randn(5, 6), torch.arange(5) < count) for count in (3, 1, 5)]
    check(tmp_path, Net, loss_of, batches)


def test_gradients_are_scaled_by_the_rows(tmp_path):
    """As in trainers that sum losses: ``p.grad.mul_(1.0 / sample_size)``."""
    torch.manual_seed(0)
    models = [nn.Linear(6, 4)]
    models.append(copy.deepcopy(models[0]))

    def step_of(model, optimizer):
        def step(x, mask):
            optimizer.zero_grad()
            picked = model(x)[mask]
            picked.square().sum().backward()
            for p in model.parameters():
                p.grad.data.mul_(1.0 / picked.size(0))
            optimizer.step()

        return step

    chosen = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    ours, theirs = map(step_of, models, chosen)
    options = Options(cache_dir=tmp_path, codegen=False)
    step = treadle.compile(ours, model=models[0], optimizer=chosen[0], options=options)
    for count in (2, 5, 1):
        batch = torch.randn(5, 6), torch.arange(5) < count
        step(*batch), theirs(*batch)
        torch.testing.assert_close(*(list(model.parameters()) for model in models))
