"""A memory plan as passes: the text after, the numbers, and that they make what was evaluated."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.memory.traced_steps import by_simulation, perceptron, traced, transformer
from testing import check_numbers, check_pass, refusal, show_plain, trace
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import GraphPass, run_passes
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions
from treadle.passes.memory import after
from treadle.passes.memory.apply import Recompute, UpdateEarly, passes_of, require_same
from treadle.passes.memory.choose import fastest_plan, plan_memory
from treadle.passes.memory.classify import classify
from treadle.passes.memory.masks import ReadMasksAsBytes
from treadle.passes.memory.order import as_traced, facts_of
from treadle.passes.memory.rematerialise import rematerialise
from treadle.passes.memory.search import candidates
from treadle.targets.cpu import CPU_MODEL
from treadle.targets.cuda import H200
from treadle.util.sizes import Budget

aten = torch.ops.aten


X, W = torch.randn(4, 4), torch.randn(4, 4)


def layer(x, w):
    h = aten.mm(x, w)
    a = aten.relu(h)
    y = aten.mm(a, w)
    b = aten.t(a)
    g = aten.mm(b, y)
    return y, g


def test_what_is_not_kept_is_computed_again():
    step = check_pass(
        Recompute(frozenset({"mm", "mm_1"})),
        layer,
        (X, W),
        backward_from="t",
        after="""
            x: f32[4, 4]
            w: f32[4, 4]
            mm: f32[4, 4] = mm(x, w)
            relu: f32[4, 4] = relu(mm)
            mm.1: f32[4, 4] = mm(relu, w)
            relu.1: f32[4, 4] = relu(mm)
            t: f32[4, 4] = t(relu.1)
            mm.2: f32[4, 4] = mm(t, mm.1)
            return [mm.1, mm.2]
        """,
    )
    (again,) = [node for node in step.graph.nodes if info(node).recomputed]
    assert info(again).phase == "backward"


def test_each_node_that_is_computed_again_is_a_change():
    step = trace(layer, X, W, backward_from="t")
    (report,) = run_passes(step, [Recompute(frozenset())])
    assert (report.matches, report.nodes_before, report.nodes_after) == (2, 8, 10)
    assert report.name == "Recompute(all but 0 values)"


def test_what_nothing_reads_is_gone():
    check_pass(
        Recompute(frozenset()),
        lambda x: (x.exp(), x.neg())[0],
        (X,),
        after="""
            x: f32[4, 4]
            exp: f32[4, 4] = exp(x)
            return [exp]
        """,
    )


def test_a_plan_that_keeps_all_leaves_the_graph_alone():
    step = trace(layer, X, W, backward_from="t")
    graph, text = step.graph, show_plain(step)
    assert Recompute(frozenset({"mm", "relu", "mm_1"})).run(step) == 0
    assert step.graph is graph
    assert show_plain(step) == text


def updates(w1, w2, x):
    g1 = aten.mm(x, w1)
    g2 = aten.mm(g1, w2)
    n1 = aten.sub(w1, g1)
    n2 = aten.sub(w2, g2)
    return n1, n2


def late(step: StepGraph) -> StepGraph:
    """The same step, its differences of the optimizer's phase."""
    for node in step.graph.find_nodes(op="call_function", target=aten.sub.Tensor):
        with_info(node, phase="optimizer")
    return step


def test_updates_run_as_soon_as_their_gradients_are_final():
    inputs = (X, W, torch.randn(4, 4))
    step = late(trace(updates, *inputs, writes={0: 0, 1: 1}))
    (report,) = run_passes(step, [UpdateEarly()])
    assert report.matches == 1
    assert show_plain(step).splitlines()[3:] == [
        "mm: f32[4, 4] = mm(x, w1)",
        "sub: f32[4, 4] = sub.Tensor(w1, mm)",
        "mm.1: f32[4, 4] = mm(mm, w2)",
        "sub.1: f32[4, 4] = sub.Tensor(w2, mm.1)",
        "return []",
        "w1 <- sub",
        "w2 <- sub.1",
    ]
    check_numbers(step, updates, inputs)
    assert UpdateEarly().run(step) == 0


