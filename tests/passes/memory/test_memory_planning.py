"""Memory planning: the simulator, the cut, second computations, the search and its promises."""

import itertools
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

from passes.memory.traced_steps import (
    by_simulation,
    perceptron,
    random_loss,
    simulate,
    traced,
    transformer,
)
from testing import trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, set_value, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.custom_ops.grouped import grouped_mm
from treadle.graph.text.printing import show
from treadle.passes.memory.bound import StepBound
from treadle.passes.memory.choose import Plans, Version, fastest_plan, plan_memory
from treadle.passes.memory.classify import classify, must_save
from treadle.passes.memory.cost import Kind, flops_of, kind_of
from treadle.passes.memory.cut import Edges, cheapest_cut, minimum_cut
from treadle.passes.memory.fused import stored_anyway
from treadle.passes.memory.masks import with_byte_masks
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.rematerialise import build, recompute, rematerialise
from treadle.passes.memory.reorder import update_early
from treadle.passes.memory.search import Candidate, _Planner, candidates, convex
from treadle.passes.memory.simulate import timeline
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.targets.registry import model_for
from treadle.util.errors import PlanError, VerifyError
from treadle.util.sizes import Budget, parse_bytes

INFINITE = float("inf")


@pytest.fixture(scope="module")
def blocks() -> tuple[StepGraph, list[torch.Tensor]]:
    loss, parameters, batch = transformer(layers=3, width=24, heads=2, batch=2, length=20)
    return traced(loss, parameters, batch, clip=True), [*parameters, *batch]


@pytest.fixture(scope="module")
def stack() -> tuple[StepGraph, list[torch.Tensor]]:
    loss, parameters, batch = perceptron()
    return traced(loss, parameters, batch, clip=True), [*parameters, *batch]


def node_of(step: StepGraph, name: str) -> fx.Node:
    (found,) = [node for node in step.graph.nodes if node.name == name]
    return found


def outputs(step: StepGraph, inputs, seed: int = 3):
    torch.manual_seed(seed)
    return run_step(step, inputs)


def assert_same(step: StepGraph, other: StepGraph, inputs) -> None:
    for left, right in zip(outputs(step, inputs), outputs(other, inputs), strict=True):
        assert torch.equal(left, right)


# -- costs -------------------------------------------------------------------------------------


def test_kinds_flops_and_devices(blocks):
    step, _ = blocks
    kinds = {str(node.target): kind_of(node) for node in step.graph.nodes if node.op != "output"}
    assert kinds["aten.mm.default"] is Kind.PRODUCT
    assert kinds["aten.bernoulli.p"] is Kind.RANDOM
    assert kinds["aten._softmax.default"] is Kind.REDUCTION
    assert kinds["aten.gelu.default"] is Kind.POINTWISE
    assert kinds["aten.view.default"] is Kind.VIEW
    product = next(node for node in step.graph.nodes if kind_of(node) is Kind.PRODUCT)
    assert flops_of(product) == 2 * 2 * 20 * 24 * 72
    assert model_for("cuda:1") is H200
    with pytest.raises(PlanError, match="abacus"):
        model_for("abacus")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_costs_its_products_on_every_device(dtype):
    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).float().sum()

    step = traced(loss, [torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3)], [])
    calls = [n for n in step.graph.nodes if "attention" in str(n.target)]
    assert [kind_of(each) for each in calls] == [Kind.PRODUCT] * 2
    assert [flops_of(each) for each in calls] == [2 * 6 * 5 * 5 * 2 * 8, 2 * 6 * 5 * 5 * 5 * 8]


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((12, 8), (3, 8, 16), 2 * 12 * 8 * 16),
        ((8, 12), (12, 16), 2 * 8 * 12 * 16),
        ((3, 4, 8), (3, 8, 16), 2 * 3 * 4 * 8 * 16),
        ((3, 4, 8), (8, 24), 2 * 4 * 8 * 24),
    ],
    ids=["rows in groups", "sums in groups", "all in groups", "columns in groups"],
)
def test_products_in_groups_cost_what_each_does(left, right, flops):
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for node, shape in ((a, left), (b, right)):
        set_value(node, torch.empty(shape, device="meta"))
    assert flops_of(graph.call_function(grouped_mm, (a, b, None))) == flops


# -- simulator -----------------------------------------------------------------------------------


def test_peak_of_a_step_counted_by_hand():
    step = traced(
        lambda w, x: (x @ w).relu().sum(), [torch.randn(8, 8)], [torch.randn(16, 8)], lr=0.5
    )
    product, row = 16 * 8 * 4, 8 * 8 * 4
    assert (
        simulate(step).peak_bytes <= row + product + 3 * product + 8
    )  # inputs, then three of a size


