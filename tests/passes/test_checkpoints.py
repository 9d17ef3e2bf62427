"""Checkpointing's wishes and rules, on graphs; tests/contract/test_checkpointing.py has steps."""

import pytest
import torch

from testing import trace
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.signature import StepGraph
from treadle.graph.rewrite.passes import run_passes
from treadle.graph.text.printing import show
from treadle.passes.checkpoints import RecomputeMarked, SettleCheckpoints
from treadle.passes.cleanup.cse import RemoveCommonSubexpressions

aten = torch.ops.aten
X, W = torch.randn(4, 4), torch.randn(4, 4)


def twice(mark: str = "", region: int | None = 1) -> StepGraph:
    """A region run in the forward pass and again in the backward pass."""

    def program(x, w):
        h = aten.mm(x, w)
        y = aten.exp(h)
        h2 = aten.mm(x, w)
        y2 = aten.exp(h2)
        return aten.sum(y), aten.mul(y2, h2)

    step = trace(program, X, W, backward_from="mm_1")
    forward = True
    for node in step.graph.nodes:
        forward &= node.name != "mm_1"
        if node.name in ("mm_1", "exp_1") and region is not None:
            with_info(node, region=region)
        if node.name in ("mm", "exp") and mark:
            with_info(node, asked=mark)
    return step


def products(step: StepGraph) -> int:
    return sum(node.target is aten.mm.default for node in step.graph.nodes)


@pytest.mark.parametrize(
    ("mark", "budgeted", "left"),
    [
        ("", False, 2),
        ("", True, 1),
        ("prefer_recompute", False, 2),
        ("prefer_recompute", True, 1),
        ("must_recompute", False, 2),
        ("must_recompute", True, 2),
    ],
)
def test_a_wish_gives_way_to_a_budget_and_a_rule_does_not(mark, budgeted, left):
    step = twice(mark)
    run_passes(step, (SettleCheckpoints(budgeted),))
    assert SettleCheckpoints(budgeted).run(step) == 0
    run_passes(step, (RemoveCommonSubexpressions(),))
    run_passes(step, (RecomputeMarked(budgeted),))
    assert RecomputeMarked(budgeted).run(step) == 0
    assert products(step) == left


@pytest.mark.parametrize(("budgeted", "mark"), [(False, "must_save"), (True, "")])
def test_a_value_that_is_better_kept(budgeted, mark):
    step = twice("prefer_save", region=None)
    run_passes(step, (SettleCheckpoints(budgeted),))
    asked = {node.name: info(node).asked for node in step.graph.nodes}
    assert asked["mm"] == asked["exp"] == mark


def once(mark: str) -> StepGraph:
    """Two regions traced once, the second reading the first, as AOTAutograd has them."""

    def program(x, w):
        a = aten.exp(aten.mm(x, w))
        b = aten.sin(aten.mm(a, w))
        return aten.sum(b), aten.mul(aten.cos(b), a)

    step = trace(program, X, W, backward_from="cos")
    for node in step.graph.nodes:
        if node.name in ("mm", "exp", "mm_1", "sin"):
            with_info(node, asked=mark, checkpoint=int(node.name in ("mm_1", "sin")))
    return step


@pytest.mark.parametrize("budgeted", [False, True])
def test_a_value_between_two_regions_is_kept(budgeted):
    """``exp`` is read by the second region: kept; ``mm_1`` and ``sin`` are computed again, for
    ``sin`` is read by the backward pass, and ``sum`` of the forward pass keeps it."""
    step = once("must_recompute")
    run_passes(step, (RecomputeMarked(budgeted),))
    assert RecomputeMarked(budgeted).run(step) == 0
    targets = [node.target for node in step.graph.nodes if node.op == "call_function"]
    assert targets.count(aten.exp.default) == 1
    assert targets.count(aten.sin.default) == 1  # the loss outside reads it: kept as well
    assert not any(info(node).asked for node in step.graph.nodes)


def test_without_marks_nothing_happens():
    for mark, budgeted in (("prefer_save", False), ("prefer_recompute", True)):
        step = once(mark)
        before = show(step)
        assert RecomputeMarked(budgeted).run(step) == 0
        assert show(step) == before
