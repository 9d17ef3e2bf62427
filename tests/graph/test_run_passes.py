import importlib
import pkgutil
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import treadle
from testing import refusal, trace
from treadle.compiler import cleaning
from treadle.graph.rewrite.pass_observers import CheckNumbers, DumpPasses
from treadle.graph.rewrite.passes import Contract, GraphPass, Observer, run_passes
from treadle.graph.rewrite.rules import Rewrite
from treadle.options import OPTIONAL_PASSES, Options
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.util.errors import TreadleError, VerifyError

X = torch.randn(3)


def step_of():
    return trace(lambda x: x.relu().neg(), X)


@dataclass(frozen=True)
class Nothing(GraphPass):
    def run(self, step):
        return 0


@dataclass(frozen=True)
class NeedsNothing(GraphPass):
    contract: ClassVar[Contract] = Contract(requires=(Nothing,), repeatable=False)

    def run(self, step):
        return 0


@dataclass(frozen=True)
class Spoils(GraphPass):
    contract: ClassVar[Contract] = Contract(invalidates=(Nothing,))

    def run(self, step):
        return 0


@dataclass(frozen=True)
class AfterSpoils(GraphPass):
    contract: ClassVar[Contract] = Contract(after=(Spoils,))

    def run(self, step):
        return 0


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        ([NeedsNothing()], "NeedsNothing requires Nothing, which has not run"),
        ([Nothing(), Spoils(), NeedsNothing()], "NeedsNothing requires Nothing, which has"),
        ([Nothing(), NeedsNothing(), NeedsNothing()], "NeedsNothing may run only once"),
        ([AfterSpoils(), Spoils()], "AfterSpoils must run after Spoils, but ran before it"),
    ],
)
def test_a_broken_contract_names_both(passes, reason):
    assert reason in refusal(lambda: run_passes(step_of(), passes))


def test_contracts_are_kept_per_step():
    first, second = step_of(), step_of()
    run_passes(first, [Nothing()])
    run_passes(first, [NeedsNothing(), Spoils(), AfterSpoils()])
    assert "has not run" in refusal(lambda: run_passes(second, [NeedsNothing()]))


def test_a_pass_that_breaks_the_step_is_named():
    @dataclass(frozen=True)
    class Backwards(GraphPass):
        def run(self, step):
            _, first, second, _ = step.graph.nodes
            first.prepend(second)
            return 1

    message = refusal(lambda: run_passes(step_of(), [Backwards()]))
    assert "Backwards(): neg uses relu before it is defined" in message
    assert "> neg: f32[3] = neg(relu)" in message


def test_a_pass_that_changes_numbers_is_named():
    @dataclass(frozen=True)
    class Wrong(GraphPass):
        def run(self, step):
            node = list(step.graph.nodes)[1]
            node.target = torch.ops.aten.abs.default
            return 1

    check = CheckNumbers((-X.abs(),))
    message = refusal(lambda: run_passes(step_of(), [Nothing(), Wrong()], check))
    assert "Wrong()" in message
    assert "out0 has different results" in message


def test_numbers_are_compared_down_to_the_sign_of_zero():
    @dataclass(frozen=True)
    class DropsSign(GraphPass):
        def run(self, step):
            node = list(step.graph.nodes)[-2]
            node.target = torch.ops.aten.abs.default
            return 1

    check = CheckNumbers((-X.abs(),))  # relu gives 0.0, neg makes it -0.0
    message = refusal(lambda: run_passes(step_of(), [DropsSign()], check))
    assert "out0 has different results" in message


def test_observers_hear_of_every_run(tmp_path):
    class Listens(Observer):
        def __init__(self):
            self.heard = []

        def ran(self, each, step, report):
            self.heard.append(
                (report.name, report.matches, report.nodes_before, report.nodes_after)
            )

    step = trace(lambda x: x.exp() + x.exp(), X)
    listens = Listens()
    passes = [RemoveCommonSubexpressions(), RemoveDeadCode()]
    reports = run_passes(trace(lambda x: x.exp() + x.exp(), X), passes, listens)
    run_passes(step, passes, DumpPasses(tmp_path))
    assert listens.heard == [
        ("RemoveCommonSubexpressions()", 1, 5, 4),
        ("RemoveDeadCode(keep_random=True)", 0, 4, 4),
    ]
    assert all(each.seconds > 0 for each in reports)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00-start.txt",
        "01-RemoveCommonSubexpressions.diff",
        "01-RemoveCommonSubexpressions.txt",
        "02-RemoveDeadCode.diff",
        "02-RemoveDeadCode.txt",
    ]
    changes = (tmp_path / "01-RemoveCommonSubexpressions.diff").read_text()
    assert "-exp.1: f32[3] = exp(x)" in changes


def every_pass(kind=GraphPass):
    for module in pkgutil.walk_packages(treadle.__path__, "treadle."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for each in kind.__subclasses__():
        if not is_base(each):
            yield each
        yield from every_pass(each)


def is_base(kind):
    """A class that passes of the package are made from: it is none itself."""
    return kind.__module__.startswith("treadle.graph.rewrite.") and bool(kind.__subclasses__())


def test_every_pass_of_the_package_declares_its_contract():
    built_in = {each for each in every_pass() if each.__module__.startswith("treadle.")}
    assert len(built_in) > 10
    silent = [each.__name__ for each in built_in if "contract" not in vars(each)]
    assert not silent, "say what it requires, runs after, invalidates: Contract() for nothing"


def test_no_contract_asks_for_a_circle():
    def before(each, seen=()):
        assert each not in seen, seen
        for other in (*each.contract.after, *each.contract.requires):
            before(other, (*seen, each))

    for each in every_pass():
        if each.__module__.startswith("treadle."):
            before(each)


def test_what_can_be_left_out_is_there():
    names = {each.__name__ for each in every_pass()}
    rules = {
        rule.name
        for each in (*cleaning.CLEAN, *cleaning.COUNTER_BASED, *cleaning.FUSE)
        if isinstance(each, Rewrite)
        for rule in each.rules
    }
    assert set(OPTIONAL_PASSES) <= names | rules


def test_a_pass_may_be_skipped_by_the_name_it_had():
    assert Options(skip=("JoinPieces",)) == Options(skip=("SimplifySplitCat",))
    with pytest.raises(TreadleError, match="cannot be skipped"):
        Options(skip=(["JoinPieces"],))


@dataclass(frozen=True)
class BreaksAndSaysNothing(GraphPass):
    def run(self, step):
        (relu,) = step.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        relu.meta = {}
        return 0


def test_a_broken_promise_to_change_nothing_is_found_at_the_end():
    with pytest.raises(VerifyError, match=r"after BreaksAndSaysNothing\(\), Nothing\(\): relu has"):
        run_passes(step_of(), [BreaksAndSaysNothing(), Nothing()])
