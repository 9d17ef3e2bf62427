"""Bytes alive at each step, against ranges of the arena painted one by one."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import treadle
from treadle import Options
from treadle.compiler.cleaning import clean
from treadle.compiler.memory import planned
from treadle.compiler.request import Target
from treadle.schedule.plan import lifetimes, touched_by
from treadle.schedule.timeline import timeline, timeline_from


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    layers = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24))]
    model = nn.Sequential(*layers, nn.Linear(24, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = Options(cache_dir=tmp_path_factory.mktemp("cache"), codegen=False)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    captured = step.prepare(torch.randn(37, 24)).captured
    return planned(clean(captured.step), Target("cpu", Options())).plan


def alive_in_arena(plan, i):
    lives = lifetimes(touched_by(plan.steps), plan.buffers, frozenset())
    return [each for n, each in lives.items() if n in plan.offsets and each.first <= i <= each.last]


def test_each_byte_of_the_arena_counts_once(plan):
    line = timeline(plan)
    shared = 0
    for i in range(len(plan.steps)):
        painted = set()
        for each in alive_in_arena(plan, i):
            begin = plan.offsets[each.name]
            painted |= set(range(begin, begin + each.nbytes))
        shared += sum(each.nbytes for each in alive_in_arena(plan, i)) > len(painted)
        assert sum(row[i] for row in line.temporaries.values()) == len(painted)
    assert shared  # values that take over the bytes of others: the hard case


def test_the_peak_is_where_most_is_alive_and_names_the_largest(plan):
    line = timeline(plan)
    columns = zip(*line.temporaries.values(), line.calls, line.workspace, strict=True)
    totals = [sum(each) for each in columns]
    assert totals[line.peak_at] == max(totals)
    sizes = sorted((e.nbytes for e in alive_in_arena(plan, line.peak_at)), reverse=True)
    held = [each for each in line.held if each.name in plan.offsets]
    assert [each.size_bytes for each in held] == sizes[: len(held)]
    assert len(line.held) == 16 or len(held) == len(sizes)
    for each in line.held:
        assert each.phase in ("forward", "backward", "optimizer")
        assert each.type.startswith(("f32[", "f64[", "i64["))


def test_a_timeline_is_data(plan):
    line = timeline(plan)
    assert timeline_from(json.loads(json.dumps(asdict(line)))) == line
