"""Named bans: what a plan recomputes with and without each of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import training
from passes.memory.traced_steps import attention, by_simulation, random_loss, stack, traced
from treadle.graph.core.node_info import with_info
from treadle.passes.memory.bans import banned_values
from treadle.passes.memory.choose import Plans, fastest_plan, plan_memory
from treadle.passes.memory.cost import Kind
from treadle.passes.memory.order import facts_of
from treadle.targets.cpu import CPU_MODEL
from treadle.util.planning.bans import BANS
from treadle.util.planning.planner import SOLVERS, Planner
from treadle.util.sizes import Budget


def sorting():
    def loss(*values):
        *weights, x = values
        for weight in weights:
            x = x + torch.sort(torch.tanh(x @ weight), dim=-1).values
        return x.square().mean()

    return traced(loss, [torch.randn(64, 64) for _ in range(4)], [torch.randn(512, 64)])


def chains():
    """Ten formulas between two products, none of which needs a value of its own later."""

    def loss(*values):
        *weights, x = values
        for weight in weights:
            x = x @ weight
            for _ in range(3):
                x = torch.sin(torch.tanh(x) * 0.5)
        return x.square().mean()

    return traced(loss, [torch.randn(48, 48) for _ in range(3)], [torch.randn(256, 48)])


def pooling():
    """Sums of eight, which are computed again from what is kept anyway."""

    def loss(*values):
        *weights, x = values
        for weight in weights:
            h = torch.tanh(x @ weight)
            x = h + torch.sin(h.view(256, 6, 8).sum(-1)).repeat_interleave(8, -1)
        return x.square().mean()

    return traced(loss, [torch.randn(48, 48) for _ in range(3)], [torch.randn(256, 48)])


CASES = {
    "compute-intensive": (stack, "compute-intensive"),
    "library-calls": (sorting, "library-calls"),
    "small-reductions": (pooling, "small-reductions"),
    "materialised": (attention, "materialised"),
    "used-far-apart": (attention, "used-far-apart"),
    "long-chains": (chains, "long-chains=2"),
    "far-from-backward": (attention, "far-from-backward=1"),
}


def again(candidate):
    """Positions that a plan computes again."""
    order = candidate.order
    return {i for i, second in zip(order.origin, order.again, strict=True) if second}


def frontier(step, *bans, solver="cut"):
    plans = Plans.of(step, CPU_MODEL, by_simulation, Planner(solver=solver, bans=bans))
    return plans, [plans.points[i] for i in range(1, len(plans.points))]


def test_each_ban_has_a_case():
    assert set(CASES) == set(BANS)


@pytest.mark.parametrize("name", CASES)
def test_a_ban_is_off_until_it_is_named(name):
    make, ban = CASES[name]
    _, free = frontier(make())
    broken = [p for p in free if again(p) & set(banned_values(p.order.facts, (ban,)))]
    assert broken, "no plan recomputes what the ban is about"
    plans, kept = frontier(make(), ban)
    for point in kept:
        assert not again(point) & set(banned_values(point.order.facts, (ban,)))
    assert min(p.predicted_peak for p in kept) >= min(p.predicted_peak for p in free)
    for i in plans.spread(4):
        assert plans.bound(i) <= plans.exact(i)


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_a_plan_names_the_ban_that_kept_a_value(name):
    make, ban = CASES[name]

    def reasons(*bans):
        method = Planner(bans=bans)
        plan = plan_memory(make(), Budget(0.0), CPU_MODEL, by_simulation, method)
        return [row.why for row in plan.table if row.decision == "save"], plan.rows()

    without, _ = reasons()
    with_ban, rows = reasons(ban)
    assert not [why for why in without if why.startswith("ban ")]
    assert [why for why in with_ban if why.startswith(f"ban {ban}: ")]
    assert any(f"ban {ban}: " in row for row in rows)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", [3, 11, 20])
def test_no_plan_of_any_solver_breaks_one(solver, seed):
    def make():
        return traced(random_loss(seed, 14), [torch.randn(16, 16)], [torch.randn(40, 16)])

    bans = ("compute-intensive", "small-reductions", "long-chains=2")
    _, points = frontier(make(), *bans, solver=solver)
    for point in points:
        assert not again(point) & set(banned_values(point.order.facts, bans))


def test_bans_hold_without_a_budget():
    step = attention()
    plan = fastest_plan(step, CPU_MODEL, Planner(bans=("small-reductions",)))
    facts = plan.chosen.order.facts
    assert not again(plan.chosen) & set(banned_values(facts, ("small-reductions",)))
    products = {i for i, kind in enumerate(facts.kinds) if kind is Kind.PRODUCT}
    assert not again(plan.chosen) & products


def marked(step, asked, every):
    """Every so many-th product marked."""
    facts = facts_of(step)
    products = [i for i, kind in enumerate(facts.kinds) if kind is Kind.PRODUCT]
    chosen = [i for i in products if facts.phases[i] == 0][::every]
    for i in chosen:
        with_info(facts.nodes[i], asked=asked)
    return step, {facts.nodes[i].name for i in chosen}


def test_a_mark_is_stronger_than_a_ban():
    step, names = marked(stack(), "must_recompute", 2)
    _, points = frontier(step, "compute-intensive")
    facts = points[-1].order.facts
    repeated = {facts.nodes[i].name for i in again(points[-1])}
    assert names & repeated
    products = {facts.nodes[i].name for i, kind in enumerate(facts.kinds) if kind is Kind.PRODUCT}
    assert products & repeated <= names


def test_no_plan_repeats_what_is_marked_must_save():
    """Neither a cut nor a mixture of two, nor what the search drops."""
    step, names = marked(stack(), "must_save", 2)
    _, points = frontier(step)
    for point in points:
        assert not names & {point.order.facts.nodes[i].name for i in again(point)}


def test_long_chains_counts_formulas_in_a_row():
    facts = facts_of(chains())
    found = banned_values(facts, ("long-chains=3",))
    names = [facts.nodes[i].name for i in sorted(found) if i < facts.head]
    assert names == [f"sin{n}" for n in ("", *(f"_{k}" for k in range(1, 6)))]  # tanh, mul, sin
    assert not banned_values(facts, ("long-chains=1000",))


@pytest.mark.parametrize(
    "given", ["everything", "long-chains=0", "long-chains=x", "materialised=3", 3, [3], None]
)
def test_an_unknown_ban_is_refused(given):
    with pytest.raises(treadle.TreadleError) as refused:
        Planner(bans=given)
    assert refused.value.code == "TR-001"
    assert "long-chains=100" in refused.value.remedy


def test_bans_are_read_from_text():
    method = Planner(bans="library-calls")
    assert method.bans == ("library-calls",)
    assert Planner.of(method.text) == method
    assert Planner.of('{"bans": ["long-chains=7", "materialised"]}').bans == (
        "long-chains=7",
        "materialised",
    )


def test_explain_says_which_ban_kept_a_value(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(lambda x: F.softmax(model(x), -1).square().mean(), optimizer)
    x = torch.randn(512, 48)
    peaks = []
    for bans in ((), ("compute-intensive",)):
        options = treadle.Options(cache_dir=tmp_path, planner=Planner(bans=bans))
        step = treadle.compile(train, model=model, optimizer=optimizer, memory=0.0, options=options)
        step(x)
        assert ("ban compute-intensive: a product" in step.explain()) == bool(bans)
        assert step.measure(x).peak_bytes <= step.summary().peak_predicted_bytes
        peaks.append(step.summary().peak_predicted_bytes)
    assert peaks[0] < peaks[1]
