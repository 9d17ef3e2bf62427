"""The update of each parameter is found by structure, for every optimizer."""

import copy

import pytest
import torch
from torch import nn

from treadle.capture.optimizers.registry import update_rules
from treadle.capture.refuse import KNOWN_UPDATE_RULES
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.graph.analysis.update_blocks import update_blocks
from treadle.graph.core.node_info import info
from treadle.graph.core.signature import Role
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.cleanup.dce import RemoveDeadCode
from treadle.passes.cleanup.noops import RemoveNoOps

OPTIM = torch.optim
OPTIONS = {
    OPTIM.SGD: ({}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}),
    OPTIM.Adam: ({}, {"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}),
    OPTIM.AdamW: ({}, {"amsgrad": True}),
    OPTIM.RMSprop: ({}, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    OPTIM.NAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    OPTIM.RAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
}
SUPPORTED = [
    kind for known in KNOWN_UPDATE_RULES for kind in known if kind is not torch.optim.SparseAdam
]  # it takes sparse gradients alone: contract/test_sparse_gradients.py
CASES = [(kind, options) for kind in SUPPORTED for options in OPTIONS.get(kind, ({},))]


def small_model(kind):
    """Muon takes matrices alone."""
    bias = kind.__name__ != "Muon"
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(), nn.Linear(5, 3, bias=bias))


def training(model, optimizer, between=lambda: None, after=lambda: None):
    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return loss.detach()

    return step


def captured(model, optimizer, **hooks):
    given = torch.randn(6, 4), torch.randn(6, 3)
    found = capture(
        training(model, optimizer, **hooks),
        models={"": model},
        optimizers={"": optimizer},
        args=given,
        kwargs={},
    )
    return found.step


def test_the_cases_are_all_optimizers_that_have_a_form():
    assert set(SUPPORTED) <= set(update_rules())
    assert len(SUPPORTED) >= 13


@pytest.mark.parametrize("cleaned", [False, True], ids=["captured", "clean"])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_every_optimizer_is_one_block_per_parameter(kind, options, cleaned):
    model = small_model(kind)
    step = captured(model, kind(model.parameters(), **options))
    step = clean(step) if cleaned else step
    found = update_blocks(step)
    assert [each.name for each in found.blocks] == [name for name, _ in model.named_parameters()]
    assert not found.couplings
    inputs = step.signature.inputs
    claimed = []
    for block in found.blocks:
        (gradient,) = block.gradients
        negated = options.get("maximize") and gradient.target is torch.ops.aten.neg.default
        assert negated or info(gradient).phase == "backward"
        states = [inputs[at].name for at in block.states]
        assert all(name.endswith(f"[{block.name}]") for name in states)
        written = {output.writes for output in (step.signature.outputs[at] for at in block.writes)}
        assert written == {block.parameter, *block.states}
        assert block.scalars
        assert all(inputs[at].role is Role.SCALAR for at in block.scalars)
        claimed += [*block.nodes, *states]
    assert len(claimed) == len(set(claimed)), "a node or state belongs to two blocks"
    states = {each.name for each in inputs if each.role is Role.STATE}
    assert states <= set(claimed), "a state belongs to no block"


def test_what_is_ahead_of_an_update_is_no_part_of_it():
    model = small_model(OPTIM.Adam)

    def scale():
        for each in model.parameters():
            each.grad.mul_(0.5)

    step = clean(captured(model, OPTIM.Adam(model.parameters()), between=scale))
    for block in update_blocks(step).blocks:
        (gradient,) = block.gradients
        assert gradient.target is torch.ops.aten.mul.Tensor
        assert info(gradient).phase == "optimizer"
        assert gradient not in block.nodes


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_by_tensor(model):
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).max()
    for each in model.parameters():
        each.grad.mul_(1.0 / norm)


def skipped(model):
    bad = torch.stack([each.grad.isfinite().all() for each in model.parameters()]).all()
    for each in model.parameters():
        each.grad.copy_(torch.where(bad, each.grad, 0.0))


@pytest.mark.parametrize("between", [clipped, clipped_by_tensor, skipped])
def test_coupled_gradients_are_seen(between):
    model = small_model(OPTIM.Adam)
    optimizer = OPTIM.Adam(model.parameters())
    step = clean(captured(model, optimizer, between=lambda: between(model)))
    found = update_blocks(step)
    names = {each.parameter for each in found.couplings}
    assert names == {name for name, _ in model.named_parameters()}
    assert all(each.other != each.parameter for each in found.couplings)
    assert all(len(each.node.all_input_nodes) > 1 for each in found.couplings)


