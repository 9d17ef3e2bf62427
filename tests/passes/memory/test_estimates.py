"""How long operations are estimated to take: by option, and what plans make of it."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from contract.contract_help import training
from passes.memory.traced_steps import attention, by_simulation, stack, traced
from treadle.compiler.measured.operation_times import OperationTimes, call_of
from treadle.compiler.memory import _times
from treadle.compiler.target import Target
from treadle.passes.comm.cost import CommunicationModel
from treadle.passes.memory.choose import Plans, fastest_plan, plan_memory
from treadle.passes.memory.cost import CALLS, Kind
from treadle.passes.memory.estimates.costs import costs_of
from treadle.passes.memory.order import facts_of
from treadle.runtime.call_times import CallTimes
from treadle.runtime.store.cache import Cache
from treadle.targets.cpu import CPU_MODEL
from treadle.util.planning.planner import ESTIMATORS, Planner
from treadle.util.sizes import Budget


def sorting():
    """What sorts moves few bytes and takes long: only a measurement knows."""
    weights = [torch.randn(64, 64) for _ in range(4)]

    def loss(*values):
        *parameters, x = values
        for weight in parameters:
            x = x + torch.sort(torch.tanh(x @ weight), dim=-1).values
        return x.square().mean()

    return traced(loss, weights, [torch.randn(512, 64)])


def again_of(plan):
    """How many operations of each kind are computed again."""
    order = plan.chosen.order
    pairs = zip(order.origin, order.again, strict=True)
    names = (order.facts.nodes[i].target.__name__ for i, again in pairs if again)
    return Counter(name.partition(".")[0] for name in names)


class SortsAreSlow:
    """Times of calls as a machine might have measured them."""

    def __call__(self, node):
        return 1e-2 if "sort" in str(node.target) else 1e-6


def planned(step, estimator, times=None, share=0.4):
    method = Planner(estimator=estimator)
    return plan_memory(step, Budget(share), CPU_MODEL, by_simulation, method, times)


def test_what_was_measured_decides_where_the_roofline_is_wrong():
    roofline = again_of(planned(sorting(), "roofline"))
    measured = again_of(planned(sorting(), "measured", SortsAreSlow()))
    assert roofline["sort"] > 0
    assert measured["sort"] == 0
    assert measured["mm"] > 0


def test_a_real_measurement_finds_that_sorting_takes_long(tmp_path):
    times = OperationTimes(Cache(tmp_path), "cpu", "here")
    facts = facts_of(sorting())
    roofline, measured = (
        costs_of(facts, CPU_MODEL),
        costs_of(facts, CPU_MODEL, Planner(estimator="measured"), times),
    )
    sorts = [i for i, node in enumerate(facts.nodes) if "sort" in node.name]
    assert min(measured.again[i] / roofline.again[i] for i in sorts[:1]) > 3
    assert measured.once > roofline.once
    formulas = [i for i, kind in enumerate(facts.kinds) if kind is Kind.POINTWISE]
    assert [measured.again[i] for i in formulas] == [roofline.again[i] for i in formulas]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("make", [stack, attention, sorting])
def test_plans_keep_budgets_and_bounds_whatever_the_estimates(make, estimator):
    step, method = make(), Planner(estimator=estimator)
    plans = Plans.of(step, CPU_MODEL, by_simulation, method, SortsAreSlow())
    spread = plans.spread(6)
    seconds = [plans.points[i].seconds for i in spread]
    assert seconds == sorted(seconds)
    assert all(math.isfinite(each) and each >= 0 for each in seconds)
    for i in spread:
        assert plans.bound(i) <= plans.exact(i)
        again = plan_memory(
            make(), Budget(plans.exact(i)), CPU_MODEL, by_simulation, method, SortsAreSlow()
        )
        assert again.peak_bytes <= plans.exact(i)
        assert again.seconds <= plans.points[i].seconds


@pytest.mark.parametrize("make", [stack, attention, sorting])
def test_a_function_that_agrees_with_the_roofline_changes_nothing(make):
    for share in (0.2, 0.5, 0.9):
        ours = planned(make(), "roofline", share=share)
        theirs = planned(make(), lambda operation: operation.seconds, share=share)
        assert (theirs.peak_bytes, theirs.seconds) == (ours.peak_bytes, ours.seconds)
        assert theirs.saved == ours.saved


def test_a_function_of_the_users_decides():
    def products_are_free(operation):
        return 0.0 if operation.kind == "product" else operation.seconds

    def products_take_hours(operation):
        return 3600.0 if operation.kind == "product" else operation.seconds

    step = stack()
    free, slow = (
        planned(step, each, share=0.5) for each in (products_are_free, products_take_hours)
    )
    assert again_of(free)["mm"] >= again_of(slow)["mm"]
    assert again_of(slow)["mm"] == 0
    assert slow.seconds > 3600 > free.seconds


def test_a_function_sees_what_an_operation_is():
    seen = []
    planned(stack(), lambda operation: seen.append(operation) or operation.seconds)
    product = next(each for each in seen if each.kind == "product")
    (rows, inner), dtype = product.operands[0]
    columns = product.operands[1][0][1]
    assert dtype == "float32"
    assert product.results == (((rows, columns), "float32"),)
    assert product.flops == 2 * rows * inner * columns
    assert product.moved_bytes == 4 * (rows * inner + inner * columns + rows * columns)
    assert product.operator == "mm"
    assert product.seconds > 0


def test_formulas_are_scaled_in_their_kernels():
    facts = facts_of(stack())
    usual = costs_of(facts, CPU_MODEL)
    twice = costs_of(facts, CPU_MODEL, Planner(estimator=lambda operation: 2 * operation.seconds))
    assert 1.5 * usual.once < twice.once <= 2 * usual.once
    for i, kind in enumerate(facts.kinds):
        launch = CPU_MODEL.launch if kind in CALLS else 0.0
        if kind is not Kind.POINTWISE:
            assert twice.again[i] == pytest.approx(2 * usual.again[i] - launch)


def test_constant_estimates_count_operations():
    facts = facts_of(stack())
    costs = costs_of(facts, CPU_MODEL, Planner(estimator="constant"))
    counted = [i for i, kind in enumerate(facts.kinds) if kind not in (Kind.INPUT, Kind.VIEW)]
    assert {costs.again[i] for i in counted} == {1e-6}
    assert costs.once == pytest.approx(1e-6 * len(counted))
    plan = planned(stack(), "constant")
    assert plan.seconds == pytest.approx(costs.once + 1e-6 * sum(again_of(plan).values()))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda operation: 1 / 0, "ZeroDivisionError"),
        (lambda operation: None, "not a number"),
        (lambda operation: "1", "not a number"),
        (lambda operation: True, "not a number"),
        (lambda operation: math.nan, "not a number of seconds"),
        (lambda operation: math.inf, "not a number of seconds"),
        (lambda operation: -1.0, "not a number of seconds"),
    ],
)
def test_a_wrong_function_is_refused(function, words):
    with pytest.raises(treadle.PlanError, match=words) as refused:
        planned(stack(), function)
    assert refused.value.code == "TR-209"
    with pytest.raises(treadle.PlanError, match=words):
        fastest_plan(stack(), CPU_MODEL, Planner(estimator=function))


@pytest.mark.parametrize("given", ["fast", 3, None])
def test_an_unknown_estimator_is_refused(given):
    with pytest.raises(treadle.TreadleError) as refused:
        Planner.of(json.dumps({"estimator": given}))
    assert refused.value.code == "TR-001"


def test_nothing_is_measured_where_it_does_not_run():
    with pytest.raises(treadle.PlanError, match="cannot be measured here") as refused:
        planned(stack(), "measured")
    assert refused.value.code == "TR-211"


def test_ranks_that_meet_do_not_measure():
    """Each would measure times of its own, and plan another step."""
    times = OperationTimes(Cache(Path("unused")), "cpu", "here")
    method = Planner(estimator="measured")
    target = Target("cpu", treadle.Options(planner=method), times=times)
    assert _times(target) is times
    meeting = replace(target, communication=CommunicationModel({}))
    with pytest.raises(treadle.PlanError, match="other ranks") as refused:
        fastest_plan(stack(), CPU_MODEL, method, _times(meeting))
    assert refused.value.code == "TR-211"


def test_a_call_is_measured_once(tmp_path, monkeypatch):
    measured, real = [], CallTimes._measured
    monkeypatch.setattr(
        CallTimes, "_measured", lambda self, step: measured.append(step.op) or real(self, step)
    )
    facts, method = facts_of(attention()), Planner(estimator="measured")

    def costs(machine):
        return costs_of(facts, CPU_MODEL, method, OperationTimes(Cache(tmp_path), "cpu", machine))

    first, count = costs("here"), len(measured)
    calls = [call_of(n) for n, kind in zip(facts.nodes, facts.kinds, strict=True) if kind in CALLS]
    assert 0 < count < len(calls)  # equal ones share a measurement
    assert costs("here") == first
    assert len(measured) == count
    costs("elsewhere")
    assert len(measured) == 2 * count


def test_generators_are_as_they_were(tmp_path):
    times = OperationTimes(Cache(tmp_path), "cpu", "here")
    facts, state = facts_of(attention()), torch.get_rng_state()
    costs_of(facts, CPU_MODEL, Planner(estimator="measured"), times)
    assert torch.equal(torch.get_rng_state(), state)


@torch.library.custom_op("treadle_tests::never_on_its_own", mutates_args=())
def never_on_its_own(x: torch.Tensor) -> torch.Tensor:
    assert not bool((x == 0).all()), "called with invented data"
    CALLED.append(tuple(x.shape))
    return 2 * x


never_on_its_own.register_fake(torch.empty_like)
never_on_its_own.register_autograd(lambda context, gradient: 2 * gradient)
CALLED: list[tuple[int, ...]] = []


def test_an_operation_of_the_users_never_runs_to_be_measured(tmp_path):
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(lambda x: never_on_its_own(model(x)).square().mean(), optimizer)
    CALLED.clear()
    options = treadle.Options(cache_dir=tmp_path, planner=Planner(estimator="measured"))
    x = torch.randn(64, 32)
    treadle.plan(train, x, model=model, optimizer=optimizer, options=options)
    assert not CALLED


PROGRAM = """
import json, sys
import torch
from torch import nn
import treadle
from treadle.runtime.call_times import CallTimes