def test_an_update_waits_for_the_last_reader_of_what_it_overwrites():
    def program(w, x):
        g = aten.mm(x, w)
        n = aten.sub(w, g)
        y = aten.mm(g, w)
        return n, y

    step = late(trace(program, X, W, writes={0: 0}))
    run_passes(step, [UpdateEarly()])
    assert [node.name for node in step.graph.nodes][-4:] == ["mm", "mm_1", "sub", "output"]
    assert UpdateEarly().run(step) == 0


def test_masks_are_drawn_and_read_as_bytes():
    check_pass(
        ReadMasksAsBytes(),
        lambda x: x * aten.bernoulli.p(aten.empty_like(x), 0.5),
        (X,),
        after="""
            x: f32[4, 4]
            empty_like: f32[4, 4] = empty_like(x)
            empty_like.1: b1[4, 4] = empty_like(empty_like, dtype=b1)
            bernoulli: b1[4, 4] = bernoulli.p(empty_like.1, 0.5)
            _to_copy: f32[4, 4] = _to_copy(bernoulli, dtype=f32)
            mul: f32[4, 4] = mul.Tensor(x, _to_copy)
            return [mul]
        """,
    )


def test_a_mask_that_cannot_be_drawn_as_bytes_is_kept_as_such():
    """Its probabilities are in a tensor: how PyTorch draws it depends on its type."""
    check_pass(
        ReadMasksAsBytes(),
        lambda x, p: x * aten.bernoulli.default(p),
        (X, torch.rand(4, 4)),
        after="""
            x: f32[4, 4]
            p: f32[4, 4]
            bernoulli: f32[4, 4] = bernoulli(p)
            _to_copy: b1[4, 4] = _to_copy(bernoulli, dtype=b1)
            _to_copy.1: f32[4, 4] = _to_copy(_to_copy, dtype=f32)
            mul: f32[4, 4] = mul.Tensor(x, _to_copy.1)
            return [mul]
        """,
    )


def test_a_mask_that_is_read_as_bytes_already_is_left_alone():
    step = trace(lambda p: aten.bernoulli.default(p).bool(), torch.rand(4, 4))
    text = show_plain(step)
    assert ReadMasksAsBytes().run(step) == 0
    assert show_plain(step) == text


def test_a_step_without_masks_is_left_alone():
    step = trace(lambda x: x * 2, X)
    text = show_plain(step)
    assert ReadMasksAsBytes().run(step) == 0
    assert show_plain(step) == text


def assert_applied(step: StepGraph) -> int:
    """Every candidate's passes make its graph, and have nothing left to do. How many did."""
    busy = 0
    for each in candidates(step, CPU_MODEL):
        passes = passes_of(step, each)
        made = step.copy()
        reports = run_passes(made, passes)
        require_same(made, each.step)
        assert show_plain(made) == show_plain(each.step)
        assert [one.run(made) for one in passes] == [0] * len(passes)
        busy += any(report.matches for report in reports)
    return busy


@pytest.mark.parametrize("clip", [False, True])
def test_the_passes_of_every_candidate_make_what_is_judged(clip):
    loss, parameters, batch = transformer(layers=2, width=16, heads=2, batch=2, length=8)
    assert assert_applied(traced(loss, parameters, batch, clip=clip)) > 3