def test_views_are_counted_once(stack):
    step, _ = stack
    names = [name for _, name in simulate(step).at_peak]
    assert len(names) == len(set(names))
    assert not any(name.startswith(("t", "view")) for name in names)


# -- cut -----------------------------------------------------------------------------------------


def brute_force(edges: Edges, count: int) -> float:
    """The capacity of the best of all cuts."""
    best = INFINITE
    for bits in itertools.product((False, True), repeat=count - 2):
        sink = (False, True, *bits)
        arcs = zip(edges.tail, edges.head, edges.capacity, strict=True)
        best = min(best, sum(c for a, b, c in arcs if not sink[a] and sink[b]))
    return best


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(3, 9))
def test_the_cut_is_minimal_on_random_networks(seed, count):
    draw = random.Random(seed)
    edges = Edges([], [], [])
    for tail, head in itertools.permutations(range(count), 2):
        if head != 0 and tail != 1 and draw.random() < 0.5:
            endless = tail != 0 and draw.random() < 0.2
            edges.add(tail, head, INFINITE if endless else float(draw.randint(1, 9)))
    best = brute_force(edges, count)
    if best == INFINITE:
        with pytest.raises(VerifyError):
            minimum_cut(edges, count)
        return
    sink = minimum_cut(edges, count)
    arcs = zip(edges.tail, edges.head, edges.capacity, strict=True)
    assert sum(c for a, b, c in arcs if not sink[a] and sink[b]) == best


def test_capacities_beyond_32_bits_are_scaled():
    edges = Edges([0, 2, 0, 3], [2, 1, 3, 1], [2.0**45, 2.0**44, 2.0**43, 2.0**45])
    assert list(minimum_cut(edges, 4)) == [False, True, False, True]


def test_the_cut_never_gives_up_random_numbers_and_prices_the_rest(blocks):
    step, _ = blocks
    facts = facts_of(with_byte_masks(step))
    claims = classify(facts)
    dear = cheapest_cut(facts, claims, [1e12] * len(facts.nodes), products=True)
    cheap = cheapest_cut(facts, claims, [1e-3] * len(facts.nodes), products=True)
    size = [sum(facts.held_bytes(i) for i in saved) for saved in (dear, cheap)]
    assert size[1] < size[0] / 4
    large = [i for i in cheap if facts.held_bytes(i) > 4]  # all but single numbers
    assert {facts.nodes[i].meta["val"].dtype for i in large} == {torch.bool}
    reason = {must_save(facts, i, products=False) for i in claims.candidates}
    assert "random: drawn once" in reason
    assert "products are kept at this budget" in reason


def test_a_cut_of_thousands_of_nodes_is_fast():
    loss, parameters, batch = perceptron(layers=2, width=4, rows=4)

    def long(*inputs):
        x = loss(*inputs) + inputs[-1]
        for _ in range(1250):
            x = x.sin() * x
        return x.sum()

    step = traced(long, parameters, batch)
    facts = facts_of(step)
    claims = classify(facts)
    assert len(facts.nodes) > 7_000
    began = time.perf_counter()
    cheapest_cut(facts, claims, [5.0] * len(facts.nodes))
    assert time.perf_counter() - began < 1.5


# -- second computations -------------------------------------------------------------------------


def test_recomputing_everything_changes_no_bit(blocks):
    step, inputs = blocks
    again = rematerialise(step, set())
    assert_same(step, again, inputs)
    copies = [node for node in again.graph.nodes if info(node).recomputed]
    assert copies
    assert {info(node).phase for node in copies} == {"backward"}
    assert not any(kind_of(node) is Kind.RANDOM for node in copies)


def test_keeping_everything_adds_nothing(blocks):
    step, inputs = blocks
    facts = facts_of(step)
    again = rematerialise(step, {facts.nodes[i] for i in classify(facts).needed})
    assert not any(info(node).recomputed for node in again.graph.nodes)
    assert_same(step, again, inputs)


def test_second_computations_stand_before_their_first_reader(stack):
    step, _ = stack
    facts = facts_of(step)
    order = recompute(facts, set())
    first = order.again.index(True)
    assert 1 in {facts.phases[i] for i in order.origin[:first]}  # backward has begun
    run: set[int] = set()
    for k, again in enumerate(order.again):
        if again:
            run.add(k)
        elif run:
            assert run & set(order.operands[k])  # the reader comes at once
            run = set()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_set_of_kept_values_is_right(blocks_small, seed):
    step, inputs = blocks_small
    facts = facts_of(step)
    draw = random.Random(seed)
    saved = {i for i in classify(facts).candidates if draw.random() < 0.4}
    again = rematerialise(step, {facts.nodes[i] for i in saved})
    assert_same(step, again, inputs)