measured = []
real = CallTimes._measured
CallTimes._measured = lambda self, step: measured.append(step.op) or real(self, step)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

options = treadle.Options(cache_dir=sys.argv[1], planner=treadle.Planner(estimator="measured"))
x = torch.randn(512, 64)
found = treadle.plan(train, x, model=model, optimizer=optimizer, options=options)
step = treadle.compile(train, model=model, optimizer=optimizer, memory=0.4, options=options)
step(x)
points = [(each.peak_bytes, each.step_ms) for each in found.frontier()]
print(json.dumps([len(measured), points, step.summary().peak_predicted_bytes, step.graph()]))
"""


def test_a_second_process_makes_the_same_plan_without_measuring(tmp_path, forks):
    path = tmp_path / "program.py"  # one file: lines of the user's are in the plan's graph
    path.write_text(PROGRAM)

    def run():
        found = forks.run(path, str(tmp_path))
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout.splitlines()[-1])

    (first, *plans), (second, *again) = run(), run()
    assert first > 0
    assert second == 0
    assert again == plans


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.sort(torch.tanh(layer(x)), dim=-1).values
        return x


@pytest.mark.parametrize("estimator", [*ESTIMATORS, lambda operation: operation.seconds * 3])
def test_plan_and_compile_agree_and_train_as_eager(estimator, tmp_path):
    options = treadle.Options(cache_dir=tmp_path, planner=Planner(estimator=estimator))

    def fresh():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, training(lambda x: model(x).square().mean(), optimizer)

    x = torch.randn(512, 48)
    model, optimizer, eager = fresh()
    wanted = [float(eager(x)) for _ in range(2)]
    model, optimizer, train = fresh()
    found = treadle.plan(train, x, model=model, optimizer=optimizer, memory=0.4, options=options)
    assert found == treadle.plan(
        train, x, model=model, optimizer=optimizer, options=replace(options, memory=0.4)
    )
    step = treadle.compile(train, model=model, optimizer=optimizer, memory=0.4, options=options)
    assert [float(step(x)) for _ in range(2)] == pytest.approx(wanted, rel=1e-5)
    assert step.summary().peak_predicted_bytes == found.peak_bytes
    assert step.summary().from_cache is False
    assert step.measure(x).peak_bytes <= found.peak_bytes
