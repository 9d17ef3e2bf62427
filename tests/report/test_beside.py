"""``Step.compare``, and steps in notebooks."""

import torch
from torch import nn

import treadle
from contract.contract_help import training


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = training(lambda x: model(x).square().mean(), optimizer)
    return treadle.compile(step, model=model, optimizer=optimizer, **options)


def test_two_budgets_are_compared():
    x = torch.randn(512, 64)
    fast, small = made(), made(memory=0.0)
    for step in (fast, small):
        step.prepare(x)
    found = fast.compare(small)
    assert found.first == fast.summary()
    assert found.second == small.summary()
    assert found.second.peak_predicted_bytes < found.first.peak_predicted_bytes
    text = str(found)
    head, *lines = text.splitlines()
    assert head.split() == ["first", "second", "second", "/", "first"]
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["budget"].split() == ["budget", "none", "0.0"]
    assert "measured time" not in rows
    assert found.decisions
    assert any("gelu" in line or "addmm" in line for line in found.decisions)
    assert "kept became" in text


def test_measured_times_are_compared_where_both_are_there():
    x = torch.randn(32, 64)
    one, two = made(), made()
    one.profile(x)
    two.prepare(x)
    assert "measured time" not in str(one.compare(two))
    two.profile(x)
    text = str(one.compare(two))
    assert "measured time" in text
    assert "  backward" in text
    assert "memory plan" not in text


def test_a_notebook_shows_a_table():
    step = made()
    assert "not compiled yet" in step._repr_html_()
    step(torch.randn(32, 64))
    html = step._repr_html_()
    assert "<table>" in html
    assert "step()" in html
    assert "<pre>next\n" in html
    assert step.explain().splitlines()[0] in html
    assert "<lambda>" not in made_of_lambda()._repr_html_()


def made_of_lambda():
    step = treadle.compile(lambda x: x + 1, model=nn.Linear(1, 1))
    step(torch.ones(2))
    return step
