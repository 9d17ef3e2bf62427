"""Whole numbers of tensors that Python needs during the step, such as sizes and places: a variant
for each, with eager's numbers, and nothing of a call on the wrong path is left."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle


def pooled(model, x, at):
    count = int(at.max()) + 1
    return torch.zeros(count, 4).index_add(0, at, model(x)).pow(2).sum()


def item(model, x, at):
    count = at.max().item() + 1
    return torch.zeros(count, 4).index_add(0, at, model(x)).pow(2).sum() / count


def rounds(model, x, at):
    for _ in range(int(at.max())):
        x = x + 0.1
    return model(x).pow(2).mean()


def halved(model, x, at):
    left, h = int(at.max()), model(x)
    while left > 0:
        h = h * 0.5
        left -= 1
    return h.sum()


def cut(model, x, at):
    return model(x)[: int(at.sum()) % 7 + 1].pow(2).mean()


def classes(model, x, at):
    return (F.one_hot(at).float().t() @ model(x)).pow(2).mean()


def parts(model, x, at):
    return sum(part.sum() ** 2 for part in model(x).split(torch.bincount(at).tolist()))


def table(model, x, at):
    factors = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}
    return model(x).mean() * factors[int(at[0])] + factors[at[-1].item()]


def entry(model, x, at):
    return (model(x) * [1.0, 2.0, 3.0, 4.0, 5.0][at[-1]]).mean()


def share(model, x, at):
    return model(x)[:, 0].topk(max(1, int(0.3 * (at > 1).sum().item()))).values.mean()


def shaped(model, x, at):
    count = int(at.max()) + 1
    return model(x[: 8 * count]).view(count, -1).sum(1).pow(2).sum()


def drawn(model, x, at):
    h = F.dropout(model(x), 0.4)
    return h[torch.randperm(int(at.max()) + 5)].sum()


def computed(model, x, at):
    h = model(x)
    return h[int(h.argmax()) % 3 :].sum()


def flag(model, x, at):
    return model(x).sum() * [2.0, 3.0][(at.max() > 3).item()]


def nested(model, x, at):
    h, (first, second) = model(x), torch.stack((at[:2], at[-2:])).tolist()
    return h[first[0] : second[1] + 1].sum() + h[: second[0]].mean()


def again(model, x, at):
    def inside(x):
        return model(x)[: int(at.max())]

    return checkpoint(inside, x, use_reentrant=False).pow(2).sum()


def tried(model, x, at):
    try:
        h = model(x)[: range(9)[at.max()]]
    except (TypeError, ValueError, RuntimeError):
        h = model(x)
    return h.sum()


def rows_of_a_mask(model, x, at):
    return sum(row.sum() ** 2 for row in model(x)[at > 2])


def places(model, x, at):
    h = model(x)
    return sum(h[place].sum() for place in (at > 2).nonzero())


def labels(model, x, at):
    h = model(x)
    return sum(h[at == label].mean() ** 2 for label in at.unique())


def listed_labels(model, x, at):
    h = model(x)
    return sum(h[at == label].mean() ** 2 for label in at.unique().tolist())


def halves(model, x, at):
    return torch.stack([half.mean() for half in model(x)[at > 2].chunk(2)]).prod()


def counted_rows(model, x, at):
    h = model(x)
    return sum(h[place].sum() for place in range(len(x[at > 2])))


def pairs(model, x, at):
    h, limits = model(x), torch.arange(3)
    chosen = zip(*torch.where(at[-9:, None] > limits), strict=True)
    return sum(h[row].sum() * limit for row, limit in chosen)


STEPS = (
    pooled, item, rounds, halved, cut, classes, parts, table, entry, share, shaped, drawn, computed,
    flag, nested, again, tried, rows_of_a_mask, places, labels, listed_labels, halves, counted_rows,
    pairs,
)  # fmt: skip


def batches(count=8):
    for call in range(count):
        torch.manual_seed(call)
        at = torch.randint(0, 5, (40,)).sort().values.clamp(max=4 if call % 3 else 3)
        yield torch.randn(40, 8), at


def trained(loss_of, shapes=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, at):
        loss = loss_of(model, x, at)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = step
    if options.pop("compiled", True):
        options = treadle.Options(codegen=False, **options)
        call = treadle.compile(
            step, model=model, optimizer=optimizer, options=options, shapes=shapes
        )
    return call, model


def assert_alike(loss_of, **options):
    compiled, model = trained(loss_of, **options)
    eager, other = trained(loss_of, compiled=False)
    for batch in batches():
        torch.manual_seed(1)
        ours = compiled(*batch)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, eager(*batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-6)
    return compiled


@pytest.mark.parametrize("loss_of", STEPS)
def test_each_number_is_a_variant(loss_of):
    compiled = assert_alike(loss_of)
    assert all("of a tensor was" in why or "branch" in why for why in compiled.recompiles)


def test_only_numbers_that_were_not_met_are_compiled():
    compiled = assert_alike(pooled)
    (why,) = compiled.recompiles
    assert why.startswith("a number of a tensor was 3 and is 4: ")
    assert "torch.zeros(count, 4)" in why
    assert "4: " in compiled.explain()


@pytest.mark.parametrize("budget", [None, 0.7])
def test_within_a_budget(budget):
    assert_alike(pooled, memory=budget)


def test_a_list_is_asked_for_at_once():
    runs = []

    def counted(model, x, at):
        runs.append(1)
        return parts(model, x, at)

    compiled, _ = trained(counted)
    compiled(torch.randn(40, 8), torch.arange(40) % 5)
    assert len(runs) <= 4


def test_one_of_a_long_list_is_asked_for_alone():
    model = nn.Linear(3, 2)

    def step(x, n):
        labels = n.tolist()
        return model(x)[: labels[0]].sum() * [1.0, 2.0, 3.0][labels[-1]]

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.randn(7, 3)
    for first in (2, 5, 2):
        n = torch.arange(200) % 2 + first
        n[-1] = 1
        torch.testing.assert_close(compiled(x, n), step(x, n))
    assert len(compiled.recompiles) == 1


def test_more_numbers_than_variants_are_kept_run_eagerly():
    model = nn.Linear(3, 2)
    options = treadle.Options(codegen=False, max_cached=3)
    compiled = treadle.compile(lambda x, n: model(x)[: int(n)].sum(), model=model, options=options)
    x = torch.randn(30, 3)

    def calls():
        for n in (*range(1, 9), 1, 2):
            torch.testing.assert_close(compiled(x, torch.tensor(n)), model(x)[:n].sum())

    with pytest.warns(RuntimeWarning, match="ran eagerly: it takes a new path"):
        calls()


def test_a_number_with_which_the_step_fails_is_eager_s_to_raise():
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())

    def step(x, n):
        h = model(x)
        return torch.zeros(int(n), 2) + h[: int(n)]

    compiled = treadle.compile(step, model=model)
    x = torch.randn(5, 3)
    assert compiled(x, torch.tensor(2)).shape == (2, 2)
    with pytest.raises(RuntimeError, match="-1"):
        compiled(x, torch.tensor(-1))
    with pytest.raises(RuntimeError, match="must match"):
        compiled(x, torch.tensor(7))
    assert compiled(x, torch.tensor(3)).shape == (3, 2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_first_number_may_fail_as_well():
    model = nn.Linear(3, 2)
    compiled = treadle.compile(lambda x, n: model(x).view(int(n), -1), model=model)
    with pytest.raises(RuntimeError, match=r"invalid|shape"):
        compiled(torch.randn(5, 3), torch.tensor(3))
    assert compiled(torch.randn(6, 3), torch.tensor(3)).shape == (3, 4)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_awkward_numbers(size):
    model = nn.Linear(3, 2)
    compiled = treadle.compile(lambda x, n: model(x)[: int(n)].sum(0), model=model)
    x = torch.randn(7, 3)
    for n in (size, 3, size):
        torch.testing.assert_close(compiled(x, torch.tensor(n)), model(x)[:n].sum(0))


def test_one_number_asked_for_twice_is_one_decision():
    model = nn.Linear(3, 2)

    def step(x, n):
        count = int(n)
        return model(x)[:count].sum() / torch.ones(count + 1, count).sum()

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.randn(7, 3)
    for n in (2, 3):
        torch.testing.assert_close(compiled(x, torch.tensor(n)), step(x, torch.tensor(n)))
    assert compiled.explain().count("\n    3: ") == 1


def test_strict_steps_have_no_paths():
    model = nn.Linear(3, 2)
    compiled = treadle.compile(lambda x, n: model(x)[: int(n)], model=model, strict=True)
    with pytest.raises(treadle.CaptureError, match="TR-102") as caught:
        compiled(torch.randn(7, 3), torch.tensor(2))
    assert "needs a number of a tensor" in str(caught.value)


def test_numbers_that_are_not_whole_are_refused():
    model = nn.Linear(3, 2)
    compiled = treadle.compile(lambda x: (model(x), {x.sum().item(): 1}), model=model)
    with pytest.raises(treadle.CaptureError, match="TR-102"):
        compiled(torch.randn(7, 3))