def test_second_computations_of_a_checkpoint_are_told_from_those_of_the_plan():
    """Their names would be the same."""
    loss, parameters, batch = perceptron(layers=4, width=32, rows=16)
    step = traced(loss, parameters, batch)
    facts = facts_of(step)
    needed = sorted(classify(facts).needed)
    again = rematerialise(step, {facts.nodes[i] for i in needed[::2]})
    assert any(node.name.endswith("_again") for node in again.graph.nodes)
    assert_applied(again)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_graphs(seed):
    draw = random.Random(seed)
    plan = [(draw.randrange(5), draw.random(), draw.random()) for _ in range(10)]

    def loss(v, w, x):
        values = [x, x @ w]
        for what, a, b in plan:
            left, right = (values[int(each * len(values))] for each in (a, b))
            dropped = torch.nn.functional.dropout(left, 0.3)
            made = (left * right, left.tanh(), left @ v, left.softmax(-1) + right, dropped - right)
            values.append(made[what])
        return sum(value.sin().mean() for value in values) + v.mean()

    inputs = [torch.randn(6, 6), torch.randn(6, 6), torch.randn(7, 6)]
    assert_applied(traced(loss, inputs[:2], inputs[2:]))


def test_the_fastest_plan_is_applied_without_building_the_candidate():
    loss, parameters, batch = transformer(layers=2, width=16, heads=2, batch=2, length=8)
    step = traced(loss, parameters, batch)
    plan = fastest_plan(step, H200)
    made = step.copy()
    run_passes(made, plan.passes)
    assert "step" not in vars(plan.chosen)
    assert not plan.evaluated
    require_same(made, plan.step)


def test_a_graph_that_was_not_judged_is_refused():
    loss, parameters, batch = perceptron(layers=3, width=32, rows=16)
    step = traced(loss, parameters, batch)
    plan = plan_memory(step, Budget(0.0), CPU_MODEL, by_simulation)
    assert plan.evaluated
    assert "the plan was evaluated with" in refusal(lambda: require_same(step, plan.step))
    shorter = trace(lambda x: x.exp(), X)
    longer = trace(lambda x: x.exp(), X)
    longer.graph.create_node("output", "output", (None,), {})
    assert "another number of nodes" in refusal(lambda: require_same(shorter, longer))


def test_keeping_all_takes_no_pass():
    loss, parameters, batch = perceptron(layers=3, width=32, rows=16)
    step = traced(loss, parameters, batch)
    first, *rest = candidates(step, CPU_MODEL)
    everything = replace(first, order=as_traced(facts_of(step)))
    assert passes_of(step, everything) == ()
    assert show_plain(everything.step) == show_plain(step)
    assert all(passes_of(step, each) for each in rest)


@dataclass(frozen=True)
class ApproximateAgain(GraphPass):
    """What is computed again may be a little less exact: a pass that needs the plan."""

    def run(self, step):
        gelus = step.graph.find_nodes(op="call_function", target=aten.gelu.default)
        found = [node for node in gelus if info(node).recomputed and not node.kwargs]
        for node in found:
            node.kwargs = {"approximate": "tanh"}
        return len(found)


def test_a_pass_after_planning_is_judged_with_the_plan(monkeypatch):
    loss, parameters, batch = perceptron(layers=4, width=32, rows=160)
    step = traced(loss, parameters, batch)
    monkeypatch.setattr(after, "AFTER", (ApproximateAgain(),))
    evaluated = []

    def evaluator(each):
        evaluated.append(show_plain(each))
        return by_simulation(each)

    plan = plan_memory(step, Budget(0.0), CPU_MODEL, evaluator)
    made = step.copy()
    *_, last = run_passes(made, plan.passes)
    assert last.name == "ApproximateAgain()"
    assert last.matches > 0
    assert show_plain(made) in evaluated
    require_same(made, plan.step)


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ((Recompute(frozenset()), RemoveCommonSubexpressions()), "Recompute must run after Remove"),
        ((Recompute(frozenset()), ReadMasksAsBytes()), "Recompute must run after ReadMasksAsBytes"),
        ((UpdateEarly(), Recompute(frozenset())), "UpdateEarly must run after Recompute"),
    ],
)
def test_another_order_is_refused(passes, words):
    assert words in refusal(lambda: run_passes(trace(layer, X, W, backward_from="t"), passes))
