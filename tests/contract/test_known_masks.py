"""Masks that are made of constants alone: their sizes are numbers, and nothing is left to PyTorch's
kernels for their sake."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

N = 8


def eye(n):
    return torch.eye(n, dtype=torch.bool)


def pairs(n):
    """SimCLR's, as it is written with loops."""
    mask = torch.ones((n, n), dtype=torch.bool)
    mask = mask.fill_diagonal_(0)
    for i in range(n // 2):
        mask[i, n // 2 + i] = 0
        mask[n // 2 + i, i] = 0
    return mask


def contrastive(z, y):
    """SimCLR's loss, as it is often written."""
    z = F.normalize(z, dim=1)
    labels = torch.cat([torch.arange(N // 2) for _ in range(2)])
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    similar = z @ z.t()
    mask = eye(N)
    labels, similar = labels[~mask].view(N, -1), similar[~mask].view(N, -1)
    positive = similar[labels.bool()].view(N, -1)
    negative = similar[~labels.bool()].view(N, -1)
    return F.cross_entropy(torch.cat([positive, negative], 1) / 0.1, torch.zeros(N).long())


def looped(z, y):
    similar = z @ z.t()
    return similar[pairs(N)].view(N, -1).logsumexp(1).mean()


def written_after_it_was_read(z, y):
    mask = torch.zeros(N, dtype=torch.bool)
    mask[2:4] = True
    first = z.detach()[mask].sum()
    mask[5] = True
    view = mask.view(2, 4)[0]
    view[0] = True
    return first + z[mask].square().sum()


def other_forms(z, y):
    mask = torch.triu(torch.ones(N, N), 1) > 0
    similar = z @ z.t()
    rows, columns = torch.where(mask)
    found = torch.masked_select(similar, mask).sum() + similar.masked_select(eye(N)).sum()
    found = found + similar[rows, columns].square().sum() + similar[mask.nonzero()[:, 0], 0].sum()
    at = torch.nonzero(mask[0], as_tuple=True)[0]
    return found + z[at].sum() + z[torch.argwhere(mask[1])].sum()


def beside_other_indices(z, y):
    mask = torch.tensor([True, False, True])
    small = z[:, :3]
    return small[:, mask].sum() + small[2, mask].sum() + small[torch.tensor([0, 4]), mask].sum()


def small_numbers(z, y):
    mask = torch.tensor([1, 0] * (N // 2), dtype=torch.uint8)
    return z[mask == 1].sum() + z[~(mask == 1)].square().sum()


def put(z, y):
    out = torch.zeros(N, N)
    mask = torch.arange(N) % 3 == 0
    out[mask] = z[mask] @ torch.ones(z.shape[1], N)
    out[~mask] = 1.0
    return (out * z.sum()).sum()


def nothing(z, y):
    none = torch.zeros(N, dtype=torch.bool)
    return z[none].sum() + z[~none].sum()


KNOWN = [contrastive, looped, written_after_it_was_read, other_forms, beside_other_indices,
    small_numbers, put, nothing]  # fmt: skip


def of_labels(z, y):
    return z[y > 2].square().sum()


def of_labels_in_part(z, y):
    mask = eye(N)
    mask[0] = y > 2
    return (z @ z.t())[mask].sum()


def drawn(z, y):
    return z[torch.rand(N) > 0.5].sum()


UNKNOWN = [of_labels, of_labels_in_part, drawn]


def training(loss_of, compiled):
    torch.manual_seed(0)
    model = nn.Linear(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x, y):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return treadle.compile(step, model=model, optimizer=optimizer) if compiled else step


def batches():
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randn(N, 5, generator=generator), torch.arange(N).roll(seed) % 5 - seed % 2


@pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels")
@pytest.mark.parametrize("loss_of", [*KNOWN, *UNKNOWN], ids=lambda each: each.__name__)
def test_what_a_mask_picks_is_eagers(loss_of):
    step, eager = training(loss_of, compiled=True), training(loss_of, compiled=False)
    for x, y in batches():
        torch.manual_seed(1)
        expected = eager(x, y)
        torch.manual_seed(1)
        torch.testing.assert_close(step(x, y), expected, rtol=1e-4, atol=1e-4)
    assert ("TR-150" in str(step.explain())) == (loss_of in UNKNOWN)
    assert not step.recompiles


def test_a_mask_of_a_number_that_changes_follows_it():
    """A number of the call is no constant."""
    model = nn.Linear(5, 6)

    def loss(x, k):
        return model(x)[torch.arange(N) < k].sum()

    step = treadle.compile(loss, model=model)
    for k in (3, 5, 0, 8, 1):
        x = torch.randn(N, 5)
        torch.testing.assert_close(step(x, k), loss(x, k).detach())


def test_a_mask_outside_that_changes_is_seen():
    model = nn.Linear(5, 6)
    held = {"mask": eye(N)[0]}

    def loss(x):
        return model(x)[held["mask"]].sum()

    step = treadle.compile(loss, model=model)
    for at in range(4):
        x = torch.randn(N, 5)
        torch.testing.assert_close(step(x), loss(x).detach())
        held["mask"][at] = True
    held["mask"] = eye(N)[1]
    torch.testing.assert_close(step(x), loss(x).detach())


def beside_an_index(z, picked):
    z = z * 1
    z[torch.tensor([0, 4]), picked] = 2.0
    return z.sum()


def as_many(z, picked):
    z = z.t() * 1
    z[picked] = z[:2].detach() * 2
    return z.sum()


@pytest.mark.parametrize("loss_of", [beside_an_index, as_many])
def test_as_many_as_a_mask_of_the_call_picks(loss_of):
    """No call of it runs with a mask that nobody gave."""
    model = nn.Linear(5, 6)
    step = treadle.compile(lambda x, picked: loss_of(model(x), picked), model=model)
    for at in range(3):
        x, picked = torch.randn(N, 5), torch.zeros(6, dtype=torch.bool)
        picked[[at, 5]] = True
        torch.testing.assert_close(step(x, picked), loss_of(model(x), picked).detach())


def test_a_large_mask_is_left_to_the_call():
    """Indices of all that it picks would take more memory than the mask."""
    model = nn.Linear(5, 1025)

    def loss(x):
        return model(x)[torch.ones(1025, 1025, dtype=torch.bool)].sum()

    step = treadle.compile(loss, model=model)
    x = torch.randn(1025, 5)
    torch.testing.assert_close(step(x), loss(x).detach(), rtol=1e-4, atol=1e-3)
    assert "TR-150" in str(step.explain())


def by_sizes(crops):
    """DINO's: images of equal sizes go through the network together."""
    sizes = torch.tensor([crop.shape[-1] for crop in crops])
    return torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)


def grouped(model, crops):
    out, start = torch.empty(0), 0
    for end in by_sizes(crops):
        mixed = torch.cat(crops[start:end])
        out, start = torch.cat((out, model(F.adaptive_avg_pool1d(mixed, 4)))), end
    return out


def bounded(model, crops):
    ends = by_sizes(crops)
    return model(torch.cat(crops[:2])[: ends[0], :4]) * ends[1].item() / len(ends)


def decided(model, crops):
    ends = by_sizes(crops)
    if ends[0] == 2 and bool(torch.bincount(ends)[2]):
        return model(crops[0][:, :4]) * float(ends.float().mean())
    return model(crops[1][:, :4])


@pytest.mark.parametrize("function", [grouped, bounded, decided])
def test_numbers_of_constants_are_python_s(function):
    model = nn.Linear(4, 3)
    crops = [torch.randn(2, 8), torch.randn(2, 8), torch.randn(2, 6), torch.randn(2, 6)]
    step = treadle.compile(lambda *crops: function(model, list(crops)), model=model, strict=True)
    for _ in range(2):
        torch.testing.assert_close(step(*crops), function(model, crops))
    assert step.recompiles == []


def test_covariances_look_at_the_number_of_rows():
    """``torch.cov`` asks in C++ whether there are enough of them."""
    model = nn.Linear(4, 3).double()
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss(x):
        z = model(x).t()
        return torch.cov(z).square().sum() + torch.corrcoef(z).tril(-1).sum()

    step = treadle.compile(loss, model=model)
    torch.testing.assert_close(step(x), loss(x), rtol=1e-10, atol=1e-12)
