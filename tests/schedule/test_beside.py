"""Temporaries that are allocated beside the arena: the peak is that of the fullest step."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.runtime.meter import measure_peak
from treadle.schedule.arena import Interval, pack
from treadle.schedule.beside import blocks_beside

KIB = 1 << 10


def sums(blocks, busy):
    alive = [sum(b.nbytes for b in blocks if b.first <= at <= b.last) for at in range(len(busy))]
    return alive, max(a + b for a, b in zip(alive, busy, strict=True))


def test_what_is_idle_where_calls_need_most_is_allocated_apart():
    blocks = [Interval("idle", 512 * KIB, 0, 1), Interval("kept", 256 * KIB, 0, 3)]
    assert blocks_beside(blocks, [0, 0, 768 * KIB, 0, 0]) == {"idle"}
    assert not blocks_beside(blocks, [0, 768 * KIB, 768 * KIB, 0, 0])  # not idle at the first
    assert not blocks_beside(blocks[1:], [0, 0, 768 * KIB, 0, 0])


def test_small_blocks_stay():
    blocks = [Interval("idle", 512, 0, 1), Interval("kept", 256, 0, 3)]
    assert not blocks_beside(blocks, [0, 0, 768, 0, 0])


@pytest.mark.parametrize("seed", range(50))
def test_no_step_holds_more_than_the_floor(seed):
    rng = random.Random(seed)
    steps = rng.randint(3, 40)
    blocks = []
    for number in range(rng.randint(1, 60)):
        first, last = sorted(rng.randrange(steps) for _ in range(2))
        blocks.append(Interval(f"b{number}", 64 * rng.randint(1, 10_000), first, last))
    busy = [*(rng.choice([0, 64 * rng.randint(1, 80_000)]) for _ in range(steps)), 0]
    moved = blocks_beside(blocks, busy)
    inside = [b for b in blocks if b.name not in moved]
    alive, floor = sums(blocks, busy)
    outside, _ = sums([b for b in blocks if b.name in moved], busy)
    busy_now = [a + b for a, b in zip(outside, busy, strict=True)]
    alive_now, _ = sums(inside, busy)
    assert max(alive_now) + max(busy_now) <= max(alive) + max(busy)
    room = floor - max(busy)
    if moved and max(alive_now) <= room:
        assert max(alive_now) + max(busy_now) <= floor
    assert pack(inside)[1] >= max(alive_now)


def one_by_one(blocks, busy):
    """``blocks_beside`` in plain words: the fullest step first, at each the smallest block that is
    enough, or the largest."""
    alive, floor = sums(blocks, busy)
    outside, moved = list(busy), set()
    room = floor - max(busy)
    if max(alive) - room < 1 << 16:
        return moved
    full = [at for at in range(len(busy)) if alive[at] > room]
    for at in sorted(full, key=lambda at: -alive[at]):
        while alive[at] > room:
            fits = sorted(
                (b.nbytes, b.name, b.first, b.last)
                for b in blocks
                if b.name not in moved and b.nbytes >= 64 and b.first <= at <= b.last
                if max(outside[b.first : b.last + 1]) + b.nbytes <= floor - room
            )
            if not fits:
                break
            enough = [fit for fit in fits if fit[0] >= alive[at] - room]
            nbytes, name, first, last = enough[0] if enough else fits[-1]
            moved.add(name)
            for step in range(first, last + 1):
                alive[step] -= nbytes
                outside[step] += nbytes
    return moved


@pytest.mark.parametrize("seed", range(50))
def test_moves_the_same_blocks_as_one_by_one(seed):
    rng = random.Random(seed)
    steps, unit = rng.randint(1, 60), rng.choice([64, 4 * KIB, 100_000])
    blocks = []
    for number in range(rng.randint(0, 70)):
        first, last = sorted((rng.randrange(steps), rng.randrange(steps + 1)))
        most = rng.choice([3, 10_000])
        blocks.append(Interval(f"b{number}", unit * rng.randint(0, most), first, last))
    busy = [*(rng.choice([0, unit * rng.randint(1, 80_000)]) for _ in range(steps)), 0]
    assert blocks_beside(blocks, busy) == one_by_one(blocks, busy)


def segmentation(model, optimizer):
    def step(x, y):
        out = F.interpolate(model(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_a_step_of_convolutions_peaks_as_eager_does():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(32, 5, 1),
    )  # fmt: skip
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(each.parameters()) for each in (model, twin))
    step = treadle.compile(segmentation(model, ours), model=model, optimizer=ours)
    eager = segmentation(twin, theirs)
    for _ in range(3):
        x, y = torch.randn(16, 3, 32, 32), torch.randint(5, (16, 32, 32))
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-3, atol=1e-5)
    state = [v for each in theirs.state.values() for v in each.values()]
    held = [*(each.detach() for each in twin.parameters()), *state, x, y]
    peak = measure_peak(lambda: eager(x, y), held).peak_bytes
    measured = step.measure(x, y).peak_bytes
    assert measured <= step.compiled.artifact.peak_bytes
    assert measured <= 1.005 * peak
