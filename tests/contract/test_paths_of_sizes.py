"""Steps that decide by values of tensors, with arguments of many sizes: one compile for each path
and range of sizes, with eager's numbers."""

import re
from collections import Counter

import pytest
import torch
from torch import nn

import treadle
from contract.test_whole_numbers import STEPS, pooled, trained

AWKWARD = (30, 33, 36, 41, 39, 64, 37, 1, 5, 0, 35, 34, 42, 31)


def sized_batches(sizes, *, most=4):
    for call, size in enumerate(sizes):
        torch.manual_seed(call)
        at = torch.randint(0, 5, (size,)).sort().values
        yield torch.randn(size, 8), at.clamp(max=most if call % 3 else most - 1)


def by_branch(model, x, at):
    loss = model(x).pow(2).mean()
    return loss * 0.5 if x.sum() > 0 else loss


def by_count(model, x, at):
    rows = model(x)[at > 2]
    return rows.pow(2).mean() if len(rows) > 10 else rows.sum()


def assert_alike(loss_of, sizes, **options):
    compiled, model = trained(loss_of, **options)
    eager, other = trained(loss_of, compiled=False)
    for batch in sized_batches(sizes):
        torch.manual_seed(1)
        ours = compiled(*batch)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, eager(*batch), rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(
        model.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-6, equal_nan=True
    )
    return compiled


@pytest.mark.filterwarnings("ignore:the step is compiled again")
@pytest.mark.filterwarnings("ignore:a call ran eagerly")
@pytest.mark.parametrize("loss_of", [*STEPS, by_branch, by_count])
def test_any_sizes_and_any_numbers(loss_of):
    sizes = (44, 47, 41, 63, 45, 57)
    assert_alike(loss_of, sizes)


@pytest.mark.filterwarnings("ignore:the step is compiled again")
@pytest.mark.parametrize("loss_of", [pooled, by_branch])
@pytest.mark.parametrize("budget", [None, 0.7])
def test_sizes_and_numbers_that_were_met_compile_nothing(loss_of, budget):
    compiled = assert_alike(loss_of, range(33, 64), memory=budget)
    compiles = len(compiled.recompiles)
    assert compiles <= 4
    assert any(
        " of a tensor was " in why or why.startswith("a branch") for why in compiled.recompiles
    )
    for batch in sized_batches(range(37, 63, 4)):
        compiled(*batch)
    assert len(compiled.recompiles) == compiles


@pytest.mark.parametrize("loss_of", [by_branch, pooled])
def test_declared_sizes(loss_of):
    shapes = treadle.dynamic({"x": ("rows", None), "at": ("rows",)}, rows=(30, 64))
    compiled, model = trained(loss_of, shapes=shapes)
    eager, other = trained(loss_of, compiled=False)
    for batch in sized_batches((30, 64, 41, 43, 47, 31)):
        torch.testing.assert_close(compiled(*batch), eager(*batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-6)
    assert len(compiled.recompiles) <= 3


@pytest.mark.filterwarnings("ignore:the step is compiled again")
def test_more_paths_than_are_kept_run_eagerly():
    model = nn.Linear(3, 2)
    options = treadle.Options(codegen=False, max_cached=3)
    compiled = treadle.compile(lambda x, n: model(x)[: int(n)].sum(), model=model, options=options)

    def calls():
        for call, n in enumerate((*range(1, 12), 1, 2)):
            x = torch.randn(40 + call, 3)
            torch.testing.assert_close(compiled(x, torch.tensor(n)), model(x)[:n].sum())

    with pytest.warns(RuntimeWarning, match="ran eagerly: it takes a new path"):
        calls()
    assert len(compiled.recompiles) < 10


@pytest.mark.filterwarnings("ignore:the step is compiled again")
@pytest.mark.filterwarnings("ignore:a call ran eagerly")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_search_looks_once_for_each_kind_of_variant(dynamic):
    model = nn.Linear(3, 2)
    options = treadle.Options(codegen=False, max_cached=3, dynamic=dynamic)
    compiled = treadle.compile(lambda x, n: model(x)[: int(n)].sum(), model=model, options=options)
    variants = compiled._dispatcher.variants
    for call in range(24):
        model.train(call % 5 > 1)
        compiled(torch.randn(20 + call, 3), torch.tensor(1 + call % 4))
        kinds = Counter((key.outside, key.ignored) for key in variants._known)
        assert dict(variants._kinds) == kinds
    assert len(variants._kinds) <= 2 * 3 * 2


@pytest.mark.filterwarnings("ignore:the step is compiled again")
@pytest.mark.filterwarnings("ignore:a call ran eagerly")
@pytest.mark.parametrize("loss_of", [pooled, by_branch])
def test_awkward_sizes(loss_of):
    compiled, _ = trained(loss_of)
    eager, _ = trained(loss_of, compiled=False)
    for batch in sized_batches(AWKWARD):
        try:
            theirs = eager(*batch)
        except (RuntimeError, IndexError) as error:
            with pytest.raises((RuntimeError, IndexError), match=re.escape(str(error)[:20])):
                compiled(*batch)
        else:
            torch.testing.assert_close(
                compiled(*batch), theirs, rtol=1e-4, atol=1e-5, equal_nan=True
            )
