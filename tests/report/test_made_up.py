"""Level 5 of the debug ladder: which passes change numbers."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import treadle
from testing import trace
from treadle import GraphPass, Options
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.report.made_up import NumbersPrinter, made_up_inputs

aten = torch.ops.aten


@dataclass(frozen=True)
class ReluIsAbs(GraphPass):
    """relu(x) -> abs(x), which is wrong."""

    def run(self, step):
        found = step.graph.find_nodes(op="call_function", target=aten.relu.default)
        for node in found:
            node.target = aten.abs.default
        return len(found)


def said(program, *inputs, passes):
    lines = []
    run_passes(trace(program, *inputs), passes, NumbersPrinter(lines.append))
    return lines


def test_a_pass_that_changes_numbers_is_named_and_those_after_it_are_not():
    passes = [RemoveCommonSubexpressions(), ReluIsAbs(), RemoveCommonSubexpressions()]
    lines = said(lambda x: (x - 2).relu() + (x - 2).exp(), torch.ones(3), passes=passes)
    assert lines == ["treadle: after ReluIsAbs(): out0 has different results"]


def test_draws_are_the_same_in_every_run():
    program = lambda x: x * torch.rand(3) + torch.rand(3)  # noqa: E731
    assert said(program, torch.ones(3), passes=[RemoveCommonSubexpressions()]) == []


def test_whole_numbers_are_places_in_anything():
    step = trace(lambda table, at: table[at], torch.rand(4, 2), torch.tensor([3, 1]))
    table, at = made_up_inputs(step)
    assert table.shape == (4, 2)
    assert 0 <= float(table.min()) < float(table.max()) < 1
    assert at.tolist() == [0, 0]


def test_a_step_that_does_not_run_on_made_up_inputs_is_not_compared():
    table, at = torch.rand(4, 2), torch.tensor([5, 8])
    (line,) = said(lambda table, at: table[at - 5].relu(), table, at, passes=[ReluIsAbs()])
    assert line.startswith("treadle: numbers are not compared: index -5 is out of bounds")


@pytest.mark.parametrize(
    ("debug", "rng", "told"), [(4, "counter", 0), (5, "eager", 0), (5, "counter", 1)]
)
def test_level_five_says_which_passes_change_numbers(tmp_path, capfd, debug, rng, told):
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    options = Options(cache_dir=tmp_path / "cache", debug=debug, rng=rng)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step(torch.randn(4, 5))
    lines = [
        each
        for each in capfd.readouterr().err.splitlines()
        if each.startswith("treadle: ") and ("numbers" in each or "different results" in each)
    ]
    assert len(lines) == told, lines
    assert all(line.startswith("treadle: after ") for line in lines)


def test_operators_of_users_never_run_on_made_up_numbers(tmp_path, capfd):
    ran = []

    @torch.library.custom_op("mine::launch", mutates_args=())
    def launch(x: torch.Tensor) -> torch.Tensor:
        ran.append(x.clone())
        return x * 2

    @launch.register_fake
    def _(x):
        return torch.empty_like(x)

    model = nn.Linear(3, 2)
    options = Options(cache_dir=tmp_path / "cache", debug=5)
    step = treadle.compile(lambda x: model(launch(x)).sum(), model=model, options=options)
    given = torch.randn(4, 3)
    step(given)
    said = capfd.readouterr().err
    assert "numbers are not compared: the step calls mine.launch" in said
    assert all(torch.equal(each, given) for each in ran)
    assert len(ran) == 1


@torch.library.custom_op("made_up_tests::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.clone())
    return x * 2


@seen.register_fake
def _(x):
    return torch.empty_like(x)


SEEN: list[torch.Tensor] = []


@dataclass(frozen=True)
class CallsUsers(GraphPass):
    """A pass that puts an operator of users' into the step."""

    def run(self, step):
        for node in step.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = torch.ops.made_up_tests.seen.default
        return 1


def test_an_operator_that_a_pass_puts_there_does_not_run_either():
    SEEN.clear()
    lines = said(lambda x: x.relu(), torch.ones(3), passes=[CallsUsers()])
    words = "treadle: numbers are not compared: the step calls made_up_tests.seen.default"
    assert lines == [words]
    assert SEEN == []


def test_what_was_compared_before_is_forgotten():
    SEEN.clear()
    lines = []
    printer = NumbersPrinter(lines.append)
    passes = [RemoveCommonSubexpressions()]
    run_passes(trace(lambda x: x.relu(), torch.ones(3)), passes, printer)
    assert lines == []
    run_passes(trace(lambda x: seen(x).relu(), torch.ones(3)), passes, printer)
    assert len(lines) == 1
    assert SEEN == []