@pytest.fixture(scope="module")
def blocks_small():
    loss, parameters, batch = transformer(layers=1, width=8, heads=2, batch=1, length=5)
    return traced(loss, parameters, batch), [*parameters, *batch]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_graphs_at_every_candidate(seed):
    inputs = [torch.randn(6, 6), torch.randn(7, 6)]
    step = traced(random_loss(seed, 12), inputs[:1], inputs[1:])
    for each in [*candidates(step, CPU_MODEL)][::3]:
        assert_same(step, each.step, inputs)


def test_dropped_elements_have_no_gradient_at_any_candidate():
    def loss(x, y):
        return (F.dropout(x.tanh() * 2, 0.25) * y).exp().mean()

    inputs = [torch.randn(64, 33), torch.rand(64, 33) + 0.1]
    step = traced(loss, inputs[:1], inputs[1:], lr=1.0)
    torch.manual_seed(11)
    dropped = torch.bernoulli(torch.empty(64, 33), 0.75) == 0
    plans = list(candidates(step, CPU_MODEL))
    for each in plans:
        _, new = outputs(each.step, inputs, seed=11)
        assert torch.equal((inputs[0] - new) == 0, dropped)


# -- order ---------------------------------------------------------------------------------------


def test_updates_follow_their_gradients():
    loss, parameters, batch = perceptron(layers=6, width=64, rows=8)
    step = traced(loss, parameters, batch)
    order = as_traced(facts_of(step))
    early = update_early(order)
    assert sorted(early.origin) == sorted(order.origin)
    assert timeline(early).peak_bytes < 0.8 * timeline(order).peak_bytes
    phases = [order.facts.phases[i] for i in early.origin]
    assert phases.index(2) < len(phases) - 1 - phases[::-1].index(1)


def test_updates_that_read_inputs_alone_come_after_all_inputs():
    inputs = torch.ones(2), torch.ones(2)
    step = trace(lambda count, x: (x * 2, count + 1), *inputs, writes={1: 0})
    with_info(node_of(step, "add"), phase="optimizer")
    early = build(update_early(as_traced(facts_of(step))))  # verifies
    assert_same(early, step, inputs)


def test_a_global_clip_holds_updates_back(stack):
    step, _ = stack
    order = as_traced(facts_of(step))
    phases = [order.facts.phases[i] for i in update_early(order).origin]
    squares = [i for i, phase in enumerate(phases) if phase == 2]
    assert timeline(update_early(order)).peak_bytes <= timeline(order).peak_bytes
    assert squares


# -- search --------------------------------------------------------------------------------------


