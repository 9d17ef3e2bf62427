import torch

from testing import check_numbers, node_of, trace
from treadle.graph.analysis.alias import analyse, storages
from treadle.graph.core.node_info import info, with_info
from treadle.graph.core.values import compute, inherit, refresh
from treadle.graph.core.verify import verify
from treadle.graph.text.printing import show
from treadle.passes.cleanup.noops import RemoveNoOps

aten = torch.ops.aten
X = torch.randn(2, 6)


def test_new_nodes_get_value_and_origin():
    step = trace(lambda x: x.exp().sum(), X)
    root = node_of(step, aten.sum.default)
    with_info(root, phase="backward", where="net.py:3", module="h.1")
    with step.graph.inserting_before(root):
        full = step.graph.call_function(aten.full.default, ([2, 6], 1.0))
    inherit(full, root)
    assert full.meta["val"].shape == (2, 6)
    assert full.meta["val"].fake_mode is root.meta["val"].fake_mode
    assert (info(full).phase, info(full).where, info(full).module) == (
        "backward",
        "net.py:3",
        "h.1",
    )


def test_computing_draws_no_random_numbers():
    step = trace(lambda x: torch.rand_like(x), X)
    before = torch.get_rng_state()
    compute(node_of(step, aten.rand_like.default))
    assert torch.equal(torch.get_rng_state(), before)


def test_views_follow_their_new_base():
    step = trace(lambda x: x.clone().view(-1).t().exp(), X)
    clone, exp = node_of(step, aten.clone.default), node_of(step, aten.exp.default)
    before = storages(exp.meta["val"])
    clone.replace_all_uses_with(step.placeholders[0])
    step.graph.erase_node(clone)
    refresh(step.graph, step.placeholders)
    assert analyse(step).base(node_of(step, aten.view.default)) is not None
    assert analyse(step).base(node_of(step, aten.t.default)) is not None
    assert storages(exp.meta["val"]) == before


def test_types_follow_their_operands():
    step = trace(lambda x: x.exp().neg(), torch.randn(4, 3))
    exp, neg = node_of(step, aten.exp.default), node_of(step, aten.neg.default)
    with step.graph.inserting_before(exp):
        t = step.graph.call_function(aten.t.default, (step.placeholders[0],))
    inherit(t, exp)
    exp.replace_input_with(step.placeholders[0], t)
    refresh(step.graph, [t])
    assert neg.meta["val"].shape == (3, 4)
    assert neg.meta["val"].stride() == (1, 3)


def test_a_copy_is_independent():
    def program(x):
        values, _ = x.clone().max(dim=1)
        return values + torch.tensor([1.0, 2.0]), None

    step = trace(program, X, writes={})
    before = show(step, exact=True)
    copy = step.copy()
    assert show(copy, exact=True) == before
    assert RemoveNoOps().run(copy) > 0
    verify(copy)
    check_numbers(copy, program, (X,))
    assert show(step, exact=True) == before
    verify(step)
    with_info(node_of(copy, aten.add.Tensor), phase="backward")
    assert info(node_of(step, aten.add.Tensor)).phase == "forward"
