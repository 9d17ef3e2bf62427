"""Kernels that reduce rows and write new elements where they have read old ones.

A row is gone through once for each reduction that waits for another; a store in one pass must not
come before a read in a later one. Random steps over buffers, in generated C++, beside eager.
"""

import copy
import random

import pytest
import torch
from torch import nn

import treadle

ROWS, COLS = 5, 67


class Updated(nn.Module):
    """Buffers of a matrix and of its rows, which each call updates."""

    def __init__(self, seed: int, cols: int = COLS):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in "abc":
            self.register_buffer(name, torch.randn(ROWS, cols, generator=generator))
        for name in "rs":
            self.register_buffer(name, torch.rand(ROWS, 1, generator=generator))
        self.weight = nn.Parameter(torch.zeros(1))
        self.seed = seed

    def forward(self, x):
        rng = random.Random(self.seed)
        before = [getattr(self, name) for name in "abc"]
        rows = [self.r, self.s]
        full = [x, *before]
        for _ in range(rng.randint(3, 9)):
            one, row = rng.choice(full), rng.choice(rows)
            match rng.randint(0, 3):
                case 0:
                    rows.append((one * rng.random()).sum(1, keepdim=True))
                case 1:
                    rows.append((one - row).abs().amax(1, keepdim=True))
                case 2:
                    full.append(one * 0.5 + rng.choice(full) * 0.25)
                case _:
                    full.append((one - row).tanh() + rng.choice(full))
        for buffer in rng.sample(before, rng.randint(1, 3)):
            buffer.copy_(rng.choice(full) * 0.5 + rng.choice(rows) * rng.choice((0.0, 0.1)))
        for buffer in rng.sample((self.r, self.s), rng.randint(0, 2)):
            buffer.copy_(rng.choice(rows[2:] or rows) * 0.1)
        return full[-1].sum() + rows[-1].sum()


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_pass_reads_what_an_earlier_one_has_stored(first):
    for seed in range(first, first + 10):
        model = Updated(seed)
        eager = copy.deepcopy(model)
        step = treadle.compile(lambda x, model=model: model(x).detach(), model=model, strict=True)
        for _ in range(2):
            x = torch.randn(ROWS, COLS)
            torch.testing.assert_close(step(x), eager(x).detach(), rtol=1e-4, atol=1e-3)
            for name, ours in model.named_buffers():
                theirs = eager.get_buffer(name)
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=f"{seed} {name}")


def kernels(step):
    return [line for line in step.explain().splitlines() if "treadle_" in line and " x1 " in line]


def updating(change):
    """How many kernels a step has that updates a buffer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("m", torch.rand(64, 256))
            self.register_buffer("scale", torch.rand(64, 1))
            self.weight = nn.Parameter(torch.zeros(1))

    model = Model()
    step = treadle.compile(lambda x: change(model, x), model=model, strict=True)
    step(torch.rand(64, 256))
    return len(kernels(step))


def test_new_elements_and_their_row_are_stored_by_one_kernel():
    def change(model, x):
        new = model.m * model.scale + x
        largest = new.amax(1, keepdim=True)
        model.m.copy_(new / largest)
        model.scale.copy_(largest)

    assert updating(change) == 1


def test_what_a_later_pass_reads_is_stored_by_another_kernel():
    def change(model, x):
        largest = x.amax(1, keepdim=True)
        apart = (model.m - largest).exp().sum(1, keepdim=True)  # the second pass reads m
        model.m.copy_(model.m * 0.5)  # which the first could store
        model.scale.copy_(apart)

    assert updating(change) == 2
