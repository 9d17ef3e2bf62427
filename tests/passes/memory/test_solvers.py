"""Alternatives to the minimum cut: as good as they say, within the budget or refused."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import training
from passes.memory.traced_steps import perceptron, random_loss, simulate, traced, transformer
from treadle.passes.memory.choose import Plans, plan_memory
from treadle.passes.memory.classify import classify
from treadle.passes.memory.fused import recompute_costs
from treadle.passes.memory.order import facts_of
from treadle.passes.memory.search import candidates
from treadle.passes.memory.solvers.knapsack import by_dynamic_program, by_greedy, dynamic, greedy
from treadle.passes.memory.solvers.problem import SaveProblem, SaveProblemOf
from treadle.passes.memory.solvers.program import by_integer_program
from treadle.targets.cpu import CPU_MODEL
from treadle.util.planning.planner import SOLVERS, Planner
from treadle.util.sizes import Budget

ITEMS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), max_size=9)


def subsets(things):
    return itertools.chain.from_iterable(
        itertools.combinations(things, n) for n in range(len(things) + 1)
    )


def best_value(sizes, values, capacity):
    fits = (s for s in subsets(range(len(sizes))) if sum(sizes[i] for i in s) <= capacity)
    return max(sum(values[i] for i in s) for s in fits)


@settings(max_examples=150, deadline=None)
@given(items=ITEMS, capacity=st.integers(0, 200))
def test_knapsacks_agree_with_every_subset(items, capacity):
    sizes, values = [size for size, _ in items], [float(value) for _, value in items]
    best = best_value(sizes, values, capacity)
    for solve, least in ((greedy, best / 2), (dynamic, best)):
        taken = solve(sizes, values, capacity)
        assert sum(sizes[i] for i in taken) <= capacity
        assert sum(values[i] for i in taken) >= least


@settings(max_examples=100, deadline=None)
@given(items=ITEMS, capacity=st.integers(0, 200), buckets=st.integers(3, 20))
def test_coarse_sizes_never_exceed_the_capacity(items, capacity, buckets):
    """And give what the docstring says."""
    sizes, values = [size for size, _ in items], [float(value) for _, value in items]
    taken = dynamic(sizes, values, capacity, buckets)
    assert sum(sizes[i] for i in taken) <= capacity
    smaller = capacity - len(items) * -(-capacity // buckets)
    if smaller >= 0:
        assert sum(values[i] for i in taken) >= best_value(sizes, values, smaller)


def test_many_items_take_little_memory():
    """30,000 of odd sizes: the sizes are not rounded to nothing, and the capacity holds."""
    draw = random.Random(3)
    sizes = [draw.randrange(1, 10**6) for _ in range(30_000)]
    values = [draw.random() * size for size in sizes]
    capacity = sum(sizes) // 2
    taken = dynamic(sizes, values, capacity)
    used = sum(sizes[i] for i in taken)
    assert 0.4 * capacity < used <= capacity


def random_problem(draw: random.Random, count: int) -> SaveProblem:
    operands = tuple(
        tuple(sorted(draw.sample(range(i), min(i, draw.randint(0, 2))))) for i in range(count)
    )
    sizes = tuple(None if draw.random() < 0.15 else draw.randint(0, 9) for _ in range(count))
    once = frozenset(i for i in range(count) if sizes[i] is not None and draw.random() < 0.1)
    needed = frozenset(i for i in range(count) if draw.random() < 0.4) | {count - 1}
    seconds = tuple(float(draw.randint(0, 9)) for _ in range(count))
    start = frozenset(i for i in range(count) if sizes[i] is not None)
    names = tuple(f"v{i}" for i in range(count))
    return SaveProblem(names, sizes, seconds, operands, needed, once, start)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**6), capacity=st.integers(0, 40))
def test_the_integer_program_agrees_with_every_set(seed, capacity):
    problem = random_problem(random.Random(seed), 9)
    allowed = [
        kept
        for kept in subsets(range(9))
        if problem.allows(kept) and problem.kept_bytes(kept) <= capacity
    ]
    found = by_integer_program(problem, capacity)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert problem.allows(found)
    assert problem.kept_bytes(found) <= capacity
    best = min(map(problem.recompute_seconds, allowed))
    assert problem.recompute_seconds(found) <= best * (1 + 1e-3) + 1e-9


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), capacity=st.integers(0, 60))
def test_what_a_knapsack_keeps_is_allowed(seed, capacity):
    problem = random_problem(random.Random(seed), 12)
    for solve in (by_greedy, by_dynamic_program):
        assert problem.allows(solve(problem, capacity))


def test_without_dependencies_all_agree():
    sizes, seconds = (5, 4, 3, 7, 2), (10.0, 8.0, 3.0, 14.0, 1.0)
    everything = frozenset(range(5))
    names, operands = tuple("abcde"), ((),) * 5
    problem = SaveProblem(
        names, sizes, seconds, operands, everything, frozenset(), start=everything
    )
    for capacity in range(22):
        exact = problem.recompute_seconds(by_dynamic_program(problem, capacity))
        assert exact == sum(seconds) - best_value(sizes, seconds, capacity)
        integer = by_integer_program(problem, capacity)
        assert problem.recompute_seconds(integer) == pytest.approx(exact)


def by_simulation(step):
    return simulate(step).peak_bytes


STEPS = {
    "stack": lambda: traced(*perceptron(layers=6, width=32, rows=256)),
    "attention": lambda: traced(*transformer(layers=3, width=32, heads=2, batch=2, length=24)),
    "random": lambda: traced(random_loss(11, 14), [torch.randn(16, 16)], [torch.randn(40, 16)]),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", STEPS)
def test_a_plan_is_within_its_budget_or_refused(name, solver):
    """Monotone, and never slower for more memory."""
    step, method = STEPS[name](), Planner(solver)
    fastest = by_simulation(step)
    plans, codes = [], []
    for share in range(2, 13):
        budget = Budget(fastest * share // 11)
        try:
            plan = plan_memory(step, budget, CPU_MODEL, by_simulation, method)
        except treadle.PlanError as refused:
            codes.append(refused.code)
            continue
        assert plan.peak_bytes == by_simulation(plan.step) <= budget.nbytes
        plans.append(plan)
    assert len(plans) + len(codes) == 11
    assert plans
    assert set(codes) <= {"TR-202"}
    assert [plan.seconds for plan in plans] == sorted((p.seconds for p in plans), reverse=True)
    assert [plan.peak_bytes for plan in plans] == sorted(plan.peak_bytes for plan in plans)


@pytest.mark.parametrize("solver", SOLVERS)
def test_plans_are_above_the_bound_and_save_memory(solver):
    step = STEPS["attention"]()
    points = list(candidates(step, CPU_MODEL, Planner(solver)))
    assert points[-1].predicted_peak < 0.7 * points[0].predicted_peak
    again = list(candidates(STEPS["attention"](), CPU_MODEL, Planner(solver)))
    assert [(p.seconds, p.predicted_peak) for p in points] == [
        (p.seconds, p.predicted_peak) for p in again
    ]
    plans = Plans.of(step, CPU_MODEL, by_simulation, Planner(solver))
    for i in plans.spread(4):
        assert plans.bound(i) <= plans.exact(i)


def test_a_problem_of_a_step_says_what_recomputation_costs():
    """What a solver is told is what the simulation does."""
    facts = facts_of(STEPS["stack"]())
    claims, fused = classify(facts), recompute_costs(facts, CPU_MODEL)
    of_step = SaveProblemOf.of(facts, claims, fused, claims.needed)
    problem = of_step.problem
    assert problem.recomputed(range(len(problem.names))) == frozenset()
    again = problem.recomputed(())
    assert problem.needed <= again
    assert problem.recompute_seconds(()) == pytest.approx(sum(problem.seconds[i] for i in again))
    assert of_step.saved(problem.needed) == claims.needed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.dropout(x, 0.0)


def trained(memory, planner, folder, calls=2, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    train = training(lambda x: model(x).square().mean(), optimizer)
    x = torch.randn(512, 48)
    step = train
    if folder is not None:
        chosen = treadle.Options(cache_dir=folder, planner=planner, **options)
        step = treadle.compile(
            train, model=model, optimizer=optimizer, memory=memory, options=chosen
        )
    losses = [float(step(x)) for _ in range(calls)]
    return step, x, losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_compiled_step_trains_as_eager_and_keeps_its_promise(solver, tmp_path):
    _, _, losses, parameters = trained(None, None, None)
    step, x, found, changed = trained(0.3, solver, tmp_path)
    assert found == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(changed, parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "recompute " in step.explain()
    assert step.measure(x).peak_bytes <= step.summary().peak_predicted_bytes
    assert step.summary().planner == ("" if solver == "cut" else f"solver={solver}")
    again, *_ = trained(0.3, solver, tmp_path)
    assert again.summary().from_cache


def test_a_solver_of_the_users(tmp_path):
    """It sees a problem; its plans are evaluated like any other; nothing of it is cached."""
    asked = []

    def all_or_nothing(problem, capacity):
        asked.append((len(problem.names), capacity))
        return problem.start if capacity > 10**6 else [i for i in problem.start if i % 2]

    step, *_ = trained(0.5, treadle.Planner(solver=all_or_nothing), tmp_path)
    assert asked
    assert not step.summary().from_cache
    assert "planned with solver=all_or_nothing" in step.explain()
    again, *_ = trained(0.5, treadle.Planner(solver=all_or_nothing), tmp_path)
    assert not again.summary().from_cache
    with pytest.raises(treadle.TreadleError, match="cannot be saved") as refused:
        again.save(tmp_path / "step")
    assert refused.value.code == "TR-001"


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (lambda problem, capacity: [len(problem.names)], "is not a number of a value"),
        (lambda problem, capacity: ["gelu"], "is not a number of a value"),
        (lambda problem, capacity: [True], "is not a number of a value"),
        (lambda problem, capacity: 1 / 0, "ZeroDivisionError"),
        (lambda problem, capacity: None, "TypeError"),
        (lambda problem, capacity: [problem.sizes.index(None)], "cannot be kept"),
    ],
)
def test_a_wrong_solver_is_refused(solver, words, tmp_path):
    with pytest.raises(treadle.PlanError, match=words) as refused:
        trained(0.5, treadle.Planner(solver=solver), tmp_path)
    assert refused.value.code == "TR-205"


@pytest.mark.parametrize("given", ["best", 3, "{", '{"solvers": "greedy"}', "[1]", '["greedy"]'])
def test_an_unknown_planner_is_refused(given):
    with pytest.raises(treadle.TreadleError) as refused:
        treadle.Options(planner=given)
    assert refused.value.code == "TR-001"


def test_a_planner_is_read_from_the_environment(monkeypatch):
    from treadle.options import from_environment

    assert from_environment().planner == Planner()
    monkeypatch.setenv("TREADLE_PLANNER", "greedy")
    assert from_environment().planner == Planner("greedy")
    text = Planner("integer").text
    assert json.loads(text)["solver"] == "integer"
    monkeypatch.setenv("TREADLE_PLANNER", text)
    assert from_environment().planner == Planner("integer")


def test_plan_uses_the_planner_of_the_environment(monkeypatch):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train = training(lambda x: model(x).square().mean(), optimizer)
    found = {}
    for solver in ("cut", "greedy"):
        monkeypatch.setenv("TREADLE_PLANNER", solver)
        plan = treadle.plan(train, torch.randn(512, 48), model=model, optimizer=optimizer)
        found[solver] = [(point.peak_bytes, point.step_ms) for point in plan.frontier()]
    assert found["cut"] != found["greedy"]