def test_the_frontier_goes_down_and_every_point_is_right(blocks):
    step, inputs = blocks
    points = list(candidates(step, CPU_MODEL))
    assert len(points) > 5
    for fast, small in itertools.pairwise(points):
        assert small.seconds >= fast.seconds
        assert small.predicted_peak < fast.predicted_peak
    assert points[-1].predicted_peak < 0.6 * simulate(step).peak_bytes
    for each in points[:: max(1, len(points) // 4)]:
        assert simulate(each.step).peak_bytes == each.predicted_peak
        assert_same(step, each.step, inputs)


def test_mixtures_are_made_of_plans_that_no_mixture_beats():
    def point(seconds: float, peak: int) -> Candidate:
        return Candidate(1.0, None, frozenset(), peak, seconds)  # no order is asked for

    straight = [point(1, 100), point(2, 60), point(4, 40)]
    above = [point(1.5, 95), point(3, 55), point(3.9, 50)]
    found = sorted(straight + above, key=lambda each: each.seconds)
    assert convex(found) == straight
    assert convex(found[:1]) == found[:1]
    assert convex([]) == []


def test_plans_keep_their_budget_and_a_smaller_budget_never_has_a_larger_peak(blocks):
    step, inputs = blocks
    calls = 0

    def evaluator(candidate: StepGraph) -> int:
        nonlocal calls
        calls += 1
        return by_simulation(candidate)

    peaks = []
    for ratio in (0.0, 0.4, 0.7, 1.0):
        calls = 0
        plan = plan_memory(step, Budget(ratio), CPU_MODEL, evaluator)
        assert calls <= 7
        peaks.append(plan.peak_bytes)
        exact = plan_memory(step, Budget(plan.peak_bytes), CPU_MODEL, evaluator)
        assert exact.peak_bytes <= plan.peak_bytes
        assert_same(step, exact.step, inputs)
    assert peaks == sorted(peaks)
    assert peaks[-1] == by_simulation(fastest_plan(step, CPU_MODEL).step)
    assert peaks[-1] < by_simulation(step)  # what fusion gets for nothing is not kept
    assert len(set(peaks)) == 4


def rough(points: list[Candidate], seed: int, share: float):
    """An evaluator that misses each simulated peak by up to a share of the largest."""
    dice = random.Random(seed)
    missed = [int(dice.uniform(-share, share) * points[0].predicted_peak) for _ in points]

    def evaluator(candidate: StepGraph) -> int:
        (i,) = [k for k, point in enumerate(points) if point.step is candidate]
        return points[i].predicted_peak + missed[i]

    return evaluator


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_larger_budget_is_never_slower_and_a_smaller_one_never_larger(stack, seed, share):
    step, _ = stack
    points = list(candidates(step, CPU_MODEL))
    evaluator = rough(points, seed, share)
    always = frozenset(range(len(points) - 4, len(points)))
    versions = [Version(step)] * len(points)

    def asked(budget: int) -> tuple[int | None, int]:
        last = len(points) - 1
        # nothing is evaluated yet
        plans = Plans(points, last, always, versions, evaluator, StepBound(()))
        chosen = plans.within(budget)
        return chosen, 0 if chosen is None else plans.exact(chosen)

    peaks = sorted(evaluator(point.step) for point in points)
    budgets = sorted({*peaks, *(peak - 1 for peak in peaks), *(peak + 999 for peak in peaks)})
    found = [asked(budget) for budget in budgets]
    chosen = [each for each in found if each[0] is not None]
    assert [each[0] for each in found].index(chosen[0][0]) == len(found) - len(chosen)
    for (small, small_peak), (large, large_peak) in itertools.pairwise(chosen):
        assert small >= large
        assert small_peak <= large_peak
    for i, peak in chosen:
        assert asked(peak) == (i, peak)  # what is printed is what is given
    if share < 0.03:  # then all are admissible
        for budget, (i, _) in zip(budgets, found, strict=True):
            fits = [k for k, point in enumerate(points) if evaluator(point.step) <= budget]
            assert i == (fits[0] if fits else None)


def test_the_frontier_is_what_budgets_choose(stack):
    step, _ = stack
    plans = Plans.of(step, CPU_MODEL, by_simulation)
    shown = plans.spread(6)
    assert shown[0] == 0
    assert plans.exact(shown[-1]) == min(plans.exact(i) for i in plans.always)
    assert [plans.within(plans.exact(i)) for i in shown] == list(shown)


def test_budgets_are_used_where_versions_are_missed_by_different_bytes(stack):
    """What the simulator misses of chunked logits is not what it misses of whole ones."""
    step, _ = stack
    points = list(candidates(step, CPU_MODEL))
    whole, chunked, small = Version(step), Version(step), Version(step)
    versions = [whole] * 3 + [chunked] * (len(points) - 4) + [small]
    missed = {id(whole): 60_000, id(chunked): 20_000, id(small): 0}

    def evaluator(candidate: StepGraph) -> int:
        (i,) = [k for k, point in enumerate(points) if point.step is candidate]
        return points[i].predicted_peak + missed[id(versions[i])]

    last = len(points) - 1
    for i in range(1, last):
        plans = Plans(points, last, frozenset([last]), versions, evaluator, StepBound(()))
        chosen = plans.within(evaluator(points[i].step))
        assert chosen is not None
        assert chosen <= i
        assert plans.exact(chosen) <= evaluator(points[i].step)


def test_the_ends_of_a_version_that_was_simulated_to_be_worse_are_plans_too(stack):
    """No budget that the plan without one meets is refused, whatever the simulator said of it."""
    step, _ = stack
    plans = Plans.of([Version(step), Version(step)], CPU_MODEL, by_simulation)
    (beside,) = {i for i in plans.always if plans.versions[i] is plans.versions[-1]} - {plans.last}
    assert beside > 0
    assert len({id(version) for version in plans.versions}) == 2
    assert {0, plans.last} <= plans.always


def test_an_impossible_budget_names_the_smallest_possible(stack):
    step, _ = stack
    smallest = plan_memory(step, Budget(0.0), CPU_MODEL, by_simulation).peak_bytes
    with pytest.raises(PlanError, match=r"Most of it:\n.* of inputs and state") as caught:
        plan_memory(step, Budget(smallest - 1), CPU_MODEL, by_simulation)
    assert caught.value.code == "TR-202"
    _, named, _ = caught.value.remedy.split('"')
    assert smallest <= parse_bytes(named) <= 1.01 * smallest
    assert plan_memory(step, Budget(smallest), CPU_MODEL, by_simulation).peak_bytes == smallest


def test_plans_are_deterministic(blocks):
    step, _ = blocks
    first, second = (plan_memory(step, Budget(0.4), CPU_MODEL, by_simulation) for _ in range(2))
    assert show(first.step) == show(second.step)
    assert first.rows() == second.rows()


def test_rows_say_what_became_of_each_activation(blocks):
    step, _ = blocks
    plan = plan_memory(step, Budget(0.2), CPU_MODEL, by_simulation)
    rows = plan.rows()
    assert len(rows) < len(plan.table)  # equal layers are one row
    assert {each.decision for each in plan.table} == {"save", "recompute"}
    assert any("random: drawn once" in row for row in rows)


def test_a_step_without_backward_is_left_alone():
    step = traced(lambda w: w.square().sum(), [torch.randn(3)], [])
    points = list(candidates(step, CPU_MODEL))
    assert points[0].step.graph is not step.graph
    plan = plan_memory(step, Budget(1.0), CPU_MODEL, by_simulation)
    assert plan.peak_bytes == by_simulation(step)


def test_a_chain_between_products_is_computed_again_and_a_residual_is_kept():
    """``h = x @ w; a = f(h); y = a @ v + x``: f's steps are free in the kernel that wants them;
    what a product or a later stage has stored anyway is not."""

    def loss(w, v, x):
        hidden = x @ w
        kept = torch.sin(hidden * hidden) * hidden  # several values, none read by a call but one
        stream = kept @ v + x
        return ((stream @ w) * stream).sum()

    parameters, batch = [torch.randn(32, 32) for _ in range(2)], [torch.randn(32, 32)]
    step = traced(loss, parameters, batch)
    plan = fastest_plan(step, H200)
    decided = {row.operation: row.decision for row in plan.table}
    assert decided["sin"] == "recompute"
    assert decided["add.Tensor"] == "save"
    assert decided["mm"] == "save"
    assert_same(step, plan.step, [*parameters, *batch])


def test_stages_count_the_calls_on_the_way():
    def loss(w, x):
        early = x.sin()
        late = (early @ w).cos()
        return ((late + early) * x.exp()).sum()

    step = traced(loss, [torch.randn(8, 8)], [torch.randn(8, 8)])
    facts = facts_of(step)
    stored = dict(zip(map(str, facts.nodes), stored_anyway(facts), strict=True))
    assert stored["sin"]  # for the product, and for the sum after it
    assert stored["mm"]
    assert stored["exp"]  # at a later stage than its own
    assert not stored["cos"]
    assert not stored["add"]


def test_what_is_kept_when_everything_is_kept_is_named_as_it_was_traced():
    """Masks as bytes are other nodes: positions there are not those of the plan without them."""

    def loss(w, x):
        hidden = F.dropout((x @ w).tanh(), 0.3)
        return (F.dropout(hidden @ w, 0.3).exp() * x).mean()

    step = traced(loss, [torch.randn(6, 6)], [torch.randn(6, 6)])
    first = _Planner(step, CPU_MODEL).keep_all()
    facts = first.order.facts
    assert {facts.nodes[i] for i in first.saved} == {facts.nodes[i] for i in classify(facts).needed}
    assert with_byte_masks(step) is not step
    assert len(first.step.graph.nodes) == len(step.graph.nodes)
    assert 0 < first.seconds < 1


def test_a_product_is_added_to_a_sum_in_its_bytes():
    def program(w, x, y, z):
        total = torch.mm(x.t(), x)
        total = torch.addmm(total, y.t(), y)
        total = torch.addmm(total, z.t(), z)
        return w - total

    w, *rows = torch.randn(64, 64), *(torch.randn(2, 64) for _ in range(3))
    step = trace(program, w, *rows)
    inputs = 4 * (64 * 64 + 3 * 2 * 64)
    assert timeline(as_traced(facts_of(step))).peak_bytes == inputs + 2 * 4 * 64 * 64

    def kept(w, x, y, z):
        first = torch.mm(x.t(), x)
        total = torch.addmm(first, y.t(), y)
        total = torch.addmm(total, z.t(), z)
        return w - total, first

    step = trace(kept, w, *rows)
    assert timeline(as_traced(facts_of(step))).peak_bytes == inputs + 3 * 4 * 64 * 64
