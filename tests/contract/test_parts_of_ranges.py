"""Sizes that do not go together: parts of a range, and sizes that the step refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.session.variants.compiling import VariantCompiler


def run(function, model, inputs):
    """The compiled step after calls that were eager's; what eager refuses is refused as well."""
    step = treadle.compile(function, model=model)
    for given in inputs:
        try:
            expected = function(given)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                step(given)
            continue
        torch.testing.assert_close(step(given), expected, rtol=1e-4, atol=1e-5)
    return step.recompiles


def test_a_slice_that_may_be_empty_is_compiled_for_sizes_of_which_it_is_not():
    model = nn.Linear(4, 7)
    (why, *others) = run(
        lambda x: model(x)[: int(0.2 * len(x))].sum(),
        model,
        [torch.randn(n, 4) for n in (53, 40, 31, 47, 26, 4)],
    )
    assert "compiled for x_0 in 5..53" in why
    assert len(others) == 1  # of 4, alone


def test_windows_need_a_row():
    model = nn.Conv2d(1, 2, 3, padding=1)
    recompiles = run(
        lambda x: F.avg_pool2d(model(x), 2).square().mean(),
        model,
        [torch.randn(2, 1, n, 9) for n in (23, 20, 9, 17, 12)],
    )
    assert len(recompiles) == 1


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = (
            nn.Embedding(50, 8),
            nn.Embedding(70, 8),
            nn.Linear(8, 5),
        )

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1])
        return self.head(self.words(tokens) + self.places(at)).mean()


class Rows(Positions):
    def forward(self, tokens):
        rows = self.places.weight[: tokens.shape[1]]
        return self.head(self.words(tokens) + rows).mean()


@pytest.mark.parametrize("kind", [Positions, Rows])
@pytest.mark.parametrize(
    "sizes", [(90, 40, 30, 9, 21), (40, 90, 30, 9, 21), (40, 30, 90, 9, 100, 21)]
)
def test_a_call_that_is_refused_keeps_no_sizes_from_one_compile(kind, sizes):
    model = kind()
    recompiles = run(model, model, [torch.randint(50, (3, n)) for n in sizes])
    assert len(recompiles) == 1, recompiles
    assert "compiled for args_0_1 in 2..40" in recompiles[0]


@pytest.mark.parametrize("kind", [Positions, Rows])
def test_sizes_up_to_the_end_of_a_table_go_together(kind):
    """Though the bucket ends behind it."""
    model = kind()
    recompiles = run(model, model, [torch.randint(50, (3, n)) for n in (40, 30, 68, 66, 69, 67)])
    assert len(recompiles) == 2, recompiles


def test_a_part_of_a_range_is_not_captured_again(monkeypatch, own_cache):
    captures: list[object] = []
    real = VariantCompiler._captured

    def counted(*args):
        captures.append(args)
        return real(*args)

    monkeypatch.setattr(VariantCompiler, "_captured", counted)
    model = nn.Conv2d(1, 2, 3, padding=1)

    def pooled(x):
        small = F.avg_pool2d(model(x), 4)
        return F.interpolate(small, x.shape[-2:], mode="bilinear", align_corners=True).mean()

    inputs = [torch.randn(2, 1, n, n) for n in (23, 20, 9, 17, 12, 5)]
    recompiles = run(pooled, model, inputs)
    assert ["8..23" in recompiles[0], "4..7" in recompiles[1]] == [True, True], recompiles
    assert len(captures) == 3
