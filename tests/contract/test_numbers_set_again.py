"""Numbers that the loop around a step sets are inputs from the first compile on: no second one."""

import copy
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import treadle
from treadle.capture.explain_errors import users_frames
from treadle.capture.python_state.code.set_again import SetAgain

WEIGHT = 1.0
BEST = math.inf


@dataclass
class Settings:
    beta: float = 0.5
    other: float = 2.0
    entries: dict[str, float] = field(default_factory=lambda: {"divisor": 4, "plain": 3.0})


class Schedule:
    def __init__(self, settings):
        self.settings = settings

    def advance(self, at):
        lower(self.settings, at)


def lower(settings, at):
    settings.beta = 1 / (at + 2)


class Twins:
    """A compiled step and an eager one, of ``function(model, x)``."""

    def __init__(self, function):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.twin = copy.deepcopy(self.model)
        self.step = treadle.compile(lambda x: function(self.model, x), model=self.model)
        self.eager = lambda x: function(self.twin, x)

    def call(self):
        x = torch.randn(5, 4)
        torch.testing.assert_close(self.step(x), self.eager(x))


def test_a_variable_of_the_module():
    global WEIGHT
    WEIGHT = 1.0
    twins = Twins(lambda model, x: model(x).sum() * WEIGHT)
    for _ in range(4):
        twins.call()
        WEIGHT *= 0.9
    assert not twins.step.recompiles


def test_a_variable_of_the_function_around():
    weight = 1.0
    twins = Twins(lambda model, x: model(x).sum() * weight)
    for _ in range(4):
        twins.call()
        weight = weight - 0.125
    assert not twins.step.recompiles


def test_attributes_and_entries_that_functions_of_the_loop_set():
    settings = Settings()
    schedule = Schedule(settings)

    def computed(model, x):
        y = model(x) ** settings.other
        return (y * settings.beta / settings.entries["divisor"]).sum() + settings.entries["plain"]

    twins = Twins(computed)
    for at in range(5):
        schedule.advance(at)
        settings.entries["divisor"] = 1 + at // 2
        twins.call()
    assert not twins.step.recompiles
    assert "2 of Python's numbers" not in twins.step.explain()


def test_what_no_loop_sets_is_a_constant():
    settings = Settings()
    twins = Twins(lambda model, x: model(x).sum() * settings.beta)
    twins.call()
    settings.beta = 0.75
    twins.call()
    assert twins.step.recompiles == ["settings.beta: 0.5 became 0.75"]


def test_a_number_that_decides_is_none():
    """The length of a loop is what it was; the other number is an input all the same."""
    settings = Settings()
    settings.other = 3

    def computed(model, x):
        for _ in range(settings.other):
            x = torch.tanh(x)
        return model(x).sum() * settings.beta

    twins = Twins(computed)
    for at in range(4):
        settings.other, settings.beta = 3, 1.0 + at
        twins.call()
    assert not twins.step.recompiles


def test_code_that_asks_for_types_of_such_numbers_gets_them():
    settings = Settings()

    def computed(model, x):
        kind = {float: 2.0, int: 3.0}[type(settings.beta)]
        return model(x).sum() * settings.beta * kind

    twins = Twins(computed)
    for at in range(3):
        settings.beta = at + 1.5
        twins.call()
    assert twins.step.recompiles


EXTREMES = {
    "best": lambda best, loss: min(best, loss),
    "worst": lambda best, loss: max(loss, best),
    "of a list": lambda best, loss: min([loss, best, 3.0]),
    "of three": lambda best, loss: max(best, loss, -1.0),
    "bounded": lambda best, loss: max(min(loss, 0.25), -0.25),
}


def bounded_by(best, loss):
    return min(max(best, loss), 10.0)


@pytest.mark.parametrize("extreme", [*EXTREMES.values(), bounded_by], ids=[*EXTREMES, "a function"])
def test_the_best_loss_is_no_branch(extreme):
    seen = {"compiled": math.inf, "eager": math.inf}

    def update(name, model, x):
        loss = model(x).sum()
        seen[name] = extreme(seen[name], loss.item())
        return loss

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = treadle.compile(lambda x: update("compiled", model, x), model=model)
    for _ in range(8):
        x = torch.randn(5, 4)
        torch.testing.assert_close(step(x), update("eager", model, x))
        assert seen["compiled"] == pytest.approx(seen["eager"], rel=1e-6)
    assert not step.recompiles


@pytest.mark.parametrize("function", [lambda a, b: min(a, b), lambda a, b: max((a, b))])
@pytest.mark.parametrize("bound", [0.5, math.nan, math.inf, -0.0])
def test_extremes_are_pythons(function, bound):
    """Also where one is NaN, and where both are equal."""
    results = []

    def scaled(model, x):
        value = x.sum().item()
        results.append((function(value, bound), function(bound, value)))
        return model(x) * function(value, bound) + function(bound, value)

    twins = Twins(scaled)
    for value in (0.25, 0.5, 3.0, math.nan, 0.0, -math.inf):
        x = torch.zeros(1, 4)
        x[0, 0] = value
        outputs = twins.step(x), twins.eager(x)
        torch.testing.assert_close(*outputs, equal_nan=True)
        mine, theirs = results[-2:]
        assert str(mine) == str(theirs)
    assert not twins.step.recompiles


def test_numbers_of_several_types_are_a_branch():
    settings = Settings()
    kinds = []

    def scaled(model, x):
        weight = min(1, settings.beta)
        kinds.append(weight)
        return model(x).sum() * weight

    twins = Twins(scaled)
    for at in range(4):
        settings.beta = (at + 1) / 2
        twins.call()
    assert kinds == [0.5, 0.5, 1.0, 1.0, 1, 1, 1, 1]
    assert [type(kind) for kind in kinds[4:]] == [int] * 4


def nested(settings):
    def inner():
        settings["inner"] = 2

    found = []
    for _ in range(2):
        inner()
        found.append(SetAgain.around(users_frames()))
    return found[0]


def test_what_counts_as_set_again():
    found = nested({})
    assert found.keys == {"inner", 2}  # constants of code that sets entries
    assert "found" not in found.cells
    settings = Settings()
    settings.beta = 1.0
    assert "beta" not in SetAgain.around(users_frames()).attributes
    while settings.beta:
        found = SetAgain.around(users_frames())
        settings.beta -= 1.0
    assert "beta" in found.attributes


def test_a_module_that_runs_again_is_another_one():
    source = (
        "from treadle.capture.explain_errors import users_frames\n"
        "from treadle.capture.python_state.code.set_again import SetAgain\n"
        "A = 1\n"
        "for _ in range(2):\n"
        "    B = 2\n"
        "    found = SetAgain.around(users_frames())\n"
        "C = 3\n"
    )
    for _ in range(2):
        variables = {}
        exec(compile(source, __file__, "exec"), variables)
        assert {name for _, name in variables["found"].variables} == {"_", "B", "found"}
