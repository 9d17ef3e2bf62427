import torch

from testing import check_numbers, node_of, show_plain, trace
from treadle.graph.rewrite.passes import run_passes
from treadle.passes.cleanup.dce import RemoveDeadCode

aten = torch.ops.aten


def dead(step, target, *args, **kwargs):
    """An operation nobody reads, at the start of the work; tracing would have dropped it."""
    first = next(node for node in step.graph.nodes if node.op == "call_function")
    with step.graph.inserting_before(first):
        node = step.graph.call_function(target, args, kwargs)
    node.meta |= first.meta | {"val": args[0].meta["val"]}
    return node


def program(x, unused):
    return x.neg()


INPUTS = (torch.randn(2, 3), torch.randn(4))
AFTER = """x: f32[2, 3]
unused: f32[4]
neg: f32[2, 3] = neg(x)
return [neg]"""


def test_chains_go_and_inputs_stay():
    step = trace(program, *INPUTS)
    relu = dead(step, aten.relu.default, step.placeholders[0])
    with step.graph.inserting_after(relu):
        exp = step.graph.call_function(aten.exp.default, (relu,))
    exp.meta |= relu.meta
    (report,) = run_passes(step, [RemoveDeadCode()])
    assert report.matches == 2
    assert report.nodes_before - report.nodes_after == 2
    assert show_plain(step) == AFTER
    check_numbers(step, program, INPUTS)
    assert RemoveDeadCode().run(step) == 0


def test_unread_random_numbers_advance_the_generator():
    step = trace(lambda x, unused: x + torch.rand_like(x), *INPUTS)
    dead(step, aten.bernoulli.p, step.placeholders[1], 0.5)

    def eager(x, unused):
        torch.bernoulli(unused, 0.5)
        return x + torch.rand_like(x)

    assert RemoveDeadCode().run(step) == 0
    check_numbers(step, eager, INPUTS)
    assert RemoveDeadCode(keep_random=False).run(step) == 1
    assert not step.graph.find_nodes(op="call_function", target=aten.bernoulli.p)


def test_checks_stay():
    step = trace(program, *INPUTS)
    dead(step, aten._assert_async.default, step.placeholders[0])
    assert RemoveDeadCode(keep_random=False).run(step) == 0
    assert node_of(step, aten._assert_async.default)