def test_clipping_each_gradient_by_itself_couples_nothing():
    model = small_model(OPTIM.Adam)

    def each_alone():
        for each in model.parameters():
            nn.utils.clip_grad_norm_([each], 0.1)

    step = clean(captured(model, OPTIM.Adam(model.parameters()), between=each_alone))
    assert not update_blocks(step).couplings


def test_equal_gradients_that_were_merged_couple_nothing():
    left, right = nn.Linear(4, 3), nn.Linear(4, 3)
    model = nn.ModuleList([left, right])
    optimizer = OPTIM.Adam(model.parameters())

    def step(x, y):
        loss = (left(x) + right(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = capture(
        step,
        models={"": model},
        optimizers={"": optimizer},
        args=(torch.randn(6, 4), torch.randn(6, 3)),
        kwargs={},
    )
    blocks = update_blocks(clean(found.step))
    assert len(blocks.blocks) == 4
    assert not blocks.couplings
    gradients = [each.gradients for each in blocks.blocks]
    assert len(set(gradients)) == 2, "the merged ones are not merged: the test is about nothing"


def test_an_average_of_a_parameter_is_no_part_of_its_update():
    model = small_model(OPTIM.Adam)
    average = copy.deepcopy(model).requires_grad_(False)
    both = nn.ModuleList([model, average])
    optimizer = OPTIM.Adam(model.parameters())

    def follow():
        with torch.no_grad():
            for mean, each in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(each, 0.1)

    found = capture(
        training(model, optimizer, after=follow),
        models={"": both},
        optimizers={"": optimizer},
        args=(torch.randn(6, 4), torch.randn(6, 3)),
        kwargs={},
    )
    step = clean(found.step)
    blocks = update_blocks(step).by_name
    block, follower = blocks["0.0.weight"], blocks["1.0.weight"]
    assert not set(block.nodes) & set(follower.nodes)
    assert [step.signature.inputs[at].name for at in block.states] == [
        "adam.exp_avg[0.0.weight]",
        "adam.exp_avg_sq[0.0.weight]",
    ]
    assert not follower.states


def test_updates_by_lists_are_seen_through():
    model = small_model(OPTIM.Adam)
    parameters = list(model.parameters())

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            gradients = [each.grad for each in parameters]
            torch._foreach_add_(parameters, gradients, alpha=-0.1)
        model.zero_grad()

    found = capture(
        step,
        models={"": model},
        optimizers={},
        args=(torch.randn(6, 4), torch.randn(6, 3)),
        kwargs={},
    )
    blocks = update_blocks(clean(found.step))
    assert len(blocks.blocks) == 4
    assert not blocks.couplings
    assert all(len(each.gradients) == 1 for each in blocks.blocks)


def test_a_step_without_updates_has_no_blocks():
    model = small_model(OPTIM.Adam)
    step = capture(
        lambda x: model(x).sum(), models={"": model}, optimizers={}, args=(torch.randn(2, 4),),
        kwargs={},
    ).step  # fmt: skip
    assert update_blocks(step).blocks == ()


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_cleaning_leaves_no_copies_of_tracing(kind, options):
    """Between a gradient and a write-back nothing is left that returns what it was given."""
    model = small_model(kind)
    step = captured(model, kind(model.parameters(), **options))
    run_passes(step, [RemoveNoOps(), RemoveDeadCode()])
    late = [node for node in step.graph.nodes if info(node).phase == "optimizer"]
    aten = torch.ops.aten
    copies = (aten.clone.default, aten.detach.default, aten.alias.default, aten.copy.default)
    assert not [node for node in late if node.target in copies]
    assert all(node.users for node in late), "nobody reads a node of the update"


def test_copies_of_the_users_stay():
    model = small_model(OPTIM.Adam)
    optimizer = OPTIM.Adam(model.parameters())

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        return before, model[0].weight.grad

    found = capture(
        step,
        models={"": model},
        optimizers={"": optimizer},
        args=(torch.randn(6, 4), torch.randn(6, 3)),
        kwargs={},
    )
    cleaned = clean(found.step)
    (kept,) = cleaned.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert cleaned.returned[0] is kept
