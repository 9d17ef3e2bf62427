"""Updates in two groups: for every optimizer, and for operations on lists."""

import pytest
import torch
from torch import nn

from counted import batch
from testing import refusal, show_plain
from treadle.capture.refuse import KNOWN_UPDATE_RULES
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.graph.analysis.dataflow import ancestors, is_list_call
from treadle.graph.analysis.execute import run_step
from treadle.graph.analysis.update_blocks import made_of_scalars, update_blocks
from treadle.graph.core.node_info import value_of
from treadle.graph.core.signature import Role
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.comm.carry.split_updates import SplitUpdates
from treadle.util.errors import VerifyError

KINDS = [
    kind for known in KNOWN_UPDATE_RULES for kind in known if kind is not torch.optim.SparseAdam
]  # it takes sparse gradients alone: contract/test_sparse_gradients.py


def captured(make, between=lambda model: None, kind=None):
    torch.manual_seed(0)
    bias = kind is None or kind.__name__ != "Muon"
    model = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(), nn.Linear(5, 5, bias=bias),
                          nn.ReLU(), nn.Linear(5, 3, bias=bias))  # fmt: skip
    optimizer = make(model)

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        between(model)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        return loss.detach()

    found = capture(
        step, models={"": model}, optimizers={"": optimizer} if optimizer else {}, args=batch(),
        kwargs={},
    )  # fmt: skip
    return clean(found.step)


def inputs_of(step):
    torch.manual_seed(1)
    numbers = {"step": 7.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "mu_product": 0.5}
    found = []
    for node, given in step.inputs():
        value = value_of(node)
        if given.role is Role.SCALAR:
            name = given.name.split(".")[1]
            found.append(torch.tensor(numbers.get(name, 0.1), dtype=torch.float64))
        else:
            made = torch.randn(value.shape)
            found.append(made.abs() + 0.1 if given.role is Role.STATE else made)
    return found


def update_groups(step):
    """The names of parameters whose updates share a node, scalars and operations on lists among
    them: of one optimizer's group, before it is split."""
    groups, scalars = [], made_of_scalars(step)
    for block in update_blocks(step).blocks:
        nodes, names = {*block.nodes, *ancestors(block.shared, scalars.__contains__)}, {block.name}
        nodes = {node for node in nodes if node.op == "call_function"}
        nodes |= {each for node in nodes for each in node.all_input_nodes if is_list_call(each)}
        for other in [each for each in groups if each[0] & nodes]:
            groups.remove(other)
            nodes, names = nodes | other[0], names | other[1]
        groups.append((nodes, names))
    return [names for _, names in groups]


def check(step, parameters):
    """Two groups, the same numbers, and nothing left for a second run."""
    before = run_step(step, inputs_of(step))
    assert len(update_groups(step)) == 1
    run_passes(step, [SplitUpdates(frozenset(parameters))])
    groups = update_groups(step)
    assert sorted(map(len, groups)) == sorted([len(parameters), _count(step) - len(parameters)])
    assert set(parameters) in groups
    after = run_step(step, inputs_of(step))
    assert all(map(torch.equal, before, after))
    assert SplitUpdates(frozenset(parameters)).run(step) == 0
    return groups


def _count(step):
    return len(update_blocks(step).blocks)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_by_two_gradients_into_two_groups(kind):
    """As the old form of this had it: by two of them, exactly two update blocks are left."""
    step = captured(lambda model: kind(model.parameters()), kind=kind)
    names = [each.name for each in update_blocks(step).blocks]
    assert len(check(step, names[1:3])) == 2


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}])
def test_with_options(options):
    step = captured(lambda model: torch.optim.Adam(model.parameters(), **options))
    check(step, ["0.weight", "2.bias", "4.bias"])


def by_lists(model):
    """Momentum by operations on lists, with a rate that is computed once."""
    parameters = list(model.parameters())
    gradients = [each.grad for each in parameters]
    with torch.no_grad():
        scaled = torch._foreach_mul(gradients, [0.1 * (at + 1) for at in range(len(parameters))])
        decayed = torch._foreach_add(scaled, parameters, alpha=0.01)
        torch._foreach_sub_(parameters, decayed)


@pytest.mark.parametrize("chosen", [["0.weight", "4.bias"], ["2.bias"], ["0.weight", "0.bias"]])
def test_lists_are_parted_element_by_element(chosen):
    step = captured(lambda model: None, between=by_lists)
    lists = [each for each in step.graph.nodes if "_foreach_" in str(each.target)]
    assert len(lists) == 3
    check(step, chosen)
    after = [each for each in step.graph.nodes if "_foreach_" in str(each.target)]
    assert len(after) == 6
    assert sorted(len(each.args[0]) for each in after) == sorted([len(chosen), 6 - len(chosen)] * 3)


def test_an_optimizer_of_two_groups_is_split_between_them_already():
    step = captured(lambda model: torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": [*model[2].parameters(),
                                                        *model[4].parameters()], "lr": 0.2}],
        lr=0.1,
    ))  # fmt: skip
    assert sorted(map(len, update_groups(step))) == [2, 4]
    assert SplitUpdates(frozenset(["0.weight", "0.bias"])).run(step) == 0


@pytest.mark.parametrize(("names", "words"), [
    ([], "an empty set"),
    ([f"{at}.{name}" for at in (0, 2, 4) for name in ("weight", "bias")], "all param"),
    (["0.weight", "lost"], "'lost'"),
])  # fmt: skip
def test_refused(names, words):
    step = captured(lambda model: torch.optim.Adam(model.parameters()))
    text = show_plain(step)
    with pytest.raises(VerifyError) as found:
        SplitUpdates(frozenset(names)).run(step)
    assert words in found.value.message
    assert show_plain(step) == text


def test_refused_between_gradients_that_are_clipped_together():
    step = captured(
        lambda model: torch.optim.Adam(model.parameters()),
        between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )
    words = refusal(lambda: SplitUpdates(frozenset(["0.weight"])).run(step))
    assert "reads the gradients of both" in words


def test_what_is_split_off_by_lists_can_be_moved():
    from treadle.passes.comm.carry.carried_nodes import carried
    from treadle.passes.comm.carry.moves import update_moves

    step = captured(lambda model: None, between=by_lists)
    assert "reads _foreach_mul" in refusal(lambda: carried(step, update_moves(step, ["4.bias"])))
    run_passes(step, [SplitUpdates(frozenset(["4.bias"]))])
    assert carried(step, update_moves(step, ["4.bias"])).carried
